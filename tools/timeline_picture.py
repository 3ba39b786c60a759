"""Picture of a trace of `tfdp.callbacks.Timeline`, for the docs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tfdp.launch.bench.output import new_figure, save

COLORS = {
    "input": "#bbbbbb",
    "forward": "#4c78a8",
    "backward": "#54a24b",
    "update": "#9d755d",
    "communication": "#eeca3b",
    "logs": "#b279a2",
    "unit": "#72b7b2",  # gathered for the forward pass
    "unit_again": "#439894",  # and for the backward pass
}
BUCKET_COLORS = ("#e45756", "#f58518", "#ff9da6", "#d67195")


def draw(trace: dict[str, Any], path: Path, steps: tuple[str, ...]) -> None:
    """Draw some steps, a row for each lane.

    Args:
        trace: Dict, as read from the file.
        path: `Path`, where the PNG goes.
        steps: Tuple of strings, the names of the steps that are shown.
    """
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    shown = [bar for bar in bars if bar["name"] in steps]
    begin = min(bar["ts"] for bar in shown)
    end = max(bar["ts"] + bar["dur"] for bar in shown)
    names = lane_names(trace)
    rows = {lane: row for row, lane in enumerate(sorted(names, reverse=True))}
    figure, axes = new_figure("Two workers: what computes, what communicates")
    figure.set_size_inches(11, 1 + 0.34 * len(rows))
    for bar in bars:
        lane = bar["pid"], bar["tid"]
        left, right = max(bar["ts"], begin), min(bar["ts"] + bar["dur"], end)
        if right <= left:
            continue
        width = (right - left) / 1000
        axes.barh(
            rows[lane],
            width,
            left=(left - begin) / 1000,
            height=0.8,
            color=color_of(bar["name"]),
            edgecolor="white",
            linewidth=0.5,
        )
        if width > 0.04 * (end - begin) / 1000:
            middle = ((left + right) / 2 - begin) / 1000
            axes.text(middle, rows[lane], bar["name"], ha="center", va="center", size=7)
    axes.set_yticks(list(rows.values()), [names[lane] for lane in rows], size=8)
    axes.set_xlabel("milliseconds, by the clock of worker 0")
    axes.grid(visible=False, axis="y")
    save(figure, path)


def lane_names(trace: dict[str, Any]) -> dict[tuple[int, int], str]:
    """Names of the lanes of each worker."""
    names = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    workers = {
        event["pid"]: event["args"]["name"].partition(" (")[0]
        for event in names
        if event["name"] == "process_name"
    }
    return {
        (
            event["pid"],
            event["tid"],
        ): f"{workers[event['pid']]}, {event['args']['name']}"
        for event in names
        if event["name"] == "thread_name"
    }


def color_of(name: str) -> str:
    """One color for each phase, and a few for buckets."""
    if name.startswith("bucket"):
        return BUCKET_COLORS[int(name.split()[1]) % len(BUCKET_COLORS)]
    return COLORS.get(name.split()[0], "#dddddd")
