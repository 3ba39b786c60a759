"""Overhead of a `DistributedOptimizer` with nothing switched on in Keras `fit`."""

from __future__ import annotations

import statistics

from tfdp.launch.bench.sides import Side, alternate, paired_ratio, started
from tools.bench.report import Arguments, Figure, Report

# Where a process happens to lay its weights makes it faster or slower by up to 7 % for
# as long as it lives: a pair is the medians of one process.
BLOCKS_PER_PROCESS = 8
VARIANTS = {
    "wrapped": "under no strategy",
    "wrapped, tfdp": "under tfdp.MirroredStrategy",
}


def run(args: Arguments) -> None:
    """Measure `fit` of the MLP on one replica, as `single` does."""
    setting = {
        "benchmark": "Keras fit on one replica, CPU, DistributedOptimizer(SGD)",
        "model": "MLP 784-1024-1024-10, 1.86 million parameters",
        "batch": "32, NumPy arrays, 25 steps a block",
    }
    report = Report(args, setting)
    times: dict[str, list[float]] = {}
    for _ in range(max(1, args.blocks // BLOCKS_PER_PROCESS)):
        side = Side("fit", "tools.bench.fit_worker", {})
        with started(side):
            variants = [(side, variant) for variant in ("plain", *VARIANTS)]
            part = alternate(variants, blocks=BLOCKS_PER_PROCESS, steps=25)
        for name, values in part.items():
            times.setdefault(name, []).append(statistics.median(values))
    report.add_times(times)
    for variant, where in VARIANTS.items():
        ratio = paired_ratio(times[f"fit/{variant}"], times["fit/plain"])
        name = f"step time with a wrapped optimizer {where} relative to plain Keras"
        report.add(Figure(name, ratio, at_most=1.03))
    report.finish()
