"""`tfdp goodput`: how a job has spent its time, from the ledger beside its backups."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import click

from tfdp.features.goodput.account import (
    CLASSES,
    STEP,
    Shares,
    shares,
    shares_of_several,
)
from tfdp.features.goodput.ledger import Launch, find, read
from tfdp.ground.text import pluralize
from tfdp.launch.cli import parameter_types as types
from tfdp.launch.cli.errors import usage_errors
from tfdp.launch.cli.screen import new_console

_EXAMPLES = """\b
Examples:
  tfdp goodput backups              the job with these backups
  tfdp goodput tfdp-logs/digits     a job without backups, by its logs
  tfdp goodput backups --plot goodput.png
"""
_NOT_MEASURED = (
    "Exposed communication was not measured, and is a part of the steps: give `fit` a "
    "`CommunicationMonitor`."
)


@click.command(epilog=_EXAMPLES)
@click.argument("directory", metavar="DIR", type=types.FILE)
@types.output_option("--plot FILE", "File for a picture, a PNG.")
@types.option("--json", "Print JSON.", name="as_json")
def goodput(directory: str, plot: Path | None, as_json: bool) -> None:
    """Show how a job has spent its time, restarts included.

    DIR is the directory of its backups, which need not exist any more, or the folder
    of its logs.
    """
    with usage_errors(ValueError, OSError):
        found = _shares_of(directory)
    if not found.total_seconds:
        raise click.UsageError(
            "The ledger of goodput has no line that can be read; give that of another "
            f"job. Received: {directory}"
        )
    if plot is not None:
        _draw(found, directory, plot)
    if as_json:
        click.echo(json.dumps(_content(found), indent=1))
        return
    _show(found, directory)
    if plot is not None:
        click.echo(f"Written: {plot}")


def goodput_of(launch: Launch) -> str:
    """Return the line about how a launched job spent its time, or `""` if unknown.

    Args:
        launch: `Launch`, with the path of the ledger and the start of the launcher.
    """
    # A ledger that cannot be read must not change how a job ends.
    with contextlib.suppress(ValueError, OSError):
        if os.path.exists(launch.path):
            found = _shares_of(launch.path)
            if found.launched == launch.since:
                return f"{found}{_damage(found)}"
    return ""


def _shares_of(directory: str) -> Shares:
    """Return a job's time by class, summed over the ledgers of its newest launch.

    Args:
        directory: String, the job's directory of backups, or its folder of logs.

    Raises:
        ValueError: If there is no ledger.
        OSError: If one cannot be read.
    """
    launched = {path: shares(read(path)).launched for path in find(directory)}
    *_, newest = launched.values()
    ledgers = [read(path) for path, each in launched.items() if each == newest]
    return shares_of_several(ledgers)


def _damage(found: Shares) -> str:
    """Return a clause on the number of damaged ledger lines, or `""` for none."""
    if not found.num_damaged:
        return ""
    lines = pluralize(found.num_damaged, "damaged line")
    return f" (without {lines} of the ledger)"


def _show(found: Shares, directory: str) -> None:
    """Print the table of a job's time, and the line that sums it up.

    Args:
        found: `Shares` of the job.
        directory: String, the job's directory, for the title.
    """
    # rich is imported late, since its import would delay other commands.
    from rich.table import Table

    restarts = pluralize(found.num_restarts, "restart")
    table = Table("time", title=f"Time of the job in {directory}, {restarts}")
    for name in ("seconds", "share"):
        table.add_column(name, justify="right")
    for name, label in CLASSES.items():
        if seconds := found.seconds[name]:
            table.add_row(label, f"{seconds:,.1f}", f"{found.share(name):.1%}")
    table.add_section()
    table.add_row("all", f"{found.total_seconds:,.1f}", "100.0%")
    console = new_console()
    console.print(table)
    console.print(f"{found}{_damage(found)}.")
    if not found.measures_communication:
        console.print(_NOT_MEASURED)


def _content(found: Shares) -> dict[str, Any]:
    """Return the shares of a job as a dict of JSON values."""
    return {
        "total_seconds": found.total_seconds,
        "num_restarts": found.num_restarts,
        "num_damaged_lines": found.num_damaged,
        "measures_communication": found.measures_communication,
        "seconds": found.seconds,
        "share": {name: found.share(name) for name in CLASSES},
    }


def _draw(found: Shares, directory: str, path: Path) -> None:
    """Write a picture with a bar for each class of time.

    Args:
        found: `Shares` of the job.
        directory: String, the job's directory, for the title.
        path: `Path` of the PNG file.

    Raises:
        click.UsageError: If matplotlib is not installed, or the file cannot be written.
    """
    from tfdp.launch.bench import output

    if not output.has_matplotlib():
        raise click.UsageError(
            "A picture needs matplotlib, which is not installed: get it with "
            f"`pip install 'tfdp[bench]'`. Received: --plot {path}"
        )
    names = [name for name in CLASSES if found.seconds[name] or name == STEP]
    figure, axes = output.new_figure(f"Time of the job in {directory}", str(found))
    bars = axes.barh(
        [CLASSES[name] for name in names],
        [100 * found.share(name) for name in names],
        color=[output.COLOURS[2 if name == STEP else 1] for name in names],
    )
    axes.bar_label(bars, [f"{found.seconds[name]:,.1f} s" for name in names], padding=3)
    axes.invert_yaxis()
    # The axis ends at 115 % of the longest bar, which leaves room for the labels at the
    # ends of the bars.
    axes.set_xlim(0, 115 * max(map(found.share, names)))
    axes.set_xlabel("share of the time in percent")
    with usage_errors(OSError):
        output.save(figure, path)
