"""Set-ups that `tfdp bench compare` measures: their processes and arms."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfdp.ground.onednn import VARIABLE, is_left_off
from tfdp.ground.text import pluralize
from tfdp.launch.bench.models import Model
from tfdp.launch.bench.sides import Side

DEFAULTS, TUNED = "defaults", "tuned"
DEVICES, WORKERS, PLAIN, STOCK, DDP = "devices", "workers", "plain", "stock", "ddp"
# Of the arm in which the processes of a set-up do not communicate.
ALONE = "no communication"
PACKS_MB = (1, 4, 25)
_GIBIBYTE = str(2**30)
# glibc keeps the memory of a large tensor that is freed for the next one, in place of
# giving it back to the system and getting new pages, which the kernel clears.
_KEPT_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": _GIBIBYTE,
    "MALLOC_TRIM_THRESHOLD_": _GIBIBYTE,
}
_FIT: dict[str, Any] = {"fit": True}
# What is tried to tune each, by what it is called.
_CHOICES: dict[str, dict[str, dict[str, Any]]] = {
    DEVICES: {"no XLA": _FIT, "jit_compile=True": {**_FIT, "jit_compile": True}},
    STOCK: {f"packs of {mb} MB": {"pack_bytes": mb * 2**20} for mb in PACKS_MB},
    DDP: {"": {"tuned": True}},
}
_CHOICES[WORKERS] = _CHOICES[PLAIN] = _CHOICES[DEVICES]
_DEFAULTS = {kind: {} if kind in (STOCK, DDP) else _FIT for kind in _CHOICES}


@dataclasses.dataclass(frozen=True)
class SetUp:
    """Processes that train with the same settings.

    Args:
        kind: String, `DEVICES`, `WORKERS`, `PLAIN`, `STOCK` or `DDP`.
        tuning: String, `DEFAULTS` or `TUNED`.
        num_workers: Int, N, the replicas of each set-up but `PLAIN`.
    """

    kind: str
    tuning: str
    num_workers: int

    @property
    def name(self) -> str:
        """String, for people."""
        processes = pluralize(self.num_workers, "process", "processes")
        return {
            DEVICES: f"tfdp, 1 process of {pluralize(self.num_workers, 'device')}",
            WORKERS: f"tfdp, {processes}",
            PLAIN: "plain Keras, all cores",
            STOCK: f"stock, {processes}",
            DDP: f"DDP, {processes}",
        }[self.kind]

    @property
    def choices(self) -> Mapping[str, Mapping[str, Any]]:
        """Mapping from a name, or `""` for one alone, to what an arm is told."""
        if self.tuning == TUNED:
            return _CHOICES[self.kind]
        return {"": _DEFAULTS[self.kind]}

    @property
    def arms(self) -> dict[str, dict[str, Any]]:
        """What each arm is told beside its model, by its name without the model's."""
        arms = {
            f", {choice}" if choice else "": dict(told)
            for choice, told in self.choices.items()
        }
        if self.kind in (DEVICES, PLAIN):
            return arms
        # What stock computes is the same with packs of any size.
        alone = list(arms)[:1] if self.kind == STOCK else list(arms)
        own = {f"{name}, {ALONE}": {**arms[name], "alone": True} for name in alone}
        return arms | own

    def key(self, model: str, choice: str) -> str:
        """The key of an arm's times: `side/arm`."""
        arm = f"{model}, {choice}" if choice else model
        return f"{self.kind}, {self.tuning}/{arm}"

    def key_alone(self, model: str, choice: str) -> str | None:
        """The key of its own step, or `None` where nothing is communicated.

        Devices of one process compute what workers do: the times are those of these.
        """
        if self.kind == PLAIN:
            return None
        kind = WORKERS if self.kind == DEVICES else self.kind
        if self.kind == STOCK:
            choice = next(iter(self.choices))
        own = dataclasses.replace(self, kind=kind)
        return f"{own.key(model, choice)}, {ALONE}"

    def side(
        self,
        models: Mapping[str, Model],
        batch_size: int,
        num_threads: int,
        torch_python: str,
    ) -> Side:
        """Start the processes.

        Args:
            models: Mapping from a name to a `Model`.
            batch_size: Int, samples of a replica.
            num_threads: Int, threads of a replica.
            torch_python: String, an interpreter that has PyTorch.

        Returns:
            A `Side`.
        """
        count = self.num_workers
        rows = batch_size * count if self.kind == PLAIN else batch_size
        of_kind: dict[str, dict[str, Any]] = {
            DEVICES: {"strategy": "auto", "devices": count},
            WORKERS: {"strategy": "tfdp"},
            PLAIN: {"strategy": "alone", "threads": None},
            STOCK: {"strategy": "stock"},
            DDP: {},
        }
        arms = {
            f"{name}{arm}": {
                **told,
                "model": dataclasses.asdict(model),
                "batch_size": rows,
            }
            for name, model in models.items()
            for arm, told in self.arms.items()
        }
        return Side(
            f"{self.kind}, {self.tuning}",
            "tfdp.launch.bench.torch_worker"
            if self.kind == DDP
            else "tfdp.launch.bench.training",
            {"arms": arms, "threads": num_threads, **of_kind[self.kind]},
            num_workers=1 if self.kind in (DEVICES, PLAIN) else count,
            python=torch_python if self.kind == DDP else None,
            environment=self._environment(),
        )

    def _environment(self) -> dict[str, str]:
        """Memory and kernels: without tfdp, TensorFlow has those of its own choice."""
        found = dict(_KEPT_MEMORY) if self.tuning == TUNED else {}
        if is_left_off():
            has_own = self.tuning == DEFAULTS and self.kind in (PLAIN, STOCK)
            found[VARIABLE] = "0" if has_own else "1"
        return found


def set_ups(num_workers: int, *, has_torch: bool) -> list[SetUp]:
    """All that are compared, those of tfdp first.

    Args:
        num_workers: Int.
        has_torch: Bool, whether DDP is among them.

    Returns:
        List of `SetUp`.
    """
    return [
        SetUp(kind, tuning, num_workers)
        for kind in (DEVICES, WORKERS, PLAIN, STOCK, *([DDP] if has_torch else []))
        for tuning in (DEFAULTS, TUNED)
    ]
