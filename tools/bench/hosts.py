"""All-reduce between two hosts: time, and bytes by the interface's own counters."""

from __future__ import annotations

import statistics

from tfdp.launch.bench.sides import alternate, paired_ratio, started
from tools.bench.hosts_bed import NUM_HOSTS, TwoHosts
from tools.bench.hosts_sides import (
    RATE_OF_GOALS,
    RATE_OF_START,
    STOCK_VARIANTS,
    HostsSide,
    idle_bytes_per_second,
    in_megabytes,
    make_sides,
    tfdp_variants,
    utilisations,
)
from tools.bench.link_rate import bits_per_second
from tools.bench.report import Arguments, Figure, Report, ratio_to_best

NUM_TENSORS = 16
# Speed of a variant relative to a rival, by the workers on a host.
GOALS_OF_SPEED = {
    (2, "tfdp/hierarchical", "tfdp/ring"): 1.35,
    (2, "tfdp/hierarchical", "stock/defaults"): 1.35,
    (4, "tfdp/hierarchical", "tfdp/ring"): 1.55,
    (2, "tfdp/hierarchical bf16", "stock/defaults"): 2.5,
    (4, "tfdp/hierarchical bf16", "stock/defaults"): 2.5,
}
# Of what a hierarchical all-reduce has to send, in each direction.
SHARES_OF_BOUND = {"tfdp/hierarchical": 1.0, "tfdp/hierarchical bf16": 0.5}
GOAL_OF_LINK = 0.85
BOUND_SLACK = 1.05


def run(args: Arguments) -> None:
    """Measure every number of workers on every rate."""
    setting = {
        "benchmark": "all-reduce between 2 hosts, network namespaces joined by a veth "
        "pair with tbf in each direction, 1 thread each",
        "payload": f"{args.megabytes} MB of float32, gradients of {NUM_TENSORS} "
        "variables",
        "rates": ", ".join(args.rates),
        "workers per host": ", ".join(map(str, args.workers_per_host)),
    }
    report = Report(args, setting)
    length = args.megabytes * 2**20 // 4 // NUM_TENSORS
    setup = {"benchmark": "all_reduce", "lengths": [length] * NUM_TENSORS}
    for workers_per_host in args.workers_per_host:
        with TwoHosts(RATE_OF_START) as bed:
            sides = make_sides(bed, workers_per_host, setup)
            with started(*sides):
                for rate in args.rates:
                    bed.set_rate(rate)
                    table = Table(bed, sides, args, workers_per_host)
                    table.measure()
                    table.report(report)
    report.finish()


class Table:
    """The figures of one number of workers on one rate.

    Args:
        bed: `TwoHosts`, set to the rate.
        sides: Pair of `HostsSide`: tfdp and stock.
        args: The command line.
        workers_per_host: Int.
    """

    def __init__(
        self,
        bed: TwoHosts,
        sides: tuple[HostsSide, HostsSide],
        args: Arguments,
        workers_per_host: int,
    ) -> None:
        self._bed, self._sides, self._args = bed, sides, args
        self._workers_per_host = workers_per_host
        self._title = f"{NUM_HOSTS} x {workers_per_host}, {bed.rate}"
        self._has_goals = bed.rate == RATE_OF_GOALS
        self._times: dict[str, list[float]] = {}
        self._bytes: dict[str, list[float]] = {}

    def measure(self) -> None:
        """Run the blocks of all variants in turn."""
        ours, stock = self._sides
        variants = [(ours, name) for name in tfdp_variants(self._workers_per_host)]
        variants += [(stock, name) for name in STOCK_VARIANTS]
        blocks = self._args.blocks
        self._times = alternate(variants, blocks=blocks, steps=1, warm_up=1)
        self._idle = idle_bytes_per_second(self._bed)
        for side, variant in variants:
            sent = side.bytes_per_step(variant, blocks, self._idle)
            self._bytes[f"{side.name}/{variant}"] = sent

    def report(self, report: Report) -> None:
        """Print the table and the figures."""
        print(f"\n{self._title}; idle: {self._idle:.0f} bytes/s", flush=True)
        report.add_times({f"{self._title}: {k}": v for k, v in self._times.items()})
        for name in self._times:
            self._add_link(report, name)
        for name in SHARES_OF_BOUND.keys() & self._times.keys():
            self._add_ratios(report, name)

    def _add_link(self, report: Report, name: str) -> None:
        payload = self._args.megabytes * 2**20
        sent, seconds = self._bytes[name], self._times[name]
        bound = 2 * (NUM_HOSTS - 1) / NUM_HOSTS  # of the payload
        share = SHARES_OF_BOUND.get(name)
        report.add(
            Figure(
                f"{self._title}, {name}: bytes over the link per direction, as a share "
                "of the payload",
                round(statistics.median(sent) / payload, 3),
                at_most=BOUND_SLACK * bound * share if share else None,
                note=f"{in_megabytes(sent)} MB",
            )
        )
        used = utilisations(sent, seconds, bits_per_second(self._bed.rate))
        report.add(
            Figure(
                f"{self._title}, {name}: utilisation of the link",
                round(statistics.median(used), 3),
                at_least=self._goal(GOAL_OF_LINK) if name == "tfdp/ring" else None,
            )
        )

    def _add_ratios(self, report: Report, name: str) -> None:
        own = self._times[name]
        for rival in ("tfdp/ring", "stock/defaults"):
            goal = GOALS_OF_SPEED.get((self._workers_per_host, name, rival))
            report.add(
                Figure(
                    f"{self._title}, {name}: speed relative to {rival}",
                    paired_ratio(self._times[rival], own),
                    at_least=self._goal(goal),
                )
            )
        if self._args.blocks > 1:
            rivals = [self._times[f"stock/{variant}"] for variant in STOCK_VARIANTS]
            best = ratio_to_best(rivals, own)
            what = (
                f"{self._title}, {name}: speed relative to stock at its best pack size"
            )
            report.add(Figure(what, best))

    def _goal(self, goal: float | None) -> float | None:
        return goal if self._has_goals else None
