"""Output of a benchmark: progress bar, table, JSON file and plot."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich.table
from rich import box
from rich.console import Console
from rich.progress import Progress

from tfdp.launch.bench.machine import caption, describe, load

if TYPE_CHECKING:
    # Matplotlib is an optional dependency, so only type checkers import it here.
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Least and largest width of the console in columns. A narrow terminal may wrap the rows
# of a table, which is better than cells that are cut off.
_MIN_WIDTH, _MAX_WIDTH = 120, 1000
# The palette of Okabe and Ito, which is distinguishable with color blindness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
_INSTALL = "pip install 'tfdp[bench]'"
# Matplotlib is optional: without it, a run prints this text instead of a plot.
LEFT_OUT = f"No plot was drawn, since matplotlib is not installed: `{_INSTALL}`"
_DOTS_PER_INCH = 150
_WIDTH, _HEIGHT = 7.5, 4.5  # inches, the unit of matplotlib's `figsize`
_MATPLOTLIB_SETTINGS: Any = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10,
    "grid.alpha": 0.3,
}


def about(
    benchmark: str, settings: Mapping[str, Any], program: str = "tfdp"
) -> dict[str, Any]:
    """Return the head of a run's JSON: benchmark, machine, versions and settings.

    Args:
        benchmark: String, name of the benchmark.
        settings: Mapping of the settings of the run.
        program: String, name of the program in the described command. Defaults to
            `"tfdp"`.

    Returns:
        Dict of JSON values.
    """
    return {"benchmark": benchmark, **describe(program), "settings": dict(settings)}


def new_console() -> Console:
    """Return a `rich` console of at least 120 columns, for the results."""
    console = Console(highlight=False, markup=False)
    console.width = max(console.width, _MIN_WIDTH)
    return console


@contextlib.contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on stderr, if that is a terminal, until the context ends.

    Args:
        label: String, text before the bar.
        total: Int, number of blocks of the run.

    Yields:
        Callable that advances the bar by one block.
    """
    is_terminal = sys.stderr.isatty()
    console = Console(file=sys.stderr)
    with Progress(console=console, disable=not is_terminal, transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)


@dataclasses.dataclass(frozen=True)
class Files:
    """Output files of a benchmark.

    Args:
        json: Path of the JSON file.
        plot: Path of the PNG file, or `None` for none.
        note: String, printed below the names of the files: why there is no plot, or
            `""` if there is one or the user has declined it. Defaults to `""`.
    """

    json: Path
    plot: Path | None
    note: str = ""


def report(
    content: Mapping[str, Any],
    files: Files,
    rows: Sequence[Any],
    columns: Mapping[str, Callable[[Any], str]],
    draw: Callable[[Sequence[Any], str, Path], None],
    *,
    heading: str = "",
    notes: Sequence[str] = (),
) -> None:
    """Print the results of a run, and write the JSON file and the plot.

    Args:
        content: Mapping, the content of the JSON file except the rows; includes the
            result of `about`.
        files: `Files` to write.
        rows: Sequence of dataclass instances, the rows of the table.
        columns: Mapping from a heading to a callable that formats the cell of a row.
        draw: Callable that takes the rows, a caption with the machine and the versions,
            and the path of the PNG file.
        heading: String, the first line. Defaults to `""`.
        notes: Sequence of strings, lines below the table. Defaults to `()`.
    """
    console = new_console()
    if heading:
        console.print(heading)
    console.print(caption(content), soft_wrap=True)
    console.print(
        f"load average of a minute: {content['load_average_1_min']} at the start, "
        f"{load()} at the end"
    )
    table = _table(rows, columns)
    wide = console.options.update(width=_MAX_WIDTH)
    console.width = max(console.width, console.measure(table, options=wide).maximum)
    console.print(table)
    for line in notes:
        console.print(line, soft_wrap=True)
    if files.plot:
        draw(rows, caption(content), files.plot)
    row_content = {"rows": [dataclasses.asdict(row) for row in rows]}
    content = {**content, **row_content, "load_average_1_min_at_end": load()}
    files.json.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    written = ", ".join(str(path) for path in (files.json, files.plot) if path)
    console.print(f"Written: {written}", soft_wrap=True)
    if files.note:
        console.print(files.note, soft_wrap=True)


def _table(
    rows: Sequence[Any], columns: Mapping[str, Callable[[Any], str]]
) -> rich.table.Table:
    """Return the results as a `rich` table, with numbers aligned to the right.

    Args:
        rows: Sequence of dataclass instances, the rows of the table.
        columns: Mapping from a heading to a callable that formats the cell of a row.
    """
    table = rich.table.Table(box=box.SIMPLE)
    for name, show in columns.items():
        is_number = all(
            cell.lstrip("-")[:1].isdigit() or cell in ("", "-")
            for cell in map(show, rows)
        )
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(show(row) for show in columns.values()))
    return table


def has_matplotlib() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_available() -> None:
    """Check that matplotlib is installed, which plots need.

    Raises:
        ValueError: If matplotlib is not installed.
    """
    if not has_matplotlib():
        raise ValueError(
            "A plot needs matplotlib, which is not installed: get it with "
            f"`{_INSTALL}`, or give --no-plot."
        )


def new_figure(title: str, caption: str = "") -> tuple[Figure, Axes]:
    """Create a figure with one pair of axes.

    Args:
        title: String, title above the figure.
        caption: String, small text below the figure: the machine and the versions.
            Defaults to `""`.

    Returns:
        Tuple of the figure and its axes.
    """
    figure, (axes,) = new_panels(title, 1, caption)
    return figure, axes


def new_panels(
    title: str, num_panels: int, caption: str = ""
) -> tuple[Figure, list[Axes]]:
    """Create a figure with several pairs of axes side by side.

    Args:
        title: String, title above the figure.
        num_panels: Int, number of pairs of axes.
        caption: String, small text below the figure. Defaults to `""`.

    Returns:
        Tuple of the figure and the list of its axes.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = _WIDTH + (num_panels - 1) * 0.6 * _WIDTH
    # pyplot is not used, since it would change the backend and the style of the caller.
    with mpl.rc_context(_MATPLOTLIB_SETTINGS):
        figure = Figure(figsize=(width, _HEIGHT), layout="constrained")
        FigureCanvasAgg(figure)
        axes = [figure.add_subplot(1, num_panels, 1 + n) for n in range(num_panels)]
        for each in axes:
            each.set_prop_cycle(color=COLOURS, marker=MARKERS)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    if caption:
        figure.supxlabel(caption, fontsize=7.5, color="0.35")
    return figure, axes


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure as PNG.

    Args:
        figure: The figure.
        path: String or path of the file.
    """
    figure.savefig(path, format="png", dpi=_DOTS_PER_INCH)
