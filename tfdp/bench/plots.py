"""Figures in the house look, drawn without a screen and saved as PNG."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it is an extra
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's: told apart by those who do not see red and green alike.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
_DOTS_PER_INCH = 150
_WIDTH, _HEIGHT = 7.5, 4.5  # inches
_LOOK: Any = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10,
    "grid.alpha": 0.3,
}


def check_available() -> None:
    """Checks that figures can be drawn.

    Raises:
        ValueError: If matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "A plot needs matplotlib, which is not installed: get it with "
            "`pip install tfdp[bench]`, or go without a plot by --no-plot."
        )


def new_figure(title: str, caption: str = "") -> tuple[Figure, Axes]:
    """Makes a figure with one pair of axes.

    Args:
        title: String, above the figure.
        caption: String, in small letters below the title: the machine and the
            versions. Defaults to none.

    Returns:
        Tuple of the figure and its axes.
    """
    figure, (axes,) = new_panels(title, 1, caption)
    return figure, axes


def new_panels(
    title: str, num_panels: int, caption: str = ""
) -> tuple[Figure, list[Axes]]:
    """Makes a figure with several pairs of axes side by side.

    Args:
        title: String, above the figure.
        num_panels: Int, pairs of axes.
        caption: String, as for `new_figure`. Defaults to none.

    Returns:
        Tuple of the figure and the list of its axes.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = _WIDTH + (num_panels - 1) * 0.6 * _WIDTH
    # Not by pyplot: it would change the backend and the look of its caller.
    with mpl.rc_context(_LOOK):
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
    """Writes a figure as PNG.

    Args:
        figure: The figure.
        path: String or path of the file.
    """
    figure.savefig(path, format="png", dpi=_DOTS_PER_INCH)
