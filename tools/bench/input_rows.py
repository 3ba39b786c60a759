"""Cost of an input pipeline on several workers, each of which decodes its own rows."""

from __future__ import annotations

from collections.abc import Sequence

from tfdp.bench.sides import Side, alternate, started
from tfdp.bench.stats import Ratio, paired_ratio
from tools.bench.report import Arguments, Figure, Report

# Steps of a block that are timed.
STEPS = 12
GLOBAL_BATCH = 64
WORKERS = (1, 2, 4)


def run(args: Arguments) -> None:
    """Measure Keras `fit` bound by its input, on 1, 2 and 4 workers of one thread."""
    setting = {
        "benchmark": "Keras fit of a linear model, JPEGs of 224 x 224 decoded, cropped "
        f"and flipped in `map`, {STEPS} steps a block, workers of one thread",
        "batch": f"{GLOBAL_BATCH} for all workers",
    }
    report = Report(args, setting)
    sides = [
        Side(f"{count}", "tools.bench.input_rows_worker", {}, num_workers=count)
        for count in WORKERS
    ]
    # Of one worker both are the same.
    arms = [(side, arm) for side in sides for arm in ("early", "late")][1:]
    with started(*sides):
        found = alternate(
            arms, blocks=args.blocks, steps=STEPS, warm_up=0, slowest=_of_all
        )
    for name, blocks in found.items():
        report.add_times({name: [block["seconds"] for block in blocks]})
    one = found["1/late"]
    for count in WORKERS[1:]:
        for arm, at_most in (("early", 1.1), ("late", None)):
            ratio = _ratio("cpu_seconds", found[f"{count}/{arm}"], one)
            name = f"{count} workers, rows taken {arm}: CPU time of a sample"
            report.add(Figure(f"{name} relative to one", ratio, at_most=at_most))
    speed = _ratio("seconds", one, found["2/early"])
    report.add(Figure("2 workers: samples per second", speed, at_least=1.8))
    report.finish()


def _of_all(workers: Sequence[dict[str, float]]) -> dict[str, float]:
    """The time of the slowest worker, and what all took of the processors."""
    return {
        "seconds": max(found["seconds"] for found in workers),
        "cpu_seconds": sum(found["cpu_seconds"] for found in workers),
    }


def _ratio(what: str, of: Sequence[dict], to: Sequence[dict]) -> Ratio:
    return paired_ratio([block[what] for block in of], [block[what] for block in to])
