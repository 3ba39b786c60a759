"""Growth: Python's work with more variables, memory with more steps."""

from __future__ import annotations

from tfdp.launch.bench.sides import Side, started
from tools.bench.report import Arguments, Figure, Report

STEPS = 2000
# Where memory is compared from: allocators and caches have filled by then.
SETTLED_AFTER = 500


def run(args: Arguments) -> None:
    """Measure on two workers, in `fit`."""
    report = Report(args, {"benchmark": "growth, 2 workers, Keras fit, batch 32 each"})
    side = Side("tfdp", "tools.bench.growth_worker", {}, num_workers=2)
    with started(side):
        few, many = (side.run(f"calls {count}", 40)[0] for count in (10, 500))
        for kind in ("dense", "embedding"):
            _add_memory(report, kind, side.run(f"memory {kind}", STEPS))
    for whose, note in (
        ("own", "functions of tfdp"),
        ("total", "TensorFlow asks of all that a function captures: is it callable?"),
    ):
        name = f"Python calls per step ({whose}), 500 variables against 10"
        counts = f"{many[whose]:g} and {few[whose]:g}: {note}"
        ratio = round(many[whose] / few[whose], 3)
        report.add(Figure(name, ratio, at_most=1.0, note=counts))
    report.finish()


def _add_memory(report: Report, kind: str, workers: list[list[float]]) -> None:
    """Compare resident memory after `SETTLED_AFTER` and after all steps."""
    for rank, samples in enumerate(workers):
        begin = samples[round(len(samples) * SETTLED_AFTER / STEPS)]
        growth = samples[-1] - begin
        name = (
            f"memory gained from step {SETTLED_AFTER} to {STEPS}, {kind} model, "
            f"worker {rank}, MB"
        )
        note = f"of {begin:.0f} MB"
        report.add(Figure(name, round(growth, 2), at_most=1.0, note=note))
