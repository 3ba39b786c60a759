"""A training step between two hosts: tfdp, the stock strategy and PyTorch's DDP."""

from __future__ import annotations

import dataclasses
import statistics

from tfdp.launch.bench.machine import torch_version
from tfdp.launch.bench.sides import alternate, paired_ratio, started
from tools.bench.hosts_bed import NUM_HOSTS, TwoHosts
from tools.bench.hosts_sides import (
    RATE_OF_GOALS,
    RATE_OF_START,
    STOCK_VARIANTS,
    HostsSide,
    in_megabytes,
    make_sides,
    tfdp_variants,
    utilisations,
)
from tools.bench.link_rate import bits_per_second
from tools.bench.models import MODELS
from tools.bench.report import Arguments, Figure, Report, ratio_to_best

ALONE = "no communication"
# Over stock, where the link is slow and each host has several workers.
GOALS = {"hierarchical": 1.3, "hierarchical bf16": 2.2}
GOAL_OF_DDP = 1.25  # there; elsewhere 1
MIN_SHARE = 0.7  # of communication in a step of the stock strategy
Times = dict[str, list[float]]


def run(args: Arguments) -> None:
    """Measure the transformer with every number of workers on every rate."""
    version = torch_version(args.torch_python)
    setting = {
        "benchmark": "step of a GradientTape loop with SGD on 2 hosts, network "
        "namespaces joined by a veth pair with tbf, 1 thread each",
        "model": str(MODELS["transformer"]),
        "batch": f"{args.batch} for each worker",
        "workers per host": ", ".join(map(str, args.workers_per_host)),
        "torch": version or f"left out: {args.torch_python} has none",
    }
    report = Report(args, setting)
    for workers_per_host in args.workers_per_host:
        _measure_workers(report, args, workers_per_host, has_torch=bool(version))
    report.finish()


def _measure_workers(
    report: Report, args: Arguments, workers_per_host: int, *, has_torch: bool
) -> None:
    setup = {"benchmark": "step", "model": "transformer", "batch_size": args.batch}
    with TwoHosts(RATE_OF_START) as bed:
        sides = list(make_sides(bed, workers_per_host, setup))
        if has_torch:
            sides.append(_torch_side(bed, args, workers_per_host))
        with started(*sides):
            for rate in args.rates:
                bed.set_rate(rate)
                table = Table(report, bed, workers_per_host)
                table.measure(sides, args.blocks)


def _torch_side(bed: TwoHosts, args: Arguments, workers_per_host: int) -> HostsSide:
    model = dataclasses.asdict(MODELS["transformer"])
    told = {"model": model, "batch_size": args.batch, "tuned": True}
    variants = {"float32": told, "bf16": {**told, "bf16": True}}
    module, python = "tools.bench.ddp_worker", args.torch_python
    return HostsSide(
        bed, "ddp", module, {"variants": variants}, workers_per_host, python
    )


def wire_type(variant: str) -> str:
    """The variant of DDP that sends what a variant of tfdp sends.

    Example:

    >>> wire_type("hierarchical bf16"), wire_type("ring")
    ('bf16', 'float32')
    """
    return "bf16" if variant.endswith("bf16") else "float32"


class Table:
    """The figures of one number of workers on one rate.

    Args:
        report: `Report`, which gets them.
        bed: `TwoHosts`, set to the rate.
        workers_per_host: Int.
    """

    def __init__(self, report: Report, bed: TwoHosts, workers_per_host: int) -> None:
        self._report, self._bed = report, bed
        self._title = f"{NUM_HOSTS} x {workers_per_host}, {bed.rate}"
        self._variants = tuple(tfdp_variants(workers_per_host))
        self._has_goals = bed.rate == RATE_OF_GOALS and workers_per_host > 1
        self._times: Times = {}

    def measure(self, sides: list[HostsSide], blocks: int) -> None:
        """Run the blocks of all variants in turn, and report."""
        ours, stock, *others = sides
        variants = [(ours, name) for name in (*self._variants, ALONE)]
        variants += [(stock, name) for name in STOCK_VARIANTS]
        wire_types = dict.fromkeys(map(wire_type, self._variants))
        variants += [(side, name) for side in others for name in wire_types]
        self._times = alternate(variants, blocks=blocks, steps=1, warm_up=1)
        print(f"\n{self._title}")
        self._report.add_times(
            {f"{self._title}: {k}": v for k, v in self._times.items()}
        )
        for side, variant in variants:
            if variant != ALONE:
                self._add_link(side, variant, blocks)
        self._add_share()
        for variant in self._variants:
            self._add_ratios(variant)

    def _add_link(self, side: HostsSide, variant: str, blocks: int) -> None:
        name = f"{side.name}/{variant}"
        sent = side.bytes_per_step(variant, blocks, 0.0)
        used = utilisations(sent, self._times[name], bits_per_second(self._bed.rate))
        what = f"{self._title}, {name}: MB over the link per direction"
        note = f"utilisation of the link {statistics.median(used):.3f}"
        self._report.add(Figure(what, in_megabytes(sent), note=note))

    def _add_share(self) -> None:
        rest = paired_ratio(self._times[f"tfdp/{ALONE}"], self._times["stock/defaults"])
        self._report.add(
            Figure(
                f"{self._title}: share of communication in stock's step",
                round(1 - rest.median, 3),
                at_least=MIN_SHARE if self._has_goals else None,
                note="the rest is a step without communication",
            )
        )

    def _add_ratios(self, variant: str) -> None:
        own = self._times[f"tfdp/{variant}"]
        name = f"{self._title}, {variant}: throughput relative to"
        ratio = paired_ratio(self._times["stock/defaults"], own)
        goal = GOALS.get(variant) if self._has_goals else None
        what = f"{name} the stock strategy's defaults"
        self._report.add(Figure(what, ratio, at_least=goal))
        if len(own) > 1:
            packed = [self._times[f"stock/{stock}"] for stock in STOCK_VARIANTS]
            what = f"{name} stock at its best pack size"
            self._report.add(Figure(what, ratio_to_best(packed, own)))
        rival = f"ddp/{wire_type(variant)}"
        if rival in self._times:
            is_slow = self._has_goals and variant in GOALS
            self._report.add(
                Figure(
                    f"{name} DistributedDataParallel, {wire_type(variant)} on the wire",
                    paired_ratio(self._times[rival], own),
                    at_least=GOAL_OF_DDP if is_slow else 1.0,
                )
            )
