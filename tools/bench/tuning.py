"""`bucket_mb="auto"` against the default and against the sizes of the bucket study."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable

from tfdp.launch.bench.sides import Side, alternate, paired_ratio, started
from tools.bench.hosts_bed import TwoHosts, missing
from tools.bench.hosts_sides import RATE_OF_START, HostsSide
from tools.bench.report import Arguments, Figure, Report, ratio_to_best
from tools.bench.tuning_worker import OUTCOME

SIZES_MB = (0.0002, 0.1, 0.25, 0.5, 1.0)
AUTO, DEFAULT = "auto", "default"
MODULE = "tools.bench.tuning_worker"
STEPS = 20
# A trial has hundreds of steps.
DEADLINE_SECONDS = 900.0
# Of the best size, and of the default.
MIN_OF_BEST, MIN_OF_DEFAULT = 0.97, 0.99


def run(args: Arguments) -> None:
    """Measure two workers of one machine, and two hosts at each rate."""
    setting = {
        "benchmark": "Keras fit of ResNet-18 of an eighth of its width, 32 images for "
        "each of two workers, AdamW, 1 thread each",
        "variants": f"buckets of {', '.join(map(str, SIZES_MB))} MB, the default, and "
        f'"auto", whose trial is over when the blocks of {STEPS} steps begin',
    }
    report = Report(args, setting)
    variants = {str(size): size for size in SIZES_MB} | {DEFAULT: None, AUTO: AUTO}
    setup = {"strategy": "tfdp", "variants": variants}
    _measure(report, args, lambda: Side("fit", MODULE, setup, 2), "loopback")
    if reason := missing():
        print(f"Two hosts are left out: {reason}")
    else:
        with TwoHosts(RATE_OF_START) as bed:
            for rate in args.rates:
                bed.set_rate(rate)
                _measure(
                    report,
                    args,
                    lambda: HostsSide(bed, "fit", MODULE, setup, 1),
                    f"two hosts at {rate}",
                )
    report.finish()


def _measure(
    report: Report, args: Arguments, start: Callable[[], Side], where: str
) -> None:
    # What one link has taught is no plan for another.
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        side = start()
        side.deadline_seconds = DEADLINE_SECONDS
        with started(side):
            names = [*map(str, SIZES_MB), DEFAULT, AUTO]
            found = alternate(
                [(side, name) for name in names],
                blocks=args.blocks,
                steps=STEPS,
                warm_up=1,
            )
            texts = side.run(OUTCOME, 1)
    times = {name: found[f"fit/{name}"] for name in names}
    report.add_times({f"{where}: {name}": own for name, own in times.items()})
    _add_figures(report, where, times)
    for text in json.loads(texts[0] or "{}").values():
        print(f"  {where}: {text}", flush=True)
        report.keep("outcome", where, json.loads(text))


def _add_figures(report: Report, where: str, times: dict[str, list[float]]) -> None:
    sizes = [times[str(size)] for size in SIZES_MB]
    best = min(sizes, key=statistics.median)
    worst = max(sizes, key=statistics.median)
    name = f"{where}, auto: throughput relative to"
    spread = paired_ratio(worst, best)
    report.add(Figure(f"{where}: best size relative to worst", spread))
    report.add(
        Figure(
            f"{name} the best size",
            ratio_to_best(sizes, times[AUTO]),
            at_least=MIN_OF_BEST,
        )
    )
    report.add(
        Figure(
            f"{name} the default",
            paired_ratio(times[DEFAULT], times[AUTO]),
            at_least=MIN_OF_DEFAULT,
        )
    )
