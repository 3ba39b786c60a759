"""Cost of flight records in Keras `fit` on two workers."""

from __future__ import annotations

import statistics

from tfdp.launch.bench.sides import Ratio, paired_ratio
from tools.bench.monitor import blocks
from tools.bench.report import Arguments, Figure, Report

STEPS = 60
# An entry takes a microsecond, as much as a look at the clock: it is timed so often.
TIMES = 100


def run(args: Arguments) -> None:
    """Measure `fit` with flight records and without, and the time of the entries."""
    for model in args.models:
        setting = {
            "benchmark": f"Keras fit on 2 workers, Adam, {STEPS} steps a block, with "
            "flight records and without, and the processor time of a step's entries",
            "model": model,
            "batch": "32 for each replica",
        }
        report = Report(args, setting)
        setup = {"benchmark": "flight", "model": model, "times": TIMES}
        variants = ("off", "on", "timed")
        found = blocks(setup, args.blocks, STEPS, variants=variants)
        seconds = {variant: [b["seconds"] for b in found[variant]] for variant in found}
        report.add_times({variant: seconds[variant] for variant in ("off", "on")})
        name = f"{model}: step time with flight records relative to none"
        report.add(Figure(name, paired_ratio(seconds["on"], seconds["off"])))
        entries = [block["entries"] for block in found["timed"]]
        each = f"{1e6 * statistics.median(entries):.1f} us a step"
        name = f"{model}: step time plus the time of its entries, relative to the step"
        ratio = _with(paired_ratio(entries, seconds["off"]))
        report.add(Figure(name, ratio, at_most=1.002, note=each))
        report.finish()


def _with(part: Ratio) -> Ratio:
    """The ratio of a whole with a part to the whole without it."""
    return Ratio(1 + part.median, 1 + part.low, 1 + part.high, part.num_pairs)
