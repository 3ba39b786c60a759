"""What every benchmark prints and writes: the machine, a table, a bar, files."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.table
from rich import box
from rich.console import Console
from rich.progress import Progress

from tfdp.bench.machine import caption, describe, load

# A table that is cut off says nothing: better that a narrow terminal breaks lines.
_LEAST_WIDTH = 120


def about(benchmark: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a run is: the first part of its JSON.

    Args:
        benchmark: String, its name.
        settings: Mapping of what was asked for.

    Returns:
        Dict.
    """
    return {"benchmark": benchmark, **describe("tfdp"), "settings": dict(settings)}


def new_console() -> Console:
    """The console of results, as wide as the terminal and wide enough for a table.

    Returns:
        A `rich` console.
    """
    console = Console(highlight=False, markup=False)
    console.width = max(console.width, _LEAST_WIDTH)
    return console


@contextlib.contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[], None]]:
    """Draws a bar on stderr if that is a terminal, until the block ends.

    Args:
        label: String, what is going on.
        total: Int, the number of turns.

    Yields:
        Callable that counts one more turn.
    """
    is_terminal = sys.stderr.isatty()
    console = Console(file=sys.stderr)
    with Progress(console=console, disable=not is_terminal, transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)


@dataclasses.dataclass(frozen=True)
class Files:
    """Where a benchmark writes.

    Args:
        json: Path of the JSON file.
        plot: Path of the PNG file, or `None` for none.
    """

    json: Path
    plot: Path | None


@dataclasses.dataclass(frozen=True)
class Table:
    """What a benchmark prints.

    Args:
        columns: Sequence of strings, the headings.
        rows: Sequence of rows of strings.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def report(
    console: Console,
    content: Mapping[str, Any],
    files: Files,
    *,
    table: Table,
    draw: Callable[[str, Path], None],
    notes: Sequence[str] = (),
) -> None:
    """Prints, draws and writes what a run has found, when it is over.

    Args:
        console: Console.
        content: Mapping, from `about` and more: all that goes into the JSON.
        files: `Files` to write.
        table: `Table`.
        draw: Callable that is given the machine and the versions as a string, and
            the path of the PNG file.
        notes: Sequence of strings, what is said below the table. Defaults to none.
    """
    console.print(caption(content), soft_wrap=True)
    console.print(
        f"load average of a minute: {content['load_average_1_min']} at the start, "
        f"{load()} at the end"
    )
    console.print(_drawn(table))
    for line in notes:
        console.print(line, soft_wrap=True)
    if files.plot:
        draw(caption(content), files.plot)
    content = {**content, "load_average_1_min_at_end": load()}
    files.json.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    written = ", ".join(str(path) for path in (files.json, files.plot) if path)
    console.print(f"Written: {written}", soft_wrap=True)


def _drawn(table: Table) -> rich.table.Table:
    """Columns of numbers are to the right."""
    drawn = rich.table.Table(box=box.SIMPLE)
    for index, name in enumerate(table.columns):
        cells = [row[index] for row in table.rows]
        is_number = all(cell[:1].isdigit() or cell in ("", "-") for cell in cells)
        drawn.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*row)
    return drawn
