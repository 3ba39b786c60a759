"""Every all-reduce algorithm on loopback, what `auto` takes, and what was predicted.

And between two hosts, only what was predicted: `hosts-plan`.
"""

from __future__ import annotations

import statistics

from tfdp.ground.links import Links
from tfdp.ground.plans.cost_model import choose, predict_seconds
from tfdp.ground.plans.topology import Topology
from tfdp.ground.plans.traffic import FLAT, Algorithm
from tfdp.launch.bench.sides import Side, alternate, paired_ratio, started
from tools.bench.hosts_bed import NUM_HOSTS, TwoHosts
from tools.bench.hosts_sides import RATE_OF_START, HostsSide
from tools.bench.report import Arguments, Figure, Report

NUM_WORKERS = 4
# The links are fitted to 4 KB, 256 KB and 4 MB; the other sizes are held out.
SIZES = [2**12, 2**14, 2**16, 2**18, 2**20, 2**23, 2**26]
FITTED = (2**12, 2**18)
GOAL_OF_ERROR = 0.2
_WORKER = "tools.bench.algorithms_worker"

WORKERS_PER_HOST = 2
# Those that move the fewest bytes; a tree of large tensors is never taken.
ACROSS = ("ring", "halving_doubling", "hierarchical")
SIZES_ACROSS = [2**14, 2**16, 2**20, 2**24, 2**26]  # all held out


def run(args: Arguments) -> None:
    """Measure all sizes, then ask the cost model what it would have taken."""
    report = Report(
        args,
        {
            "benchmark": f"all-reduce on loopback, {NUM_WORKERS} workers of 1 thread",
            "algorithms": ", ".join(FLAT),
            "sizes": ", ".join(map(_size, SIZES)),
        },
    )
    setup = {"strategy": "tfdp", "algorithms": FLAT, "sizes": SIZES}
    side = Side("tfdp", _WORKER, setup, num_workers=NUM_WORKERS)
    with started(side):
        measured = side.run("links", 1)[0]
        times: dict[str, list[float]] = {}
        for size in SIZES:
            variants = [(side, f"{name}/{size}") for name in FLAT]
            steps = max(1, min(50, 2**24 // size))
            times |= alternate(variants, blocks=args.blocks, steps=steps)
    report.add_times(times)
    links = Links.from_dict(measured["links"])
    report.add(Figure("seconds to measure the links", round(measured["seconds"], 2)))
    print(f"links: {links}")
    topology = Topology((tuple(range(NUM_WORKERS)),))
    for size in SIZES:
        _add_choice(report, times, size, topology, links)
    _add_error(report, "", times, topology, links)
    report.finish()


def run_on_hosts(args: Arguments) -> None:
    """Fit the links as training does, on every rate, and measure other sizes."""
    report = Report(
        args,
        {
            "benchmark": f"all-reduce between {NUM_HOSTS} hosts x {WORKERS_PER_HOST} "
            "workers of 1 thread, network namespaces joined by a veth pair with tbf",
            "algorithms": ", ".join(ACROSS),
            "sizes": ", ".join(map(_size, SIZES_ACROSS)),
            "rates": ", ".join(args.rates),
        },
    )
    setup = {"strategy": "tfdp", "algorithms": ACROSS, "sizes": SIZES_ACROSS}
    ranks = range(0, NUM_HOSTS * WORKERS_PER_HOST, WORKERS_PER_HOST)
    topology = Topology(tuple(tuple(range(r, r + WORKERS_PER_HOST)) for r in ranks))
    with TwoHosts(RATE_OF_START) as bed:
        side = HostsSide(bed, "tfdp", _WORKER, setup, WORKERS_PER_HOST)
        with started(side):
            for rate in args.rates:
                bed.set_rate(rate)
                links = Links.from_dict(side.run("links", 1)[0]["links"])
                times: dict[str, list[float]] = {}
                for size in SIZES_ACROSS:
                    variants = [(side, f"{name}/{size}") for name in ACROSS]
                    steps = max(1, min(10, 2**20 // size))
                    times |= alternate(
                        variants, blocks=args.blocks, steps=steps, warm_up=1
                    )
                print(f"\n{rate}: {links}")
                report.add_times({f"{rate}: {k}": v for k, v in times.items()})
                _add_error(report, f"{rate}: ", times, topology, links)
    report.finish()


def _add_error(
    report: Report, title: str, times: dict, topology: Topology, links: Links
) -> None:
    """Print all predictions, and add the median error of those held out."""
    errors = []
    for variant, seconds in times.items():
        _, name, size = variant.split("/")
        found = statistics.median(seconds)
        predicted = predict_seconds(Algorithm(name), int(size), topology, links)
        note = " (fitted)" if int(size) in FITTED else ""
        print(
            f"  {_size(int(size))} by {name}: {1e3 * found:.3g} ms, predicted "
            f"{1e3 * predicted:.3g}{note}"
        )
        if not note:
            errors.append(abs(predicted / found - 1))
    name = f"{title}median error of {len(errors)} predictions"
    median = round(statistics.median(errors), 3)
    report.add(Figure(name, median, at_most=GOAL_OF_ERROR))


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
