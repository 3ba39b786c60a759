"""Cost of flight records in Keras `fit` on two workers."""

from __future__ import annotations

import statistics

from tfdp.launch.bench.sides import Ratio, paired_ratio
from tools.bench.monitor import blocks
from tools.bench.report import Arguments, Figure, Report

STEPS = 40
# The cost of one entry is far below the noise of a step: here each is made so often.
TIMES = 1000


def run(args: Arguments) -> None:
    """Measure `fit` with flight records and without, and with each entry many times."""
    for model in args.models:
        setting = {
            "benchmark": f"Keras fit on 2 workers, Adam, {STEPS} steps a block, with "
            f"flight records, without, and with each entry {TIMES} times",
            "model": model,
            "batch": "32 for each replica",
        }
        report = Report(args, setting)
        setup = {"benchmark": "flight", "model": model, "times": TIMES}
        arms = ("off", "on", "many")
        found = blocks(setup, args.blocks, STEPS, arms=arms)
        seconds = {arm: [b["seconds"] for b in found[arm]] for arm in found}
        report.add_times(seconds)
        name = f"{model}: step time with flight records relative to none"
        ratio = paired_ratio(seconds["on"], seconds["off"])
        report.add(Figure(name, ratio))
        many = paired_ratio(seconds["many"], seconds["off"])
        name = f"{name}, from {TIMES} times the entries"
        added = [b - a for a, b in zip(seconds["off"], seconds["many"], strict=True)]
        note = f"{1e6 * statistics.median(added) / TIMES:.1f} us a step"
        report.add(Figure(name, _once(many), at_most=1.002, note=note))
        report.finish()


def _once(many: Ratio) -> Ratio:
    """The ratio with each entry once, from that with each many times."""
    median, low, high = (
        1 + (value - 1) / TIMES for value in (many.median, many.low, many.high)
    )
    return Ratio(median, low, high, many.num_pairs)
