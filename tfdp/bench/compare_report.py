"""Table and plot of `tfdp bench compare`: speed of tfdp relative to each rival."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tfdp.bench.output import new_figure, save
from tfdp.bench.stats import Ratio, paired_ratio, ratio_to_best

if TYPE_CHECKING:  # it is an extra
    from matplotlib.axes import Axes

PACKS_MB = (1, 4, 25)
OURS, STOCK, STOCK_BEST = "tfdp", "stock, defaults", "stock, best pack size"
DDP, DDP_TUNED = "DDP, defaults", "DDP, tuned"
COLUMNS = (
    *("model", "side", "step\n(ms)", "samples/s", "speed of tfdp\n/ its speed"),
    "95 %\ninterval",
)
Times = dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table.

    Args:
        model: String.
        side: String.
        step_seconds: Float, the median.
        samples_per_second: Float, of all workers together.
        speed_of_tfdp: `Ratio` of this side's time to that of tfdp, or `None` for
            tfdp itself.
        note: String, what else to know.
    """

    model: str
    side: str
    step_seconds: float
    samples_per_second: float
    speed_of_tfdp: Ratio | None
    note: str = ""


def rows_of(model: str, times: Times, global_batch_size: int) -> list[Row]:
    """The lines of one model.

    Args:
        model: String, its name.
        times: Dict from `side/arm` to seconds per step, block by block.
        global_batch_size: Int, samples of a step.

    Returns:
        List of `Row`, tfdp first.
    """
    ours = times[f"tfdp/{model}"]
    packs = {f"packs of {mb} MB": f"stock/{model}, packs of {mb} MB" for mb in PACKS_MB}
    best = min(packs, key=lambda name: statistics.median(times[packs[name]]))
    rivals = [times[arm] for arm in packs.values()]
    found: list[tuple[str, list[float], Ratio | None, str]] = [
        (OURS, ours, None, ""),
        (STOCK, times[f"stock/{model}"], None, ""),
        (STOCK_BEST, times[packs[best]], ratio_to_best(rivals, ours), best),
    ]
    if f"ddp/{model}" in times:
        found.append((DDP, times[f"ddp/{model}"], None, ""))
        found.append((DDP_TUNED, times[f"ddp/{model}, tuned"], None, ""))
    rows = []
    for side, seconds, ratio, note in found:
        if side != OURS and ratio is None:
            ratio = paired_ratio(seconds, ours)
        middle = statistics.median(seconds)
        rows.append(Row(model, side, middle, global_batch_size / middle, ratio, note))
    return rows


def cells(row: Row) -> list[str]:
    """Cells of the line, as printed.

    Args:
        row: `Row`.

    Returns:
        List of strings, one for each of `COLUMNS`.
    """
    ratio = row.speed_of_tfdp
    return [
        row.model,
        row.side + (f" ({row.note})" if row.note else ""),
        f"{1e3 * row.step_seconds:.2f}",
        f"{row.samples_per_second:.0f}",
        f"{ratio.median:.3f}" if ratio else "",
        ratio.interval if ratio else "",
    ]


def plot(rows: Sequence[Row], title: str, caption: str, path: Path) -> None:
    """Draw the ratios with their intervals.

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
