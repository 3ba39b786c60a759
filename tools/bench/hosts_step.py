"""A training step between two hosts: tfdp, the stock strategy and PyTorch's DDP."""

from __future__ import annotations

import dataclasses
import statistics

from tfdp.bench.link_rate import bits_per_second
from tfdp.bench.machine import torch_version
from tfdp.bench.sides import alternate, started
from tfdp.bench.stats import paired_ratio, ratio_to_best
from tools.bench.hosts_bed import TwoHosts
from tools.bench.hosts_sides import (
    RATE_OF_GOALS,
    RATE_OF_START,
    STOCK_ARMS,
    TFDP_ARMS,
    HostsSide,
    in_megabytes,
    make_sides,
    utilisations,
)
from tools.bench.models import MODELS
from tools.bench.report import Arguments, Figure, Report

WORKERS_PER_HOST = 2
ALONE = "no communication"
GOALS = {"hierarchical": 1.3, "hierarchical bf16": 2.2}  # over stock
GOAL_OF_DDP = 1.25
LEAST_SHARE = 0.7  # of communication in a step of the stock strategy
# What DDP sends when an arm of tfdp sends this.
WIRE_TYPES = {"hierarchical": "float32", "hierarchical bf16": "bf16"}
Times = dict[str, list[float]]


def run(args: Arguments) -> None:
    """Measure the transformer on every rate."""
    version = torch_version(args.torch_python)
    setting = {
        "benchmark": "step of a GradientTape loop with SGD, 2 hosts x 2 workers, "
        "network namespaces joined by a veth pair with tbf, 1 thread each",
        "model": str(MODELS["transformer"]),
        "batch": f"{args.batch} for each worker",
        "torch": version or f"left out: {args.torch_python} has none",
    }
    report = Report(args, setting)
    setup = {"benchmark": "step", "model": "transformer", "batch_size": args.batch}
    with TwoHosts(RATE_OF_START) as bed:
        sides = list(make_sides(bed, WORKERS_PER_HOST, setup))
        if version:
            sides.append(_torch_side(bed, args))
        with started(*sides):
            for rate in args.rates:
                bed.set_rate(rate)
                _measure(report, bed, sides, args.blocks)
    report.finish()


def _torch_side(bed: TwoHosts, args: Arguments) -> HostsSide:
    model = dataclasses.asdict(MODELS["transformer"])
    told = {"model": model, "batch_size": args.batch, "tuned": True}
    arms = {"float32": told, "bf16": {**told, "bf16": True}}
    module, python = "tfdp.bench.torch_worker", args.torch_python
    setup = {"arms": arms, "meets": True}
    return HostsSide(bed, "ddp", module, setup, WORKERS_PER_HOST, python)


def _measure(
    report: Report, bed: TwoHosts, sides: list[HostsSide], blocks: int
) -> None:
    ours, stock, *others = sides
    arms = [(ours, name) for name in (*TFDP_ARMS, ALONE)]
    arms += [(stock, name) for name in STOCK_ARMS]
    arms += [(side, name) for side in others for name in WIRE_TYPES.values()]
    times = alternate(arms, blocks=blocks, steps=1, warm_up=1)
    print(f"\n{bed.rate}")
    report.add_times({f"{bed.rate}: {name}": found for name, found in times.items()})
    for side, arm in arms:
        if arm == ALONE:
            continue
        name = f"{side.name}/{arm}"
        sent = side.bytes_per_step(arm, blocks, 0.0)
        used = utilisations(sent, times[name], bits_per_second(bed.rate))
        what = f"{bed.rate}, {name}: MB over the link per direction"
        note = f"utilisation of the link {statistics.median(used):.3f}"
        report.add(Figure(what, in_megabytes(sent), note=note))
    _add_share(report, bed, times)
    for arm in TFDP_ARMS:
        _add_ratios(report, bed, times, arm)


def _add_share(report: Report, bed: TwoHosts, times: Times) -> None:
    rest = paired_ratio(times[f"tfdp/{ALONE}"], times["stock/defaults"])
    report.add(
        Figure(
            f"{bed.rate}: share of communication in a step of the stock strategy",
            round(1 - rest.median, 3),
            at_least=LEAST_SHARE if bed.rate == RATE_OF_GOALS else None,
            note="the rest is a step without communication",
        )
    )


def _add_ratios(report: Report, bed: TwoHosts, times: Times, arm: str) -> None:
    own = times[f"tfdp/{arm}"]
    has_goals = bed.rate == RATE_OF_GOALS
    name = f"{bed.rate}, {arm}: throughput relative to"
    ratio = paired_ratio(times["stock/defaults"], own)
    goal = GOALS.get(arm) if has_goals else None
    report.add(Figure(f"{name} the stock strategy's defaults", ratio, at_least=goal))
    if len(own) > 1:
        packed = ratio_to_best([times[f"stock/{stock}"] for stock in STOCK_ARMS], own)
        report.add(Figure(f"{name} stock at its best pack size", packed))
    wire_type = WIRE_TYPES.get(arm, "float32")
    if f"ddp/{wire_type}" in times:
        report.add(
            Figure(
                f"{name} DistributedDataParallel, {wire_type} on the wire",
                paired_ratio(times[f"ddp/{wire_type}"], own),
                at_least=GOAL_OF_DDP if has_goals and arm in GOALS else None,
            )
        )
