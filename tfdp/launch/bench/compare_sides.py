"""Set-ups that `tfdp bench compare` measures: their processes and variants."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfdp.ground.onednn import VARIABLE, is_disabled_by_default
from tfdp.ground.text import pluralize
from tfdp.launch.bench.models import Model
from tfdp.launch.bench.sides import Side

DEFAULTS, TUNED = "defaults", "tuned"
DEVICES, WORKERS, PLAIN, STOCK, DDP = "devices", "workers", "plain", "stock", "ddp"
# A variant with this suffix runs without communication. Its time is subtracted from
# that of the full variant, which leaves the cost of communication.
ALONE = "no communication"
# TensorFlow's own strategy sends gradients in packs: it is tuned by trying these sizes
# of a pack, in MiB.
PACKS_MB = (1, 4, 25)
_GIBIBYTE = str(2**30)
# Environment variables with which glibc keeps the freed memory of a large tensor for
# the next one. Otherwise glibc returns it to the system, and each large tensor costs
# the time in which the kernel clears new pages.
_KEPT_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": _GIBIBYTE,
    "MALLOC_TRIM_THRESHOLD_": _GIBIBYTE,
}
_FIT: dict[str, Any] = {"fit": True}
# A tuned set-up is represented by its fastest variant: these variants are tried for
# each kind of set-up, with their settings.
_CHOICES: dict[str, dict[str, dict[str, Any]]] = {
    DEVICES: {
        "no XLA": _FIT,
        "jit_compile=True": {**_FIT, "jit_compile": True},
        "steps_per_execution=8": {**_FIT, "steps_per_execution": 8},
    },
    STOCK: {f"packs of {mb} MB": {"pack_bytes": mb * 2**20} for mb in PACKS_MB},
    DDP: {"": {"tuned": True}},
}
_CHOICES[WORKERS] = _CHOICES[PLAIN] = _CHOICES[DEVICES]
_DEFAULTS = {kind: {} if kind in (STOCK, DDP) else _FIT for kind in _CHOICES}


@dataclasses.dataclass(frozen=True)
class SetUp:
    """A set-up to compare: processes that train with the same settings.

    Args:
        kind: String: `DEVICES`, tfdp with several devices of one process; `WORKERS`,
            tfdp with several processes; `PLAIN`, Keras alone, in one process; `STOCK`,
            TensorFlow's own strategy; or `DDP`, PyTorch.
        tuning: String: `DEFAULTS`, for default settings, or `TUNED`, for the fastest of
            several variants.
        num_workers: Int, number of replicas. `PLAIN` has a single one, whose batch is
            as large as those of `num_workers` replicas together.
    """

    kind: str
    tuning: str
    num_workers: int

    @property
    def name(self) -> str:
        """String, the name in tables and plots."""
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
        """Mapping from the name of each variant that is tried to its settings.

        A variant of a tuned set-up is a choice of settings, such as `jit_compile` or
        `pack_bytes`. A set-up with default settings has a single variant, named `""`.
        """
        if self.tuning == TUNED:
            return _CHOICES[self.kind]
        return {"": _DEFAULTS[self.kind]}

    @property
    def variants(self) -> dict[str, dict[str, Any]]:
        """Dict from the name of each measured variant to its settings.

        The variants are those of `choices` and, for a set-up of several processes, the
        same variants without communication; for the stock strategy, only the first is
        also measured without communication. A key is the part of the variant's name
        after the model's name. Model and batch size are not among the settings.
        """
        variants = {
            f", {choice}" if choice else "": dict(variant_settings)
            for choice, variant_settings in self.choices.items()
        }
        if self.kind in (DEVICES, PLAIN):
            return variants
        # The stock strategy computes the same with packs of any size, so one variant
        # without communication is enough.
        names = list(variants)[:1] if self.kind == STOCK else list(variants)
        alone = {
            f"{name}, {ALONE}": {**variants[name], "alone": True} for name in names
        }
        return variants | alone

    def key(self, model: str, choice: str) -> str:
        """Return the key under which a variant's step times are stored, `side/variant`.

        `side` is the kind and the tuning; `variant` is the model and `choice`.

        Args:
            model: String, name of the model that is trained.
            choice: String, a key of `choices`.
        """
        variant = f"{model}, {choice}" if choice else model
        return f"{self.kind}, {self.tuning}/{variant}"

    def key_without_communication(self, model: str, choice: str) -> str | None:
        """Return the key of a variant's step times without communication.

        It is the result of `key` with `", no communication"` at its end. `DEVICES` has
        the same keys as `WORKERS`, which computes the same. `STOCK` has one key for all
        choices, and `PLAIN` has `None`, since it never communicates.

        Args:
            model: String, name of the model.
            choice: String, a key of `choices`.
        """
        if self.kind == PLAIN:
            return None
        kind = WORKERS if self.kind == DEVICES else self.kind
        if self.kind == STOCK:
            choice = next(iter(self.choices))
        measured = dataclasses.replace(self, kind=kind)
        return f"{measured.key(model, choice)}, {ALONE}"

    def side(
        self,
        models: Mapping[str, Model],
        batch_size: int,
        num_threads: int,
        torch_python: str,
    ) -> Side:
        """Start the processes of the set-up.

        Args:
            models: Mapping from a name to a `Model`.
            batch_size: Int, number of samples of a replica.
            num_threads: Int, number of threads of a replica.
            torch_python: String, an interpreter that has PyTorch.

        Returns:
            `Side` of the started processes.
        """
        count = self.num_workers
        rows = batch_size * count if self.kind == PLAIN else batch_size
        kind_setup: dict[str, dict[str, Any]] = {
            DEVICES: {"strategy": "auto", "devices": count},
            WORKERS: {"strategy": "tfdp"},
            PLAIN: {"strategy": "alone", "threads": None},
            STOCK: {"strategy": "stock"},
            DDP: {},
        }
        variants = {
            f"{name}{variant}": {
                **variant_settings,
                "model": dataclasses.asdict(model),
                "batch_size": rows,
            }
            for name, model in models.items()
            for variant, variant_settings in self.variants.items()
        }
        return Side(
            f"{self.kind}, {self.tuning}",
            "tfdp.launch.bench.torch_worker"
            if self.kind == DDP
            else "tfdp.launch.bench.training",
            {"variants": variants, "threads": num_threads, **kind_setup[self.kind]},
            num_workers=1 if self.kind in (DEVICES, PLAIN) else count,
            python=torch_python if self.kind == DDP else None,
            environment=self._environment(),
        )

    def _environment(self) -> dict[str, str]:
        """Return additional environment variables for the processes of the set-up.

        With tuning, `malloc` keeps freed memory. On a processor for which TensorFlow
        leaves oneDNN off, a variable turns it on, or keeps it off for plain Keras and
        the stock strategy with their defaults. Other processors need no such variable.
        """
        variables = dict(_KEPT_MEMORY) if self.tuning == TUNED else {}
        if is_disabled_by_default():
            is_untouched = self.tuning == DEFAULTS and self.kind in (PLAIN, STOCK)
            variables[VARIABLE] = "0" if is_untouched else "1"
        return variables


def set_ups(num_workers: int, *, has_torch: bool) -> list[SetUp]:
    """Return all set-ups to compare, those of tfdp first.

    Args:
        num_workers: Int, number of replicas of each set-up.
        has_torch: Bool, whether DDP is included.

    Returns:
        List of `SetUp`.
    """
    return [
        SetUp(kind, tuning, num_workers)
        for kind in (DEVICES, WORKERS, PLAIN, STOCK, *([DDP] if has_torch else []))
        for tuning in (DEFAULTS, TUNED)
    ]
