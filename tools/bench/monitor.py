"""Cost of the communication monitor, and the sum of its parts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tfdp.launch.bench.sides import Side, alternate, paired_ratio, started
from tools.bench.report import Arguments, Figure, Report

# A block is a call of `fit`, whose first steps are traced and not timed.
STEPS = 60


def run(args: Arguments) -> None:
    """Measure Keras `fit` on two workers with and without the monitor."""
    for model in args.models:
        setting = {
            "benchmark": f"Keras fit on 2 workers, Adam, {STEPS} steps a block, "
            "CommunicationMonitor with every=10",
            "model": model,
            "batch": "32 for each replica",
        }
        report = Report(args, setting)
        steps = STEPS if model == "mlp" else STEPS // 3
        found = blocks({"benchmark": "monitor", "model": model}, args.blocks, steps)
        for variant in ("off", "on"):
            report.add_times({variant: [block["seconds"] for block in found[variant]]})
        seconds = {variant: [b["seconds"] for b in found[variant]] for variant in found}
        name = f"{model}: step time with the monitor relative to none"
        ratio = paired_ratio(seconds["on"], seconds["off"])
        report.add(Figure(name, ratio, at_most=1.02))
        parts = [block["parts"] for block in found["on"]]
        name = f"{model}: compute plus exposed communication, relative to the step"
        report.add(
            Figure(name, round(statistics.median(parts), 4), note="0.95 to 1.05")
        )
        report.finish()


def blocks(
    setup: Mapping[str, Any],
    count: int,
    steps: int,
    num_untimed: int = 0,
    variants: Sequence[str] = ("off", "on"),
) -> dict[str, list[dict]]:
    """Blocks of all variants in turn, each as the slowest of two workers measured it.

    Args:
        setup: Mapping, what `tools.bench.fit_blocks` is told.
        count: Int, turns of each variant.
        steps: Int, of a block.
        num_untimed: Int, blocks of the variant `on` before these. Defaults to 0.
        variants: Sequence of strings, the variants. Defaults to `("off", "on")`.
    """
    setup = {"strategy": "tfdp", **setup}
    side = Side("fit", "tools.bench.fit_blocks", setup, num_workers=2)
    with started(side):
        for _ in range(num_untimed):
            side.run("on", steps)
        found = alternate(
            [(side, variant) for variant in variants],
            blocks=count,
            steps=steps,
            warm_up=0,
            slowest=lambda workers: max(workers, key=lambda found: found["seconds"]),
        )
    return {variant: found[f"{side.name}/{variant}"] for variant in variants}
