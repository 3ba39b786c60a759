"""Overhead of one replica under tfdp, against plain Keras `fit` in one process."""

from __future__ import annotations

from tfdp.launch.bench.sides import Side, alternate, paired_ratio, started
from tools.bench.models import MODELS
from tools.bench.report import Arguments, Figure, Report


def run(args: Arguments) -> None:
    """Measure `fit` of the MLP."""
    setting = {
        "benchmark": "Keras fit on one replica, CPU",
        "model": str(MODELS["mlp"]),
        "batch": "32, NumPy arrays, 25 steps a block",
    }
    report = Report(args, setting)
    side = Side("fit", "tools.bench.fit_worker", {})
    with started(side):
        variants = [(side, "plain"), (side, "tfdp")]
        times = alternate(variants, blocks=max(30, args.blocks), steps=25)
    report.add_times(times)
    ratio = paired_ratio(times["fit/tfdp"], times["fit/plain"])
    name = "step time of one replica relative to plain Keras"
    report.add(Figure(name, ratio, at_most=1.03))
    report.finish()
