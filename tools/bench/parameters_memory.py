"""Resident memory of a worker at each stage of sharding, and PyTorch's FSDP2 and DDP.

Above what a process has without parameters: one that trains a model of as many layers
and units, next to no values in them, over a transport that has sent as much.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from tfdp.launch.bench.machine import torch_version
from tfdp.launch.bench.models import Model
from tfdp.launch.bench.sides import Side, started
from tools.bench.models import EMPTY, LARGE
from tools.bench.parameters import TORCH_VARIANTS
from tools.bench.report import Arguments, Figure, Report

MB = 1e6
BATCH_SIZE = 1
# oneDNN and glibc keep what is freed, for later.
WITHOUT_CACHES = {"TF_ENABLE_ONEDNN_OPTS": "0", "MALLOC_MMAP_THRESHOLD_": "100000"}
# A slope over these is memory of activations: at such sizes they are at the peak.
BATCHES_OF_SLOPE = (16, 32)
SLOTS = {"adam": 2, "sgd": 0}
STEPS = 3
_DEFERRED: dict[str, Any] = {"sharding": "parameters", "init": "deferred"}
VARIANTS: dict[str, dict[str, Any]] = {
    "stage 0": {"sharding": "none"},
    "stage 1": {"sharding": "optimizer"},
    "stage 2": {"sharding": "gradients"},
    "stage 3": {"sharding": "parameters"},
    "stage 3, deferred": _DEFERRED,
    "stage 3, deferred, kept": {**_DEFERRED, "reshard_after_forward": False},
}
# Which of them are measured: the rest says nothing new.
MEASURED: dict[tuple[int, str], tuple[str, ...]] = {
    (2, "adam"): tuple(VARIANTS),
    (4, "adam"): ("stage 0", "stage 1", "stage 2", "stage 3, deferred"),
    (2, "sgd"): ("stage 0", "stage 2", "stage 3, deferred"),
}
# What a process has without parameters depends on the graph only: by variant.
_BASE_OF = {"stage 0": "stage 0", "stage 1": "stage 2", "stage 2": "stage 2"}
_BASE_OF_SHARDED = "stage 3, deferred"
_TORCH_WORKER = "tools.bench.fsdp_worker"
LIMIT = 1.1
# As many units as the large model has by default.
_BUCKET_MB_OF_EMPTY = 4 * EMPTY.num_parameters / 8 / 2**20
# Gathered: the unit that computes, the one before it that is not freed yet, and what
# is prefetched. Gradients of two units wait to be reduced.
_UNITS_GATHERED, _UNITS_OF_GRADIENTS = 2 + 1, 2


@dataclasses.dataclass(frozen=True)
class Peaks:
    """Bytes of the worker that has most.

    Args:
        start: Int, the peak while the model and the optimizer are made.
        step: Int, the peak in training steps.
        resident: Int, what there is between two steps.
        largest_unit: Int, parameters of the largest unit, 0 where all are whole.
    """

    start: int
    step: int
    resident: int
    largest_unit: int = 0

    def above(self, base: Peaks) -> Peaks:
        """The same above another process."""
        return Peaks(
            self.start - base.start,
            self.step - base.step,
            self.resident - base.resident,
            self.largest_unit,
        )

    def __str__(self) -> str:
        pairs = ("start", self.start), ("step", self.step), ("between", self.resident)
        return ", ".join(f"{name} {size / MB:.0f} MB" for name, size in pairs)


def run(args: Arguments) -> None:
    """Measure the transformer of 200 MB with Adam and with SGD."""
    torch = torch_version(args.torch_python)
    setting = {
        "benchmark": "peak of resident memory of a worker, above a worker with next to "
        "no parameters",
        "model": str(LARGE),
        "batch": f"{BATCH_SIZE} for each worker",
        "environment": " ".join(f"{k}={v}" for k, v in WITHOUT_CACHES.items()),
        "torch": torch or "not installed: no comparison with FSDP2",
    }
    report = Report(args, setting)
    activations = _activation_bytes() * BATCH_SIZE
    report.add(Figure("activations, MB", round(activations / MB, 1)))
    for (num_workers, optimizer), variants in MEASURED.items():
        table = _Table(report, optimizer, num_workers, activations)
        for variant in variants:
            table.measure(variant)
        for variant in TORCH_VARIANTS if torch is not None else ():
            table.measure_torch(variant, args.torch_python)
    report.finish()


class _Table:
    """The figures of one optimizer and one number of workers.

    Args:
        report: `Report`, which gets them.
        optimizer: String, its name.
        num_workers: Int.
        activations: Float, bytes of them.
    """

    def __init__(
        self, report: Report, optimizer: str, num_workers: int, activations: float
    ) -> None:
        self._report = report
        self._optimizer, self._num_workers = optimizer, num_workers
        self._activations = activations
        self._title = f"{optimizer}, {num_workers} workers"

    def measure(self, variant: str) -> None:
        """Train at a stage."""
        base = _base(_BASE_OF.get(variant, _BASE_OF_SHARDED), self._num_workers)
        found = _peaks(_setup(variant, self._optimizer), LARGE, self._num_workers)
        self._add(variant, found.above(base))

    def measure_torch(self, variant: str, python: str) -> None:
        """Train the same model by PyTorch."""
        base = _base_of_torch(variant, self._num_workers, python)
        setup = _setup_of_torch(variant, self._optimizer)
        found = _peaks(setup, LARGE, self._num_workers, python)
        self._add(f"PyTorch, {variant}", found.above(base))

    def _add(self, variant: str, found: Peaks) -> None:
        self._report.keep(
            "bytes", f"{self._title}, {variant}", dataclasses.asdict(found)
        )
        name = f"{self._title}, {variant}: peak in a step, MB"
        note = str(found)
        if not found.largest_unit or variant.endswith("kept"):
            self._report.add(Figure(name, round(found.step / MB), note=note))
            return
        bound = self._bound(found.largest_unit)
        note = f"{note}; largest unit {found.largest_unit / MB:.0f} MB"
        self._report.add(Figure(name, round(found.step / MB), note=note))
        name = (
            f"{self._title}, {variant}: peak in a step relative to {bound / MB:.0f} MB"
        )
        self._report.add(Figure(name, round(found.step / bound, 3), at_most=LIMIT))

    def _bound(self, largest_unit: int) -> float:
        """Bytes of shards, gathered units, gradients and activations."""
        state = 4 * LARGE.num_parameters * (1 + SLOTS[self._optimizer])
        units = (_UNITS_GATHERED + _UNITS_OF_GRADIENTS) * largest_unit
        return state / self._num_workers + units + self._activations


def _setup(
    variant: str, optimizer: str, batch_size: int = BATCH_SIZE
) -> dict[str, Any]:
    return {
        "benchmark": "memory",
        "strategy": "tfdp",
        "optimizer": optimizer,
        "batch_size": batch_size,
        "options": VARIANTS[variant],
    }


def _setup_of_torch(variant: str, optimizer: str) -> dict[str, Any]:
    return {
        "benchmark": "memory",
        "optimizer": optimizer,
        "batch_size": BATCH_SIZE,
        **TORCH_VARIANTS[variant],
    }


@functools.cache
def _base(variant: str, num_workers: int) -> Peaks:
    return _peaks(_setup(variant, "adam"), EMPTY, num_workers)


@functools.cache
def _base_of_torch(variant: str, num_workers: int, python: str) -> Peaks:
    return _peaks(_setup_of_torch(variant, "adam"), EMPTY, num_workers, python)


def _peaks(
    setup: dict[str, Any], model: Model, num_workers: int, python: str | None = None
) -> Peaks:
    """Train in processes of their own; `python` is that of PyTorch."""
    told = {**setup, "model": dataclasses.asdict(model)}
    module = "tools.bench.parameters_worker" if python is None else _TORCH_WORKER
    if model == EMPTY:
        told["communication"] = {"bucket_mb": _BUCKET_MB_OF_EMPTY}
    side = Side("memory", module, told, num_workers, python, WITHOUT_CACHES)
    with started(side):
        start = max(side.run("start", 1))
        step = max(side.run("step", STEPS))
        resident = max(side.run("resident", 1))
        return Peaks(start, step, resident, max(side.run("largest unit", 1)))


def _activation_bytes() -> float:
    """Bytes of the activations of one sample: the slope of the peak over the batch."""
    setups = [_setup("stage 0", "sgd", batch) for batch in BATCHES_OF_SLOPE]
    less, more = (_peaks(setup, LARGE, 1).step for setup in setups)
    first, last = BATCHES_OF_SLOPE
    return (more - less) / (last - first)
