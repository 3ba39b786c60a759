"""Scaling efficiency against the number of replicas, a line for each model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tfdp.bench.plots import new_panels, save
from tfdp.bench.train_table import Row


def plot(rows: Sequence[Row], family: str, caption: str, path: Path) -> None:
    """Draws the table, a panel for each scaling.

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
