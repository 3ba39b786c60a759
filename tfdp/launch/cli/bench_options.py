"""Options that benchmarks share: workers, models, batch, blocks and output files."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from tfdp.communication.cluster import Cluster, count_workers
from tfdp.ground.options import FLAT_ALGORITHMS
from tfdp.ground.plans.traffic import NAMES
from tfdp.launch.bench.models import FAMILIES
from tfdp.launch.bench.output import LEFT_OUT, Files, check_available, has_matplotlib
from tfdp.launch.cli import parameter_types as types

# The number of local workers, or none for the cluster of this process.
workers = types.with_options(
    types.count_option(
        "-n --workers N",
        "Local worker processes, on the CPU. Default: all workers of TF_CONFIG, "
        "of the Slurm step or of the MPI job, each of which runs this command; else "
        "this machine's devices.",
        name="num_workers",
    ),
    types.count_option(
        "-D --devices-per-worker D",
        "Logical CPU devices in each local worker. Default: 1.",
    ),
)
# The algorithms of the all-reduce that take turns.
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
# What is trained.
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
# What is written; see `checked_files`.
files = types.with_options(
    types.output_option(
        "--json FILE",
        "Where everything goes, as JSON. Default: a new file in ./tfdp-bench.",
    ),
    types.output_option(
        "--plot FILE",
        "Where the picture goes, a PNG. Default: a new file in ./tfdp-bench, "
        "if matplotlib is installed.",
    ),
    types.option("--no-plot", "Draw no picture."),
)


def blocks(default: int) -> types.Decorator:
    """The option that says how often each side has its turn."""
    return types.option(
        "--blocks B",
        "Turns of each side, at least 2: more make the intervals narrower.",
        types.AT_LEAST_TWO,
        default=default,
    )


def run_benchmark(name: str, benchmark: ModuleType, given: dict[str, Any]) -> None:
    """Run a benchmark; end with an error where elements of the results are wrong.

    Args:
        name: String, of the files that are written.
        benchmark: Module with `Settings` and `run`.
        given: Dict of the values of all options, those of the files among them.

    Raises:
        click.ClickException: If what is asked for cannot be run.
    """
    files = checked_files(name, given)
    devices = given.get("devices_per_worker")
    if devices and given["num_workers"] is None:
        with errors_in_one_sentence():
            in_cluster = Cluster.from_environment() is not None or count_workers() > 1
        if in_cluster:
            raise click.UsageError(
                "In a cluster TF_CONFIG says how many devices a worker has. "
                f"Received: --devices-per-worker {devices}"
            )
        given["num_workers"] = 1
    with errors_in_one_sentence():
        num_wrong = benchmark.run(benchmark.Settings(**given), files)
    if num_wrong:
        click.echo(f"tfdp: wrong elements: {num_wrong}", err=True)
        sys.exit(1)


def batch(whose: str) -> types.Decorator:
    """The option that says how many samples each side takes in a step."""
    return types.count_option(
        "--batch B", f"Samples of {whose}.", name="batch_size", default=32
    )


def checked_files(name: str, given: dict[str, Any]) -> Files:
    """The files to write; finds out now what would otherwise fail after minutes."""
    plot: Path | None = given.pop("plot")
    json, no_plot = given.pop("json"), given.pop("no_plot")
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
    """A file in ./tfdp-bench that is not there yet.

    Args:
        name: String, of the benchmark.
        suffix: String, such as `".json"`.

    Returns:
        Path.

    Raises:
        click.UsageError: If the folder cannot be written.
    """
    folder = Path("tfdp-bench")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise click.UsageError(
            f"The folder {folder} cannot be made ({error.strerror}); say with --json "
            "and --plot where results go."
        ) from error
    return folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}{suffix}"


def geometric(first: int, last: int, factor: int) -> list[int]:
    """Geometric series of sizes.

    Args:
        first: Int, the smallest.
        last: Int, the largest or a little more.
        factor: Int, what each is multiplied by.

    Returns:
        List of int.

    Raises:
        click.UsageError: If there is none.

    Example:

    >>> geometric(1024, 20000, 4)
    [1024, 4096, 16384]
    """
    if last < first:
        raise click.UsageError(
            "The smallest size is larger than the largest. "
            f"Received: --min-bytes {first} --max-bytes {last}"
        )
    sizes = [first]
    while sizes[-1] * factor <= last:
        sizes.append(sizes[-1] * factor)
    return sizes


@contextlib.contextmanager
def errors_in_one_sentence() -> Iterator[None]:
    """Report expected errors in one sentence, without a traceback."""
    try:
        yield
    except (ValueError, RuntimeError, OSError) as error:
        raise click.ClickException(str(error)) from error
