"""Plot of what fewer bytes cost: the fraction of communication against the loss."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdp.launch.bench.output import new_panels, save
from tools.bench.compression import PLAIN, ratio_of_means

# Percent of a step.
_RIGHT = 30
_TICKS = (0.5, 1, 2, 5, 10, 20, 50)

if TYPE_CHECKING:  # it is an extra
    from matplotlib.axes import Axes


def plot(models: Mapping[str, Mapping[str, Any]], caption: str, path: Path) -> None:
    """Draw s against the held-out loss of each way to send less.

    Args:
        models: Mapping from models to mappings from variants to what
            `tools.bench compression` keeps: `losses` by seed, and `share_of_bytes`.
        caption: String, the machine and the versions.
        path: Path of the PNG file.
    """
    title = "What fewer bytes cost"
    figure, panels = new_panels(title, len(models), caption)
    for axes, (model, variants) in zip(panels, models.items(), strict=True):
        _panel(axes, model, variants)
    save(figure, path)


def communication_fraction(share_of_bytes: float) -> float:
    """Return the part of a step that is communication, without overlap.

    Args:
        share_of_bytes: Float, of those of plain gradients, which take as long as the
            rest of the step on the link that is looked at.

    Example:

    >>> communication_fraction(1.0), communication_fraction(0.25)
    (0.5, 0.2)
    """
    return share_of_bytes / (1 + share_of_bytes)


def _panel(axes: Axes, model: str, variants: Mapping[str, Any]) -> None:
    axes.axhline(0, color="0.4", linewidth=1, marker="")
    for number, (name, variant) in enumerate(variants.items()):
        ratio, error = ratio_of_means(variant["losses"], variants[PLAIN]["losses"])
        mean = 100 * (ratio - 1)
        x = 100 * communication_fraction(variant["share_of_bytes"])
        axes.errorbar([x], [mean], yerr=[100 * error], capsize=3, linestyle="")
        # Names on the left, or they would leave the axes.
        side = -1 if x > _RIGHT else 1
        axes.annotate(
            name,
            (x, mean),
            xytext=(5 * side, -10 if number % 2 else 4),
            textcoords="offset points",
            ha="right" if side < 0 else "left",
            fontsize=7,
        )
    axes.set_xscale("log")
    axes.set_xlim(0.2, 100)
    axes.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("s: communication in a step, %, where plain gradients take half")
    axes.set_ylabel("held-out loss above that of plain gradients, %")
    seeds = len(variants[PLAIN]["losses"])
    axes.set_title(f"{model}: mean of {seeds} seeds and its standard error")
