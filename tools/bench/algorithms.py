"""Every all-reduce algorithm on loopback, what `auto` takes, and what was predicted."""

from __future__ import annotations

import argparse
import statistics

from tfdp.cluster import Topology
from tfdp.cost_model import choose, predict_seconds
from tfdp.links import Links
from tfdp.traffic import FLAT, Algorithm
from tools.bench.report import Figure, Report
from tools.bench.sides import Side, alternate, started
from tools.bench.stats import paired_ratio

NUM_WORKERS = 4
# The links are fitted to 4 KB, 256 KB and 4 MB; the other sizes are held out.
SIZES = [2**12, 2**14, 2**16, 2**18, 2**20, 2**23, 2**26]
FITTED = (2**12, 2**18)


def run(args: argparse.Namespace) -> None:
    """Measures all sizes, then asks the model what it would have taken."""
    report = Report(
        args,
        {
            "benchmark": f"all-reduce on loopback, {NUM_WORKERS} workers of 1 thread",
            "algorithms": ", ".join(FLAT),
            "sizes": ", ".join(map(_size, SIZES)),
        },
    )
    setup = {"strategy": "tfdp", "algorithms": FLAT, "sizes": SIZES}
    side = Side("tfdp", "tools.bench.algorithms_worker", setup, num_workers=NUM_WORKERS)
    with started(side):
        measured = side.run("links", 1)[0]
        times: dict[str, list[float]] = {}
        for size in SIZES:
            arms = [(side, f"{name}/{size}") for name in FLAT]
            steps = max(1, min(50, 2**24 // size))
            times |= alternate(arms, blocks=args.blocks, steps=steps)
    report.add_times(times)
    links = Links.from_dict(measured["links"])
    report.add(Figure("seconds to measure the links", round(measured["seconds"], 2)))
    print(f"links: {links}")
    topology = Topology((tuple(range(NUM_WORKERS)),))
    errors = []
    for size in SIZES:
        _add_choice(report, times, size, topology, links)
        for name in FLAT:
            found = statistics.median(times[f"tfdp/{name}/{size}"])
            predicted = predict_seconds(Algorithm(name), size, topology, links)
            note = " (fitted)" if size in FITTED else ""
            print(
                f"  {_size(size)} by {name}: {1e3 * found:.3g} ms, predicted "
                f"{1e3 * predicted:.3g}{note}"
            )
            if not note:
                errors.append(abs(predicted / found - 1))
    name = f"median error of {len(errors)} predictions"
    report.add(Figure(name, round(statistics.median(errors), 3), at_most=0.2))
    report.finish()


def _add_choice(
    report: Report, times: dict, size: int, topology: Topology, links: Links
) -> None:
    """The time of what `auto` takes against that of the fastest."""
    chosen = choose(size, topology, links)[0].name
    of_size = {name: times[f"tfdp/{name}/{size}"] for name in FLAT}
    best = min(of_size, key=lambda name: statistics.median(of_size[name]))
    ratio = paired_ratio(of_size[chosen], of_size[best])
    report.add(
        Figure(
            f"{_size(size)}: time of `auto` ({chosen}) relative to the best ({best})",
            ratio,
            at_most=1.1,
        )
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes // 2**20} MB" if num_bytes >= 2**20 else f"{num_bytes >> 10} KB"
