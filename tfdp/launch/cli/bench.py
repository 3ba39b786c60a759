"""`tfdp bench`: collectives and training, measured side by side on this machine."""

from __future__ import annotations

import sys
from typing import Any

import click

from tfdp.launch.bench import collectives as collectives_benchmark
from tfdp.launch.bench import compare as compare_benchmark
from tfdp.launch.bench.nccl_tests import COLLECTIVES
from tfdp.launch.cli import bench_options as options
from tfdp.launch.cli import parameter_types as types

_EXAMPLES = """\b
Examples:
  tfdp bench collectives -n 2 --sizes 1MB 16MB
  tfdp bench compare -n 2 --models 1 5
"""


@click.command(cls=types.ManyValues)
@types.count_option(
    "-n --workers N",
    "Replicas of each side, among which the cores are divided: local worker "
    "processes, or devices of one process.",
    name="num_workers",
    default=2,
)
@options.models
@options.batch("each replica; plain Keras has N times as many")
@types.option(
    "--torch-python PATH",
    "An interpreter that has PyTorch. Default: this one.",
    default=sys.executable,
    show_default=False,
)
@options.blocks(20)
@options.files
def compare(**arguments: Any) -> None:
    """Time Keras fit with tfdp, against plain Keras and what else there is.

    tfdp runs in one process of N devices and in N processes, plain Keras on all
    cores with the same global batch, stock tf.distribute and PyTorch's DDP (with Gloo,
    where PyTorch is installed) as loops in N processes: all with their defaults and
    tuned. All of the same settings are alive at the same time and take turns.
    """
    if (count := arguments["num_workers"]) < 2:
        raise click.UsageError(
            f"A comparison needs at least 2 workers. Received: -n {count}"
        )
    options.run_benchmark("compare", compare_benchmark, arguments)


@click.command(cls=types.ManyValues)
@options.workers
@types.option(
    "--collectives NAME...",
    f"Of {', '.join(COLLECTIVES)}.",
    click.Choice(COLLECTIVES),
    multiple=True,
    default=("all_reduce",),
)
@options.algorithms
@types.option(
    "--sizes SIZE...",
    "Sizes, such as 4KB 1MB; instead of the three options below.",
    types.SIZE,
    multiple=True,
)
@types.option("--min-bytes SIZE", "Smallest size.", types.SIZE, default="4KB")
@types.option("--max-bytes SIZE", "Largest size.", types.SIZE, default="16MB")
@types.option(
    "--factor F",
    "Factor from one size to the next.",
    types.AT_LEAST_TWO,
    default=4,
)
@types.option(
    "--dtype",
    "Type of the elements.",
    click.Choice(tuple(collectives_benchmark.ITEM_BYTES)),
    default="float32",
)
@options.node_size
@options.blocks(10)
@options.files
def collectives(min_bytes: int, max_bytes: int, factor: int, **arguments: Any) -> None:
    """Time every collective and check its results, as nccl-tests does.

    The columns are those of nccl-tests: size of the larger of input and output,
    number of elements, median time, bandwidth of the algorithm and of the bus, and
    how many elements are wrong. The algorithms of a size take turns.
    """
    sizes = arguments["sizes"] or options.geometric(min_bytes, max_bytes, factor)
    arguments["sizes"] = sizes
    options.run_benchmark("collectives", collectives_benchmark, arguments)


@click.group(
    commands=[collectives, compare],
    no_args_is_help=False,
    invoke_without_command=True,
    epilog=_EXAMPLES,
)
@click.pass_context
def bench(context: click.Context) -> None:
    """Compare collectives and training steps, side by side.

    The sides take turns. Each benchmark prints a table of ratios, writes JSON and a
    plot, and names the machine and the versions. Run it on an idle machine.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
