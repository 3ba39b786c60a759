"""Step time with sharded parameters (ZeRO-3), against unsharded and ZeRO-2.

In two processes, and in one process of two devices. With bytes that a replica sends.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdp.bench.sides import Side, alternate, started
from tfdp.bench.stats import paired_ratio
from tools.bench.models import LARGE
from tools.bench.report import Arguments, Figure, Report

NUM_REPLICAS = 2
BATCH_SIZE = 4
ARMS: dict[str, dict[str, Any]] = {
    "stage 0": {"sharding": "none"},
    "stage 2": {"sharding": "gradients"},
    "stage 3": {"sharding": "parameters"},
    "stage 3, kept": {"sharding": "parameters", "reshard_after_forward": False},
    "stage 3, no prefetch": {"sharding": "parameters", "prefetch": 0},
}
# By arm and the arm that it is compared with: the goal.
COMPARED: dict[tuple[str, str], float | None] = {
    ("stage 2", "stage 0"): None,
    ("stage 3", "stage 0"): 1.35,
    ("stage 3", "stage 2"): 1.3,
    ("stage 3, kept", "stage 3"): None,
    ("stage 3, no prefetch", "stage 3"): None,
}
# Multiples of S (N - 1) / N that a replica sends for S bytes of parameters.
PASSES = {"stage 0": 2.0, "stage 2": 2.0, "stage 3": 3.0, "stage 3, kept": 2.0}


def run(args: Arguments) -> None:
    """Measure the transformer of 200 MB with SGD."""
    setting = {
        "benchmark": "step of a GradientTape loop with SGD, 1 thread for each replica, "
        "parameters sharded (ZeRO-3) and not",
        "model": str(LARGE),
        "batch": f"{BATCH_SIZE} for each replica",
    }
    report = Report(args, setting)
    for name, num_workers, devices in (("processes", 2, None), ("devices", 1, 2)):
        setup = {"devices": devices, "threads": devices}
        _measure(report, f"two {name}", num_workers, setup, args.blocks)
    report.finish()


def _measure(
    report: Report, title: str, num_workers: int, setup: dict[str, Any], blocks: int
) -> None:
    told = {
        "benchmark": "time",
        "strategy": "tfdp",
        "model": dataclasses.asdict(LARGE),
        "optimizer": "sgd",
        "batch_size": BATCH_SIZE,
        "arms": ARMS,
        **{name: value for name, value in setup.items() if value},
    }
    side = Side(title, "tools.bench.parameters_worker", told, num_workers=num_workers)
    with started(side):
        arms = [(side, arm) for arm in ARMS]
        times = alternate(arms, blocks=blocks, steps=1, warm_up=2)
        sent = {arm: side.run(f"{arm}/bytes", 1)[0] for arm in ARMS}
    report.add_times(times)
    for (arm, other), goal in COMPARED.items():
        ratio = paired_ratio(times[f"{title}/{arm}"], times[f"{title}/{other}"])
        name = f"{title}: step time of {arm} relative to {other}"
        report.add(Figure(name, ratio, at_most=goal))
    unit = 4 * LARGE.num_parameters * (NUM_REPLICAS - 1) / NUM_REPLICAS
    for arm, passes in PASSES.items():
        name = f"{title}: bytes that a replica sends in {arm}, in S (N - 1) / N"
        report.add(Figure(name, round(sent[arm] / unit, 3), at_most=1.01 * passes))
