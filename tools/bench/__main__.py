"""Measure one of the figures of docs/reports/performance.md, as ratios in one run.

    python -m tools.bench NAME [--out FILE]

Both sides are alive at the same time and take turns, block by block. Run it on an
idle machine: a busy one makes the intervals wide. `buckets` trains a script with
several bucket sizes; `models` and `train` print tables, as `tfdp bench` does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import click

from tfdp.launch.cli import parameter_types as types
from tfdp.launch.cli.main import run_command
from tools.bench import (
    accumulation,
    algorithms,
    all_reduce,
    compression,
    consistency,
    flight,
    growth,
    hosts,
    hosts_compression,
    hosts_models,
    hosts_mpi,
    hosts_step,
    input_rows,
    kernels,
    monitor,
    parameters,
    parameters_memory,
    rebalance,
    recovery,
    saves,
    sharding,
    single,
    start,
    store,
    transport,
    tuning,
    update,
    wrapping,
    xla,
)
from tools.bench.buckets_command import buckets
from tools.bench.gradients import models
from tools.bench.hosts_bed import missing
from tools.bench.hosts_sides import RATES
from tools.bench.link_rate import LINK_RATE
from tools.bench.models import MODELS
from tools.bench.report import PROGRAM, Arguments
from tools.bench.train import train

Option = Callable[[Callable], Callable]

OUT = click.option(
    "--out", metavar="FILE", type=types.OUTPUT_FILE, help="Write all here as JSON."
)
BLOCKS = click.option(
    "--blocks",
    metavar="B",
    type=types.COUNT,
    default=30,
    show_default=True,
    help="Turns of each side.",
)


def models_of(names: Iterable[str], text: str) -> Option:
    """The option that says of which models the figures are; all of them by default."""
    return click.option(
        "--models",
        metavar="NAME...",
        multiple=True,
        type=click.Choice(tuple(names)),
        default=tuple(names),
        show_default=True,
        help=text,
    )


MODELS_TO_TRAIN = models_of(MODELS, "Models to train.")
MODELS_TO_COMPILE = models_of(xla.MODELS, "Models to train.")
MODELS_WITH_KERNELS = models_of(kernels.MODELS, "Models to train.")
MODELS_TO_COMPRESS = models_of(compression.MODELS, "Models to train.")
MODELS_TO_REDUCE = models_of(hosts_models.MODELS, "Models whose gradients are reduced.")
TORCH = click.option(
    "--torch-python",
    metavar="PATH",
    default=sys.executable,
    help="An interpreter that has PyTorch. Default: this one.",
)


def rates_of_link(*default: str) -> Option:
    """The option that says how fast the link between the hosts is."""
    return click.option(
        "--rates",
        metavar="RATE...",
        multiple=True,
        type=LINK_RATE,
        default=default,
        show_default=True,
        help="Rates of the link between the hosts.",
    )


RATES_OF_LINK = rates_of_link(*RATES)


def workers_per_host(*default: int) -> Option:
    """The option that says how many workers run on each host."""
    return click.option(
        "--workers-per-host",
        metavar="N...",
        multiple=True,
        type=types.COUNT,
        default=default,
        show_default=True,
        help="Workers on each host.",
    )


MEGABYTES = click.option(
    "--megabytes",
    metavar="MB",
    type=types.COUNT,
    default=64,
    show_default=True,
    help="Size of the gradients.",
)
BATCH = click.option(
    "--batch",
    metavar="B",
    type=types.COUNT,
    default=2,
    show_default=True,
    help="Samples of each worker.",
)


def benchmark(
    name: str, run: Callable[[Arguments], None], *options: Option
) -> click.Command:
    """Make the command of a benchmark.

    Args:
        name: String.
        run: Callable of `Arguments`.
        *options: Options beside those that all have.

    Returns:
        `click.Command`.
    """

    def command(**given: Any) -> None:
        if name.startswith("hosts") and (lacks := missing()):
            raise click.UsageError(lacks)
        run(Arguments(**given))

    for option in (*options, BLOCKS, OUT):
        command = option(command)
    text = sys.modules[run.__module__].__doc__ or ""
    return click.command(name, cls=types.ManyValues, help=text)(command)


BENCHMARKS = [
    benchmark("single", single.run),
    benchmark("all-reduce", all_reduce.run),
    benchmark("transport", transport.run, TORCH),
    benchmark("algorithms", algorithms.run),
    benchmark("growth", growth.run),
    benchmark("accumulation", accumulation.run),
    benchmark("update", update.run),
    benchmark("sharding", sharding.run),
    benchmark("parameters", parameters.run, TORCH),
    benchmark("parameters-memory", parameters_memory.run, TORCH),
    benchmark("wrapping", wrapping.run),
    benchmark("monitor", monitor.run, MODELS_TO_TRAIN),
    benchmark("consistency", consistency.run, MODELS_TO_TRAIN),
    benchmark("flight", flight.run, MODELS_TO_TRAIN),
    benchmark("rebalance", rebalance.run),
    benchmark("input-rows", input_rows.run, TORCH),
    benchmark("start", start.run, TORCH),
    benchmark("store", store.run),
    benchmark("saves", saves.run, TORCH),
    benchmark("recovery", recovery.run, TORCH),
    benchmark("kernels", kernels.run, MODELS_WITH_KERNELS),
    benchmark("xla", xla.run, MODELS_TO_COMPILE),
    benchmark("tuning", tuning.run, rates_of_link("100mbit")),
    benchmark("compression", compression.run, MODELS_TO_COMPRESS),
    benchmark("hosts", hosts.run, RATES_OF_LINK, workers_per_host(2, 4), MEGABYTES),
    benchmark(
        "hosts-models",
        hosts_models.run,
        *(RATES_OF_LINK, workers_per_host(1, 2), MODELS_TO_REDUCE),
    ),
    benchmark(
        "hosts-mpi",
        hosts_mpi.run,
        *(RATES_OF_LINK, workers_per_host(1, 2), MODELS_TO_REDUCE),
    ),
    benchmark(
        "hosts-step",
        hosts_step.run,
        *(RATES_OF_LINK, workers_per_host(1, 2), BATCH, TORCH),
    ),
    benchmark(
        "hosts-compression",
        hosts_compression.run,
        *(rates_of_link(hosts_compression.RATE), workers_per_host(2), BATCH, TORCH),
    ),
    benchmark("hosts-plan", algorithms.run_on_hosts, RATES_OF_LINK),
]


@click.group(
    commands=[*BENCHMARKS, buckets, models, train],
    help=(__doc__ or "").partition("\n")[0],
    context_settings={"help_option_names": ["-h", "--help"]},
)
def bench() -> None:
    """Run one of the benchmarks."""


if __name__ == "__main__":
    run_command(bench, PROGRAM)
