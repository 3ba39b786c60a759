"""Table and plot of `tfdp bench compare`: speed of tfdp relative to each rival."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tfdp.launch.bench.compare_sides import DEVICES, TUNED, WORKERS, SetUp
from tfdp.launch.bench.output import new_panels, save
from tfdp.launch.bench.stats import Ratio, paired_ratio

if TYPE_CHECKING:  # it is an extra
    from matplotlib.axes import Axes

OURS = {DEVICES: "devices", WORKERS: "processes"}
COLUMNS = (
    *("set-up", "settings", "model", "step\n(ms)", "own step\n(ms)"),
    *("communi-\ncation (ms)", "samples/s"),
    *(f"speed of tfdp's {name}\n/ its speed" for name in OURS.values()),
)
Times = dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table.

    Args:
        set_up: String.
        settings: String, `"defaults"`, or `"tuned"` with what was chosen.
        model: String.
        step_seconds: Float, the median.
        own_step_seconds: Float, the same without communication, or `None` where a
            step has none.
        communication_seconds: Float, the median of what communication adds to a step
            of the same block, or `None`.
        samples_per_second: Float, of all replicas together.
        speed_of_tfdp: Dict from `DEVICES` and `WORKERS` to the `Ratio` of this time
            to theirs, with their defaults or tuned as this one.
    """

    set_up: str
    settings: str
    model: str
    step_seconds: float
    own_step_seconds: float | None
    communication_seconds: float | None
    samples_per_second: float
    speed_of_tfdp: dict[str, Ratio]


def rows_of(
    model: str, set_ups: Sequence[SetUp], times: Times, global_batch_size: int
) -> list[Row]:
    """The lines of one model.

    What is tuned is chosen in every other block and compared in the rest: the best of
    several noisy medians would look faster than it is.

    Args:
        model: String, its name.
        set_ups: Sequence of `SetUp`.
        times: Dict from `side/arm` to seconds per step, block by block.
        global_batch_size: Int, samples of a step.

    Returns:
        List of `Row`, in the order of `set_ups`.
    """
    chosen = {set_up: _fastest(model, set_up, times) for set_up in set_ups}
    parts = {
        set_up: _compared(set_up, times[set_up.key(model, choice)])
        for set_up, choice in chosen.items()
    }
    rows = []
    for set_up, steps in parts.items():
        key_alone = set_up.key_alone(model, chosen[set_up])
        own = _compared(set_up, times[key_alone]) if key_alone else None
        middle = statistics.median(steps)
        rows.append(
            Row(
                set_up.name,
                ": ".join(filter(None, (set_up.tuning, chosen[set_up]))),
                model,
                middle,
                statistics.median(own) if own else None,
                _median_difference(steps, own) if own else None,
                global_batch_size / middle,
                {
                    ours.kind: paired_ratio(steps, of_ours)
                    for ours, of_ours in parts.items()
                    if ours.kind in OURS
                    and ours.kind != set_up.kind
                    and ours.tuning == set_up.tuning
                },
            )
        )
    return rows


def _fastest(model: str, set_up: SetUp, times: Times) -> str:
    medians = {
        choice: statistics.median(times[set_up.key(model, choice)][::2])
        for choice in set_up.choices
    }
    return min(medians, key=medians.__getitem__)


def _compared(set_up: SetUp, seconds: list[float]) -> list[float]:
    return seconds[1::2] if set_up.tuning == TUNED else seconds


def _median_difference(steps: Sequence[float], own: Sequence[float]) -> float:
    return statistics.median(a - b for a, b in zip(steps, own, strict=True))


def cells(row: Row) -> list[str]:
    """Cells of the line, as printed.

    Args:
        row: `Row`.

    Returns:
        List of strings, one for each of `COLUMNS`.
    """
    ratios = [row.speed_of_tfdp.get(kind) for kind in OURS]
    times = (row.step_seconds, row.own_step_seconds, row.communication_seconds)
    return [
        *(row.set_up, row.settings, row.model),
        *("-" if seconds is None else f"{1e3 * seconds:.2f}" for seconds in times),
        f"{row.samples_per_second:.0f}",
        *(f"{ratio.median:.3f} {ratio.interval}" if ratio else "-" for ratio in ratios),
    ]


def plot(rows: Sequence[Row], title: str, caption: str, path: Path) -> None:
    """Draw the ratios with their intervals, a panel for each set-up of tfdp.

    Args:
        rows: Sequence of `Row`.
        title: String.
        caption: String, the machine and the versions.
        path: Path of the PNG file.
    """
    figure, panels = new_panels(title, len(OURS), caption)
    models = list(dict.fromkeys(row.model for row in rows))
    # The other set-up of tfdp is no rival.
    rivals: dict[str, list[Row]] = {}
    for row in rows:
        if set(row.speed_of_tfdp) == set(OURS):
            tuning = row.settings.partition(":")[0]
            rivals.setdefault(f"{row.set_up}, {tuning}", []).append(row)
    for (kind, name), axes in zip(OURS.items(), panels, strict=True):
        for index, (rival, of_rival) in enumerate(rivals.items()):
            ratios = [row.speed_of_tfdp[kind] for row in of_rival]
            _draw(axes, ratios, rival, (index, len(rivals)))
        axes.axhline(1.0, color="0.2", linestyle="--", linewidth=1)
        axes.set_xticks(range(len(models)), [f"{m} parameters" for m in models])
        axes.grid(visible=False, axis="x")
        axes.set_title(f"speed of tfdp's {name} relative to each", fontsize=10)
        axes.set_ylabel("above 1: tfdp is faster")
        axes.set_ylim(top=axes.get_ylim()[1] * 1.3)
    panels[0].legend(ncols=2, loc="upper left", frameon=False, fontsize=8)
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
            fontsize=8,
        )
