"""`tfdp bench`: collectives and training, measured side by side on this machine.

The options that its benchmarks share are those of `tools/bench`, too.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from tfdp.communication.cluster import Cluster, count_workers
from tfdp.ground.options import FLAT_ALGORITHMS
from tfdp.ground.plans.traffic import NAMES
from tfdp.launch.bench import collectives as collectives_benchmark
from tfdp.launch.bench import compare as compare_benchmark
from tfdp.launch.bench.models import FAMILIES
from tfdp.launch.bench.nccl_tests import COLLECTIVES
from tfdp.launch.bench.output import LEFT_OUT, Files, check_available, has_matplotlib
from tfdp.launch.cli import parameter_types as types
from tfdp.launch.cli.errors import usage_errors
from tfdp.launch.cli.launch import check_num_workers

_EXAMPLES = """\b
Examples:
  tfdp bench collectives -n 2 --sizes 1MB 16MB
  tfdp bench compare -n 2 --models 1 5
"""
# Benchmarks start `-n` local workers, or without `-n` use the cluster of this process,
# so Slurm or MPI can start the workers.
workers = types.with_options(
    types.count_option(
        "-n --workers N",
        "Local worker processes, on the CPU. Default: all workers of TF_CONFIG, of "
        "the Slurm step or of the MPI job, if this command runs on all of them; else "
        "this machine's devices.",
        name="num_workers",
    ),
    types.count_option(
        "-D --devices-per-worker D",
        "Logical CPU devices in each local worker. Default: 1.",
    ),
)
algorithms = types.option(
    "--algorithms NAME...",
    f"Of the all-reduce: {', '.join(NAMES)}.",
    click.Choice(NAMES),
    multiple=True,
    default=FLAT_ALGORITHMS,
)
node_size = types.count_option(
    "--node-size L", "Replicas of consecutive ranks that count as one node."
)
models = types.with_options(
    types.option(
        "--models MILLIONS...",
        "Sizes of the models, in million parameters.",
        types.MILLIONS,
        name="millions",
        multiple=True,
        default=(1, 5, 20),
    ),
    types.option(
        "--family",
        "An MLP with two hidden layers, a CNN of 6 convolutions, or a "
        "transformer of 4 blocks.",
        click.Choice(FAMILIES),
        default="mlp",
    ),
)
# The `Settings` of a benchmark have no fields for these options: `checked_files`
# converts their values to `Files`.
files = types.with_options(
    types.output_option(
        "--json FILE",
        "File for all results, as JSON. Default: a new file in ./tfdp-bench.",
    ),
    types.output_option(
        "--plot FILE",
        "File for the plot, a PNG. Default: a new file in ./tfdp-bench, if "
        "matplotlib is installed.",
    ),
    types.option("--no-plot", "Draw no plot."),
)


# Expected errors of a benchmark, such as too few replicas, are the user's to correct,
# so this context manager reports them without a traceback.
errors_in_one_sentence = functools.partial(
    usage_errors, ValueError, RuntimeError, OSError, raises=click.ClickException
)


def blocks(default: int) -> types.Decorator:
    """Return a decorator that adds `--blocks`, the timed blocks of each variant.

    Args:
        default: Int, default of the option.
    """
    return types.option(
        "--blocks B",
        "Turns of each side, at least 2: more make the intervals narrower.",
        types.AT_LEAST_TWO,
        default=default,
    )


def run_benchmark(name: str, benchmark: ModuleType, arguments: dict[str, Any]) -> None:
    """Run a benchmark, and exit with code 1 if elements of the results are wrong.

    Args:
        name: String, name of the benchmark, with which the names of its files begin.
        benchmark: Module with `Settings` and `run`.
        arguments: Dict of the values of all options, including those of the files,
            which are removed from it.

    Raises:
        click.ClickException: If the benchmark cannot run with these options.
    """
    files = checked_files(name, arguments)
    devices = arguments.get("devices_per_worker")
    if devices and arguments["num_workers"] is None:
        with errors_in_one_sentence():
            in_cluster = Cluster.from_environment() is not None or count_workers() > 1
        if in_cluster:
            raise click.UsageError(
                "In a cluster TF_CONFIG says how many devices a worker has. "
                f"Received: --devices-per-worker {devices}"
            )
        arguments["num_workers"] = 1
    with errors_in_one_sentence():
        check_num_workers(arguments.get("num_workers") or 1)
        num_wrong = benchmark.run(benchmark.Settings(**arguments), files)
    if num_wrong:
        click.echo(f"tfdp: wrong elements: {num_wrong}", err=True)
        sys.exit(1)


def batch(whose: str) -> types.Decorator:
    """Return a decorator that adds `--batch`, the number of samples in a step.

    Args:
        whose: String, what has that many samples, such as `"each replica"`.
    """
    return types.count_option(
        "--batch B", f"Samples of {whose}.", name="batch_size", default=32
    )


def checked_files(name: str, arguments: dict[str, Any]) -> Files:
    """Remove the options of output files from arguments, and return checked `Files`.

    The check precedes the benchmark, which takes minutes.

    Args:
        name: String, name of the benchmark.
        arguments: Dict of the values of all options.

    Raises:
        click.ClickException: If a file cannot be written, or options conflict.
    """
    plot: Path | None = arguments.pop("plot")
    json, no_plot = arguments.pop("json"), arguments.pop("no_plot")
    note = ""
    if no_plot:
        if plot:
            raise click.UsageError(
                f"Either --plot or --no-plot is given. Received: both, --plot {plot}"
            )
    elif plot:
        with errors_in_one_sentence():
            check_available()
    elif has_matplotlib():
        plot = _new_file(name, ".png")
    else:
        note = LEFT_OUT
    return Files(json or _new_file(name, ".json"), plot, note)


def _new_file(name: str, suffix: str) -> Path:
    """Return the path of a new file in ./tfdp-bench, named by the current time.

    Args:
        name: String, name of the benchmark.
        suffix: String, suffix of the file such as `".json"`.

    Returns:
        Path of the file, which does not exist yet.

    Raises:
        click.UsageError: If the folder cannot be created.
    """
    folder = Path("tfdp-bench")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise click.UsageError(
            f"The folder {folder} cannot be created ({error.strerror}); give the files "
            "of the results with --json and --plot."
        ) from error
    return folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}{suffix}"


def geometric(first: int, last: int, factor: int) -> list[int]:
    """Return a geometric series of sizes.

    Args:
        first: Int, the smallest size.
        last: Int, upper bound of the sizes.
        factor: Int, ratio of a size to the previous one.

    Returns:
        List of ints, the sizes in ascending order.

    Raises:
        click.UsageError: If `last` is smaller than `first`.

    Example:

    >>> geometric(1024, 20000, 4)
    [1024, 4096, 16384]
    """
    if last < first:
        raise click.UsageError(
            "The smallest size is larger than the largest. "
            f"Received: --min-bytes {first} --max-bytes {last}"
        )
    sizes = (first * factor**index for index in itertools.count())
    return list(itertools.takewhile(lambda size: size <= last, sizes))


@click.command(cls=types.ManyValues)
@types.count_option(
    "-n --workers N",
    "Replicas of each side, among which the cores are divided: local worker "
    "processes, or devices of one process.",
    name="num_workers",
    default=2,
)
@models
@batch("each replica; plain Keras has N times as many")
@types.option(
    "--torch-python PATH",
    "An interpreter that has PyTorch. Default: this one.",
    default=sys.executable,
    show_default=False,
)
@blocks(20)
@files
def compare(**arguments: Any) -> None:
    """Time training with tfdp, plain Keras, tf.distribute and PyTorch's DDP.

    Keras fit with tfdp runs in one process of N devices and in N processes, plain Keras
    fit on all cores with the same global batch, and loops with stock tf.distribute and
    DDP (with Gloo, where PyTorch is installed) in N processes. First all run with their
    defaults, then all tuned, in alternating blocks of steps.
    """
    if (count := arguments["num_workers"]) < 2:
        raise click.UsageError(
            f"A comparison needs at least 2 workers. Received: -n {count}"
        )
    run_benchmark("compare", compare_benchmark, arguments)


@click.command(cls=types.ManyValues)
@workers
@types.option(
    "--collectives NAME...",
    f"Of {', '.join(COLLECTIVES)}.",
    click.Choice(COLLECTIVES),
    multiple=True,
    default=("all_reduce",),
)
@algorithms
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
@node_size
@blocks(10)
@files
def collectives(min_bytes: int, max_bytes: int, factor: int, **arguments: Any) -> None:
    """Time every collective and check its results, as nccl-tests does.

    The columns are those of nccl-tests: size of the larger of input and output,
    number of elements, median time, bandwidth of the algorithm and of the bus, and
    how many elements are wrong. The algorithms of a size alternate.
    """
    sizes = arguments["sizes"] or geometric(min_bytes, max_bytes, factor)
    arguments["sizes"] = sizes
    run_benchmark("collectives", collectives_benchmark, arguments)


@click.group(
    commands=[collectives, compare],
    no_args_is_help=False,
    invoke_without_command=True,
    epilog=_EXAMPLES,
)
@click.pass_context
def bench(context: click.Context) -> None:
    """Compare collectives and training steps, side by side.

    The compared variants run in alternating blocks. Each benchmark prints a table,
    writes JSON and a plot, and names the machine and the versions. Run it on an idle
    machine.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
