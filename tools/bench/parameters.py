"""Step time with sharded parameters (ZeRO-3), against unsharded and ZeRO-2.

In two processes, and in one process of two devices; with the CPU time of a process and
the bytes that a replica sends. Beside PyTorch's FSDP2, relative to its own DDP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tfdp.launch.bench.machine import torch_version
from tfdp.launch.bench.sides import Ratio, Side, alternate, paired_ratio, started
from tools.bench.meters import Times, of_all
from tools.bench.models import LARGE
from tools.bench.report import Arguments, Figure, Report

NUM_REPLICAS = 2
BATCH_SIZE = 4
VARIANTS: dict[str, dict[str, Any]] = {
    "stage 0": {"sharding": "none"},
    "stage 2": {"sharding": "gradients"},
    "stage 3": {"sharding": "parameters"},
    "stage 3, kept": {"sharding": "parameters", "reshard_after_forward": False},
    "stage 3, no prefetch": {"sharding": "parameters", "prefetch": 0},
}
# By variant and the variant that it is compared with: the goal.
COMPARED: dict[tuple[str, str], float | None] = {
    ("stage 2", "stage 0"): None,
    ("stage 3", "stage 0"): 1.35,
    ("stage 3", "stage 2"): 1.3,
    ("stage 3, kept", "stage 3"): None,
    ("stage 3, no prefetch", "stage 3"): None,
}
TORCH_VARIANTS: dict[str, dict[str, Any]] = {
    "DDP": {"sharded": False},
    "FSDP2": {"sharded": True},
    "FSDP2, kept": {"sharded": True, "reshard_after_forward": False},
}
# Of the two frameworks, relative to their own unsharded steps.
BESIDE = {"stage 3": "FSDP2", "stage 3, kept": "FSDP2, kept"}
# Multiples of S (N - 1) / N that a replica sends for S bytes of parameters.
PASSES = {"stage 0": 2.0, "stage 2": 2.0, "stage 3": 3.0, "stage 3, kept": 2.0}


Blocks = Mapping[str, Sequence[Times]]


def run(args: Arguments) -> None:
    """Measure the transformer of 200 MB with SGD."""
    torch = torch_version(args.torch_python)
    setting = {
        "benchmark": "step of a GradientTape loop with SGD, 1 thread for each replica, "
        "parameters sharded (ZeRO-3) and not",
        "model": str(LARGE),
        "batch": f"{BATCH_SIZE} for each replica",
        "torch": torch or "not installed: no comparison with FSDP2",
    }
    report = Report(args, setting)
    python = None if torch is None else args.torch_python
    _measure(report, "two processes", _side(2), args.blocks, python)
    _measure(report, "two devices", _side(1, devices=2, threads=2), args.blocks)
    report.finish()


def _side(num_workers: int, **setup: Any) -> Side:
    told = {**_common(), **setup, "strategy": "tfdp", "variants": VARIANTS}
    return Side("tfdp", "tools.bench.parameters_worker", told, num_workers)


def _common() -> dict[str, Any]:
    model = dataclasses.asdict(LARGE)
    return {
        "benchmark": "time",
        "model": model,
        "optimizer": "sgd",
        "batch_size": BATCH_SIZE,
    }


def _measure(
    report: Report, title: str, ours: Side, blocks: int, python: str | None = None
) -> None:
    sides, variants = [ours], [(ours, variant) for variant in VARIANTS]
    if python is not None:
        told = {**_common(), "variants": TORCH_VARIANTS}
        theirs = Side("torch", "tools.bench.fsdp_worker", told, NUM_REPLICAS, python)
        sides.append(theirs)
        variants += [(theirs, variant) for variant in TORCH_VARIANTS]
    with started(*sides):
        found = alternate(variants, blocks=blocks, steps=1, warm_up=1, slowest=of_all)
        sent = {variant: ours.run(f"{variant}/bytes", 1)[0] for variant in PASSES}
    for what in ("seconds", "cpu_seconds"):
        times = {f"{title}, {n}: {what}": _of(found, n, what) for n in found}
        report.add_times(times)
    _add_ratios(report, title, found)
    if python is not None:
        _add_rivals(report, title, found)
    unit = 4 * LARGE.num_parameters * (NUM_REPLICAS - 1) / NUM_REPLICAS
    for variant, passes in PASSES.items():
        name = f"{title}: bytes that a replica sends in {variant}, in S (N - 1) / N"
        report.add(Figure(name, round(sent[variant] / unit, 3), at_most=1.01 * passes))


def _add_ratios(report: Report, title: str, found: Blocks) -> None:
    for (variant, other), goal in COMPARED.items():
        name = f"{title}: step time of {variant} relative to {other}"
        ratio = _ratio(found, f"tfdp/{variant}", f"tfdp/{other}")
        report.add(Figure(name, ratio, at_most=goal))
        ratio = _ratio(found, f"tfdp/{variant}", f"tfdp/{other}", "cpu_seconds")
        report.add(Figure(f"{name}, CPU time", ratio))


def _add_rivals(report: Report, title: str, found: Blocks) -> None:
    """Both frameworks relative to their own unsharded steps, and to each other."""
    for variant, rival in BESIDE.items():
        for what in ("seconds", "cpu_seconds"):
            note = "" if what == "seconds" else ", CPU time"
            name = f"{title}: step time of {rival} relative to DDP{note}"
            theirs = _ratio(found, f"torch/{rival}", "torch/DDP", what)
            report.add(Figure(name, theirs))
            name = f"{title}: step time of {variant} relative to {rival}{note}"
            report.add(
                Figure(name, _ratio(found, f"tfdp/{variant}", f"torch/{rival}", what))
            )
    ratio = _ratio(found, "tfdp/stage 0", "torch/DDP")
    report.add(Figure(f"{title}: step time of stage 0 relative to DDP", ratio))


def _ratio(found: Blocks, name: str, other: str, what: str = "seconds") -> Ratio:
    return paired_ratio(_of(found, name, what), _of(found, other, what))


def _of(found: Blocks, name: str, what: str) -> list[float]:
    return [block[what] for block in found[name]]
