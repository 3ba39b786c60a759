"""Gain of `tfdp run --rebalance` where one worker is slower than the other."""

from __future__ import annotations

import statistics

from tfdp.launch.bench.sides import paired_ratio
from tools.bench.monitor import blocks
from tools.bench.report import Arguments, Figure, Report

STEPS = 60
# What the second worker takes longer for each row: nothing, as much again, and more.
DELAYS_MS = (0.0, 0.5, 2.0)
# Blocks in which the weights settle.
_UNTIMED = 3


def run(args: Arguments) -> None:
    """Measure Keras `fit` on two workers, one slowed, with and without."""
    for delay_ms in DELAYS_MS:
        setting = {
            "benchmark": f"Keras fit on 2 workers, Adam, {STEPS} steps a block, "
            f"the second one takes {delay_ms:g} ms longer for each row",
            "model": "mlp",
            "batch": "64 for both replicas",
        }
        report = Report(args, setting)
        setup = {"benchmark": "rebalance", "model": "mlp", "delay_ms": delay_ms}
        found = blocks(setup, args.blocks, STEPS, _UNTIMED)
        seconds = {variant: [b["seconds"] for b in found[variant]] for variant in found}
        report.add_times(seconds)
        rows = statistics.median(block["rows"] for block in found["on"])
        name = f"{delay_ms:g} ms a row: step time with rebalancing relative to none"
        ratio = paired_ratio(seconds["on"], seconds["off"])
        report.add(Figure(name, ratio, note=f"the slow worker has {rows:g} of 64 rows"))
        report.finish()
