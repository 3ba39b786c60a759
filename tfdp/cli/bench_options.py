"""Options that benchmarks share: models, batch, blocks, and what files are written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from tfdp.bench import arguments
from tfdp.bench.models import FAMILIES
from tfdp.bench.output import Files
from tfdp.bench.plots import check_available
from tfdp.cli import values

_Function = TypeVar("_Function", bound=Callable[..., Any])


def blocks(default: int) -> Callable[[_Function], _Function]:
    """The option that says how often each side has its turn."""
    return click.option(
        "--blocks",
        metavar="B",
        default=str(default),
        show_default=True,
        callback=arguments.pairs,
        help="Turns of each side, at least 2: more make the intervals narrower.",
    )


def models(function: _Function) -> _Function:
    """The options that say what is trained."""
    function = click.option(
        "--family",
        type=click.Choice(FAMILIES),
        default="mlp",
        show_default=True,
        help="An MLP with two hidden layers, or a transformer of 4 blocks.",
    )(function)
    return click.option(
        "--models",
        metavar="MILLIONS...",
        multiple=True,
        default=("1", "5", "20"),
        show_default=True,
        callback=arguments.millions,
        help="Sizes of the models, in million parameters.",
    )(function)


def batch(whose: str) -> Callable[[_Function], _Function]:
    """The option that says how many samples each side takes in a step."""
    return click.option(
        "--batch",
        metavar="B",
        default="32",
        show_default=True,
        callback=values.count,
        help=f"Samples of {whose}.",
    )


def files(function: _Function) -> _Function:
    """The options that say what is written; the function is given `files`."""
    for option in (
        click.option("--no-plot", is_flag=True, help="Draw no picture."),
        click.option(
            "--plot",
            metavar="FILE",
            callback=arguments.file_to_write,
            help="Where the picture goes, a PNG. Default: a new file in ./tfdp-bench.",
        ),
        click.option(
            "--json",
            metavar="FILE",
            callback=arguments.file_to_write,
            help="Where everything goes, as JSON. Default: a new file in ./tfdp-bench.",
        ),
    ):
        function = option(function)
    return function


def checked_files(name: str, options: dict[str, Any]) -> Files:
    """The files to write; finds out now what would otherwise fail after minutes."""
    plot: Path | None = options["plot"]
    if options["no_plot"]:
        if plot:
            raise click.UsageError(
                f"Either --plot or --no-plot is given. Received: both, --plot {plot}"
            )
    else:
        with one_sentence():
            check_available()
        plot = plot or arguments.new_file(name, ".png")
    return Files(options["json"] or arguments.new_file(name, ".json"), plot)


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """What cannot be run, and a worker that fails, is told without a traceback."""
    try:
        yield
    except (ValueError, RuntimeError, OSError) as error:
        raise click.ClickException(str(error)) from error
