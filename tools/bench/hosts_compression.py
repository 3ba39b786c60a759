"""A training step between two hosts with compressed gradients: time and bytes."""

from __future__ import annotations

import statistics

from tfdp.bench.link_rate import bits_per_second
from tfdp.bench.sides import alternate, started
from tfdp.bench.stats import paired_ratio
from tools.bench.hosts_bed import NUM_HOSTS, TwoHosts
from tools.bench.hosts_sides import (
    RATE_OF_START,
    HostsSide,
    idle_bytes_per_second,
    in_megabytes,
    utilisations,
)
from tools.bench.models import MODELS
from tools.bench.report import Arguments, Figure, Report

PLAIN = "hierarchical"
# What the workers make of these names is in `hosts_compression_worker`.
ARMS = (PLAIN, "bf16", "int8", "int4", "PowerSGD", "TopK")
MODEL = MODELS["transformer"]
RATE = "100mbit"
# Speed over the uncompressed hierarchical all-reduce, and bytes over the link.
GOALS_OF_SPEED = {"int8": 3.0, "PowerSGD": 5.0}
GOALS_OF_BYTES = {"int8": 0.27, "int4": 0.14, "PowerSGD": 0.05}


def run(args: Arguments) -> None:
    """Measure the transformer with every number of workers on every rate."""
    setting = {
        "benchmark": "step of a GradientTape loop with SGD on 2 hosts, network "
        "namespaces joined by a veth pair with tbf, 1 thread each; gradients "
        "compressed across hosts",
        "model": str(MODEL),
        "batch": f"{args.batch} for each worker",
        "rates": ", ".join(args.rates),
        "workers per host": ", ".join(map(str, args.workers_per_host)),
    }
    report = Report(args, setting)
    for workers_per_host in args.workers_per_host:
        _measure_workers(report, args, workers_per_host)
    report.finish()


def _measure_workers(report: Report, args: Arguments, workers_per_host: int) -> None:
    setup = {"batch_size": args.batch, "model": "transformer", "arms": list(ARMS)}
    module = "tools.bench.hosts_compression_worker"
    with TwoHosts(RATE_OF_START) as bed:
        side = HostsSide(bed, "tfdp", module, setup, workers_per_host)
        with started(side):
            for rate in args.rates:
                bed.set_rate(rate)
                _measure_rate(report, bed, side, args.blocks, workers_per_host)


def _measure_rate(
    report: Report, bed: TwoHosts, side: HostsSide, blocks: int, workers_per_host: int
) -> None:
    """Run the blocks of all arms in turn, and report."""
    arms = [(side, name) for name in ARMS]
    times = alternate(arms, blocks=blocks, steps=1, warm_up=2)
    idle = idle_bytes_per_second(bed)
    title = f"{NUM_HOSTS} x {workers_per_host}, {bed.rate}"
    has_goals = bed.rate == RATE and workers_per_host > 1
    report.add_times({f"{title}: {name}": found for name, found in times.items()})
    sent = {name: side.bytes_per_step(name, blocks, idle) for name in ARMS}
    plain = times[f"tfdp/{PLAIN}"]
    for name in ARMS:
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
