"""Table and plot of `train`: time, speed, efficiency by replicas."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

from tfdp.launch.bench.output import new_panels, save
from tfdp.launch.bench.stats import Ratio
from tools.bench.stats import speedup

COLUMNS = (
    *("model", "scaling", "replicas", "batch", "step\n(ms)", "samples/s", "speedup"),
    *("efficiency", "95 %\ninterval"),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table.

    Args:
        model: String.
        scaling: String.
        num_replicas: Int.
        batch_size: Int, of each replica.
        step_seconds: Float, the median.
        samples_per_second: Float, of all replicas together.
        speedup: `Ratio` to one replica.
        efficiency: `Ratio`.
    """

    model: str
    scaling: str
    num_replicas: int
    batch_size: int
    step_seconds: float
    samples_per_second: float
    speedup: Ratio
    efficiency: Ratio


def row_of(
    what: tuple[str, str],
    count: int,
    batch_size: int,
    times: Sequence[float],
    ratio: Ratio,
) -> Row:
    """The line of one number of replicas.

    Args:
        what: Tuple of strings, the model and the scaling.
        count: Int, number of replicas.
        batch_size: Int, of each.
        times: Sequence of floats, seconds of a step, block by block.
        ratio: `Ratio`, the efficiency.

    Returns:
        A `Row`.
    """
    seconds = statistics.median(times)
    return Row(
        *what,
        num_replicas=count,
        batch_size=batch_size,
        step_seconds=seconds,
        samples_per_second=batch_size * count / seconds,
        speedup=speedup(ratio, count),
        efficiency=ratio,
    )


def cells(row: Row) -> list[str]:
    """Cells of the line, as printed.

    Args:
        row: `Row`.

    Returns:
        List of strings, one for each of `COLUMNS`.
    """
    return [
        row.model,
        row.scaling,
        str(row.num_replicas),
        str(row.batch_size),
        f"{1e3 * row.step_seconds:.2f}",
        f"{row.samples_per_second:.0f}",
        f"{row.speedup.median:.2f}",
        f"{row.efficiency.median:.3f}",
        row.efficiency.interval,
    ]


def plot(rows: Sequence[Row], family: str, caption: str, path: Path) -> None:
    """Draw the table, a panel for each scaling.

    Args:
        rows: Sequence of `Row`.
        family: String, of the models.
        caption: String, the machine and the versions.
        path: Path of the PNG file.
    """
    scalings = list(dict.fromkeys(row.scaling for row in rows))
    title = f"Scaling of a training step, {family}"
    figure, panels = new_panels(title, len(scalings), caption)
    highest = max(row.efficiency.high for row in rows)
    for scaling, axes in zip(scalings, panels, strict=True):
        of_scaling = [row for row in rows if row.scaling == scaling]
        for model in dict.fromkeys(row.model for row in rows):
            points = [row for row in of_scaling if row.model == model]
            middle = [row.efficiency.median for row in points]
            axes.errorbar(
                [row.num_replicas for row in points],
                middle,
                yerr=[
                    [row.efficiency.median - row.efficiency.low for row in points],
                    [row.efficiency.high - row.efficiency.median for row in points],
                ],
                capsize=3,
                label=f"{model} parameters",
            )
        counts = sorted({row.num_replicas for row in of_scaling})
        axes.axhline(1.0, color="0.4", linestyle="--", linewidth=1, marker="")
        axes.set_xticks(counts)
        axes.set_ylim(0, 1.1 * max(1.0, highest))
        axes.set_title(f"{scaling} scaling", fontsize=10)
        axes.set_xlabel("replicas")
        axes.set_ylabel("efficiency")
    panels[0].legend(frameon=False)
    save(figure, path)
