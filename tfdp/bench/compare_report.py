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
# Of the arm of a side in which its workers know nothing of each other.
ALONE = "no communication"
_ARMS = {
    OURS: "tfdp/{}",
    STOCK: "stock/{}",
    DDP: "ddp/{}",
    DDP_TUNED: "ddp/{}, tuned",
}
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
        efficiency: Float, the median of the side's step without communication
            relative to its step, or `None` where that was not measured.
        efficiency_of_tfdp: `Ratio` of tfdp's efficiency to this one, or `None`.
    """

    model: str
    side: str
    step_seconds: float
    samples_per_second: float
    speed_of_tfdp: Ratio | None
    note: str = ""
    efficiency: float | None = None
    efficiency_of_tfdp: Ratio | None = None


def rows_of(model: str, times: Times, global_batch_size: int) -> list[Row]:
    """The lines of one model.

    Args:
        model: String, its name.
        times: Dict from `side/arm` to seconds per step, block by block.
        global_batch_size: Int, samples of a step.

    Returns:
        List of `Row`, tfdp first.
    """
    arms = {side: arm.format(model) for side, arm in _ARMS.items()}
    arms = {side: arm for side, arm in arms.items() if arm in times}
    ours = times[arms[OURS]]
    rows = [
        _row(model, side, times[arm], ours, global_batch_size)
        for side, arm in arms.items()
    ]
    rows.insert(2, _row_of_best_packs(model, times, global_batch_size))
    return _with_efficiencies(rows, _efficiencies(arms, times))


def _row(
    model: str, side: str, seconds: list[float], ours: list[float], batch_size: int
) -> Row:
    middle = statistics.median(seconds)
    ratio = None if side == OURS else paired_ratio(seconds, ours)
    return Row(model, side, middle, batch_size / middle, ratio)


def _row_of_best_packs(model: str, times: Times, batch_size: int) -> Row:
    packs = {f"packs of {mb} MB": f"stock/{model}, packs of {mb} MB" for mb in PACKS_MB}
    best = min(packs, key=lambda name: statistics.median(times[packs[name]]))
    ours = times[f"tfdp/{model}"]
    row = _row(model, STOCK_BEST, times[packs[best]], ours, batch_size)
    ratio = ratio_to_best([times[arm] for arm in packs.values()], ours)
    return dataclasses.replace(row, speed_of_tfdp=ratio, note=best)


def _efficiencies(arms: dict[str, str], times: Times) -> Times:
    """What each side keeps of the speed of its step without communication."""
    return {
        side: [
            alone / step
            for alone, step in zip(times[f"{arm}, {ALONE}"], times[arm], strict=True)
        ]
        for side, arm in arms.items()
        if f"{arm}, {ALONE}" in times
    }


def _with_efficiencies(rows: list[Row], kept: Times) -> list[Row]:
    found = []
    for row in rows:
        if own := kept.get(row.side):
            row = dataclasses.replace(
                row,
                efficiency=statistics.median(own),
                efficiency_of_tfdp=paired_ratio(kept[OURS], own)
                if row.side != OURS
                else None,
            )
        found.append(row)
    return found


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


def efficiency_notes(rows: Sequence[Row]) -> list[str]:
    """What the sides keep of their own speed, a sentence for each.

    Args:
        rows: Sequence of `Row`.

    Returns:
        List of strings.
    """
    notes = []
    for row in rows:
        if row.efficiency is None:
            continue
        note = f"{row.model}, {row.side}: efficiency {row.efficiency:.3f}"
        if ratio := row.efficiency_of_tfdp:
            note += f"; that of tfdp is {ratio.median:.3f} {ratio.interval} times it"
        notes.append(f"{note}.")
    return notes


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
