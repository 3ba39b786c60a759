"""What comparing the weights of all replicas costs in Keras `fit` on two workers."""

from __future__ import annotations

import argparse

from tfdp.bench.sides import Side, started
from tfdp.bench.stats import paired_ratio
from tools.bench.monitor import blocks
from tools.bench.report import Figure, Report

# The interval that is the default, so that two checks fall into a block of the MLP
# and one into a block of the transformer, whose steps are longer.
EVERY = 100
STEPS = {"mlp": 2 * EVERY, "transformer": EVERY}


def run(args: argparse.Namespace) -> None:
    """Measures Keras `fit` on two workers with and without `ConsistencyCheck`."""
    for model in args.models:
        steps = STEPS[model]
        setting = {
            "benchmark": f"Keras fit on 2 workers, Adam, {steps} timed steps a block, "
            f"ConsistencyCheck with every={EVERY}",
            "model": model,
            "batch": "32 for each replica",
        }
        report = Report(args, setting)
        setup = {"model": model, "strategy": "tfdp", "every": EVERY}
        side = Side("fit", "tools.bench.consistency_worker", setup, num_workers=2)
        with started(side):
            found = blocks(side, args.blocks, steps)
        seconds = {arm: [b["seconds"] for b in found[arm]] for arm in found}
        report.add_times(seconds)
        name = f"{model}: step time with the check relative to none"
        ratio = paired_ratio(seconds["on"], seconds["off"])
        report.add(Figure(name, ratio, at_most=1.02))
        report.finish()
