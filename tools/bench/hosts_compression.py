"""A training step between two hosts with compressed gradients: time and bytes."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from tfdp.launch.bench.machine import torch_version
from tfdp.launch.bench.sides import alternate, paired_ratio, started
from tools.bench.hosts_bed import NUM_HOSTS, TwoHosts
from tools.bench.hosts_sides import (
    RATE_OF_START,
    HostsSide,
    idle_bytes_per_second,
    in_megabytes,
    utilisations,
)
from tools.bench.link_rate import bits_per_second
from tools.bench.models import MODELS
from tools.bench.report import Arguments, Figure, Report

PLAIN = "hierarchical"
# What the workers make of these names is in `hosts_compression_worker`.
VARIANTS = (PLAIN, "bf16", "int8", "int4", "PowerSGD", "TopK")
MODEL = MODELS["transformer"]
RATE = "100mbit"
# Speed over the uncompressed hierarchical all-reduce, and bytes over the link.
GOALS_OF_SPEED = {"int8": 3.0, "PowerSGD": 5.0}
GOALS_OF_BYTES = {"int8": 0.27, "int4": 0.14, "PowerSGD": 0.05}
# Over PyTorch's DDP with its hook of the same rank, whatever options serve it best.
LOW_RANK = "PowerSGD"
RANK = {"matrix_approximation_rank": 4}
BATCHED = {**RANK, "batch_tensors_with_same_shape": True}
DDP_VARIANTS: dict[str, dict[str, Any]] = {
    LOW_RANK: {"power_sgd": RANK},
    f"{LOW_RANK} tuned": {"power_sgd": RANK, "tuned": True},
    f"{LOW_RANK} tuned, batched": {"power_sgd": BATCHED, "tuned": True},
}
GOAL_OF_DDP = 1.2
PAIRS_OF_DDP = 8  # for each block of the others


def run(args: Arguments) -> None:
    """Measure the transformer with every number of workers on every rate."""
    version = torch_version(args.torch_python)
    setting = {
        "benchmark": "step of a GradientTape loop with SGD on 2 hosts, network "
        "namespaces joined by a veth pair with tbf, 1 thread each; gradients "
        "compressed across hosts",
        "model": str(MODEL),
        "batch": f"{args.batch} for each worker",
        "rates": ", ".join(args.rates),
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
    setup = {
        "batch_size": args.batch,
        "model": "transformer",
        "variants": list(VARIANTS),
    }
    module = "tools.bench.hosts_compression_worker"
    with TwoHosts(RATE_OF_START) as bed:
        sides = [HostsSide(bed, "tfdp", module, setup, workers_per_host)]
        if has_torch:
            sides.append(_torch_side(bed, args, workers_per_host))
        with started(*sides):
            for rate in args.rates:
                bed.set_rate(rate)
                _measure_rate(report, bed, sides, args.blocks, workers_per_host)


def _torch_side(bed: TwoHosts, args: Arguments, workers_per_host: int) -> HostsSide:
    told = {"model": dataclasses.asdict(MODEL), "batch_size": args.batch}
    variants = {name: {**told, **options} for name, options in DDP_VARIANTS.items()}
    module, python = "tools.bench.ddp_worker", args.torch_python
    return HostsSide(
        bed, "ddp", module, {"variants": variants}, workers_per_host, python
    )


def _measure_rate(
    report: Report,
    bed: TwoHosts,
    sides: list[HostsSide],
    blocks: int,
    workers_per_host: int,
) -> None:
    """Run the blocks of all variants in turn, and report."""
    side, *others = sides
    variants = [(side, name) for name in VARIANTS]
    times = alternate(variants, blocks=blocks, steps=1, warm_up=2)
    idle = idle_bytes_per_second(bed)
    title = f"{NUM_HOSTS} x {workers_per_host}, {bed.rate}"
    has_goals = bed.rate == RATE and workers_per_host > 1
    report.add_times({f"{title}: {name}": found for name, found in times.items()})
    sent = {name: side.bytes_per_step(name, blocks, idle) for name in VARIANTS}
    plain = times[f"tfdp/{PLAIN}"]
    for name in VARIANTS:
        own = times[f"tfdp/{name}"]
        used = utilisations(sent[name], own, bits_per_second(bed.rate))
        share = statistics.median(sent[name]) / statistics.median(sent[PLAIN])
        report.add(
            Figure(
                f"{title}, {name}: bytes over the link, as a share of {PLAIN}'s",
                round(share, 4),
                at_most=GOALS_OF_BYTES.get(name),
                note=f"{in_megabytes(sent[name])} MB per direction, utilisation "
                f"{statistics.median(used):.2f}",
            )
        )
        if name != PLAIN:
            goal = GOALS_OF_SPEED.get(name) if has_goals else None
            report.add(
                Figure(
                    f"{title}, {name}: speed of the step relative to {PLAIN}",
                    paired_ratio(plain, own),
                    at_least=goal,
                )
            )
    for other in others:
        _measure_ddp(report, side, other, PAIRS_OF_DDP * blocks, title, has_goals)


def _measure_ddp(
    report: Report,
    ours: HostsSide,
    theirs: HostsSide,
    blocks: int,
    title: str,
    has_goals: bool,
) -> None:
    """Compare the factors of ours with those of DDP, whose steps are as short."""
    variants = [(ours, LOW_RANK), *((theirs, name) for name in DDP_VARIANTS)]
    # The third step of DDP is the first that is compressed.
    times = alternate(variants, blocks=blocks, steps=1, warm_up=3)
    report.add_times({f"{title}: {name}": found for name, found in times.items()})
    own = in_megabytes(ours.bytes_per_step(LOW_RANK, blocks, 0.0))
    for name in DDP_VARIANTS:
        rival = in_megabytes(theirs.bytes_per_step(name, blocks, 0.0))
        report.add(
            Figure(
                f"{title}, {LOW_RANK}: speed of the step relative to DDP's, {name}",
                paired_ratio(times[f"ddp/{name}"], times[f"tfdp/{LOW_RANK}"]),
                at_least=GOAL_OF_DDP if has_goals else None,
                note=f"DDP sends {rival} MB per direction, tfdp {own}",
            )
        )
