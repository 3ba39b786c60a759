"""`tfdp bench collectives`: time, bandwidth and results of every collective."""

from __future__ import annotations

import sys
from typing import Any

import click

from tfdp.bench import arguments
from tfdp.bench.arguments import ManyValues
from tfdp.bench.bandwidth import COLLECTIVES
from tfdp.bench.collectives import ITEM_BYTES, Settings
from tfdp.bench.collectives_run import run
from tfdp.cli import bench_options as options
from tfdp.cli import values
from tfdp.cluster import Cluster
from tfdp.options import FLAT_ALGORITHMS

_ALGORITHMS = (*FLAT_ALGORITHMS, "hierarchical")


@click.command(cls=ManyValues)
@click.option(
    "-n",
    "--workers",
    metavar="N",
    callback=values.count,
    help="Local worker processes, on the CPU. Default: all workers of TF_CONFIG or of "
    "the Slurm step, each of which runs this command; else this machine's devices.",
)
@click.option(
    "-D",
    "--devices-per-worker",
    metavar="D",
    callback=values.count,
    help="Logical CPU devices in each local worker. Default: 1.",
)
@click.option(
    "--collectives",
    metavar="NAME...",
    multiple=True,
    type=click.Choice(COLLECTIVES),
    default=("all_reduce",),
    show_default=True,
    help=f"Of {', '.join(COLLECTIVES)}.",
)
@click.option(
    "--algorithms",
    metavar="NAME...",
    multiple=True,
    type=click.Choice(_ALGORITHMS),
    default=FLAT_ALGORITHMS,
    show_default=True,
    help="Of the all-reduce: ring, tree, halving_doubling, hierarchical.",
)
@click.option(
    "--sizes",
    metavar="SIZE...",
    multiple=True,
    callback=arguments.sizes,
    help="Sizes, such as 4KB 1MB; instead of the three options below.",
)
@click.option(
    "--min-bytes",
    metavar="SIZE",
    default="4KB",
    show_default=True,
    callback=arguments.size,
    help="Smallest size.",
)
@click.option(
    "--max-bytes",
    metavar="SIZE",
    default="16MB",
    show_default=True,
    callback=arguments.size,
    help="Largest size.",
)
@click.option(
    "--factor",
    metavar="F",
    default="4",
    show_default=True,
    callback=arguments.factor,
    help="What a size is multiplied by to get the next.",
)
@click.option(
    "--dtype",
    type=click.Choice(tuple(ITEM_BYTES)),
    default="float32",
    show_default=True,
    help="Type of the elements.",
)
@click.option(
    "--node-size",
    metavar="L",
    callback=values.count,
    help="Replicas of consecutive ranks that count as one node.",
)
@options.blocks(10)
@options.files
def collectives(min_bytes: int, max_bytes: int, factor: int, **given: Any) -> None:
    """Times every collective and checks its results, as nccl-tests does.

    The columns are those of nccl-tests: size of the larger of input and output,
    number of elements, median time, bandwidth of the algorithm and of the bus, and
    how many elements are wrong. The algorithms of a size take turns.
    """
    sizes = given["sizes"] or arguments.geometric(min_bytes, max_bytes, factor)
    files = options.checked_files("collectives", given)
    num_workers = _num_workers(given["workers"], given["devices_per_worker"])
    settings = Settings(
        collectives=given["collectives"],
        algorithms=given["algorithms"],
        sizes=sizes,
        dtype=given["dtype"],
        blocks=given["blocks"],
        num_workers=num_workers,
        devices_per_worker=given["devices_per_worker"],
        node_size=given["node_size"],
    )
    with options.one_sentence():
        num_wrong = run(settings, files)
    if num_wrong:
        click.echo(f"tfdp: {num_wrong} elements are wrong", err=True)
        sys.exit(1)


def _num_workers(given: int | None, devices: int | None) -> int | None:
    """The number of local processes, or `None` for the cluster of this process."""
    with options.one_sentence():
        in_cluster = Cluster.from_environment() is not None
    if given is not None or not devices:
        return given
    if in_cluster:
        raise click.UsageError(
            "In a cluster TF_CONFIG says how many devices a worker has. "
            f"Received: --devices-per-worker {devices}"
        )
    return 1
