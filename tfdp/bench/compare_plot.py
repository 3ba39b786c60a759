"""Bars of how many times as fast as its rivals tfdp trains, by model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tfdp.bench.compare_table import OURS, Row
from tfdp.bench.plots import new_figure, save
from tfdp.bench.stats import Ratio

if TYPE_CHECKING:  # it is an extra
    from matplotlib.axes import Axes


def plot(rows: Sequence[Row], title: str, caption: str, path: Path) -> None:
    """Draws the ratios with their intervals.

    Args:
        rows: Sequence of `Row`.
        title: String.
        caption: String, the machine and the versions.
        path: Path of the PNG file.
    """
    figure, axes = new_figure(title, caption)
    models = list(dict.fromkeys(row.model for row in rows))
    rivals = [s for s in dict.fromkeys(row.side for row in rows) if s != OURS]
    for index, rival in enumerate(rivals):
        ratios = [
            row.speed_of_tfdp for row in rows if row.side == rival and row.speed_of_tfdp
        ]
        _draw(axes, ratios, rival, (index, len(rivals)))
    axes.axhline(1.0, color="0.2", linestyle="--", linewidth=1)
    axes.set_xticks(range(len(models)), [f"{m} parameters" for m in models])
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("speed of tfdp relative to each\n(above 1: tfdp is faster)")
    axes.set_ylim(top=axes.get_ylim()[1] * 1.2)
    axes.legend(ncols=2, loc="upper left", frameon=False)
    save(figure, path)


def _draw(axes: Axes, ratios: list[Ratio], label: str, place: tuple[int, int]) -> None:
    """The bars of one rival, beside those of the others."""
    index, count = place
    width = 0.8 / count
    shift = (index - (count - 1) / 2) * width
    places = [number + shift for number in range(len(ratios))]
    lows = [ratio.median - ratio.low for ratio in ratios]
    highs = [ratio.high - ratio.median for ratio in ratios]
    axes.bar(
        *(places, [ratio.median for ratio in ratios], 0.9 * width),
        yerr=[lows, highs],
        capsize=3,
        ecolor="0.25",
        label=label,
    )
    for x, ratio in zip(places, ratios, strict=True):
        axes.annotate(
            f"{ratio.median:.2f}",
            (x, 0),
            (0, 4),  # points above the axis, clear of the interval
            textcoords="offset points",
            ha="center",
            color="white",
            fontsize=9,
        )
