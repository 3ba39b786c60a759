"""Cost of the watchdog and of `ConsistencyCheck` in Keras `fit` on two workers."""

from __future__ import annotations

from tfdp.launch.bench.sides import paired_ratio
from tools.bench.monitor import blocks
from tools.bench.report import Arguments, Figure, Report

# The interval that is the default: one check falls into each block.
EVERY = 100


def run(args: Arguments) -> None:
    """Measure `fit` with `ConsistencyCheck` and the watchdog, and with neither."""
    for model in args.models:
        setting = {
            "benchmark": f"Keras fit on 2 workers, Adam, {EVERY} timed steps a block, "
            f"ConsistencyCheck with every={EVERY} and the watchdog, against neither",
            "model": model,
            "batch": "32 for each replica",
        }
        report = Report(args, setting)
        setup = {"benchmark": "consistency", "model": model, "every": EVERY}
        found = blocks(setup, args.blocks, EVERY)
        seconds = {variant: [b["seconds"] for b in found[variant]] for variant in found}
        report.add_times(seconds)
        name = f"{model}: step time with check and watchdog relative to neither"
        ratio = paired_ratio(seconds["on"], seconds["off"])
        report.add(Figure(name, ratio, at_most=1.02))
        report.finish()
