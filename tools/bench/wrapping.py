"""What a `DistributedOptimizer` with nothing switched on costs in Keras `fit`."""

from __future__ import annotations

import argparse

from tools.bench.report import Figure, Report
from tools.bench.sides import Side, alternate, started
from tools.bench.stats import paired_ratio

ARMS = {"wrapped": "under no strategy", "wrapped, tfdp": "under tfdp.MirroredStrategy"}


def run(args: argparse.Namespace) -> None:
    """Measures `fit` of the MLP on one replica, as `single` does."""
    setting = {
        "benchmark": "Keras fit on one replica, CPU, DistributedOptimizer(SGD)",
        "model": "MLP 784-1024-1024-10, 1.86 million parameters",
        "batch": "32, NumPy arrays, 25 steps a block",
    }
    report = Report(args, setting)
    side = Side("fit", "tools.bench.fit_worker", {})
    with started(side):
        arms = [(side, arm) for arm in ("plain", *ARMS)]
        times = alternate(arms, blocks=args.blocks, steps=25)
    report.add_times(times)
    for arm, where in ARMS.items():
        ratio = paired_ratio(times[f"fit/{arm}"], times["fit/plain"])
        name = f"step time with a wrapped optimizer {where} relative to plain Keras"
        report.add(Figure(name, ratio, at_most=1.03))
    report.finish()
