"""The update itself: DistributedOptimizer's fused one against Keras's own."""

from __future__ import annotations

import argparse

from tools.bench.report import Figure, Report
from tools.bench.sides import Side, alternate, started
from tools.bench.stats import paired_ratio

# What is compared, with the goal for the speed relative to Keras.
SMALL = "200 variables of 64 to 4,096 values"
LARGE = "20 variables of 1,048,576 values"
GOALS = {
    (SMALL, "Adam"): 1.5,
    (SMALL, "Adam, weight decay, global_clipnorm"): None,
    (LARGE, "Adam"): 1.0,
}
STEPS = {SMALL: 50, LARGE: 10}


def run(args: argparse.Namespace) -> None:
    """Measures Adam in a `tf.function` that does nothing else."""
    setting = {
        "benchmark": "one update by `optimizer.apply` in a tf.function, one CPU device, "
        "no strategy, all threads",
    }
    report = Report(args, setting)
    side = Side("update", "tools.bench.update_worker", {})
    with started(side):
        for (variables, optimizer), goal in GOALS.items():
            what = f"{optimizer}, {variables}"
            arms = [(side, f"{kind}: {what}") for kind in ("keras", "tfdp")]
            times = alternate(arms, blocks=args.blocks, steps=STEPS[variables])
            report.add_times(times)
            ratio = paired_ratio(*times.values())
            name = f"{what}: speed relative to Keras"
            report.add(Figure(name, ratio, at_least=goal))
    report.finish()
