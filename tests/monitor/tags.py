"""TensorBoard's tags: those that a run wrote, and those that the docs name."""

from __future__ import annotations

import re
from pathlib import Path

import tensorflow as tf

PAGE = Path(__file__).resolve().parents[2] / "docs" / "monitoring.md"


NUMBERED = re.compile(r"/(worker|bucket|parameters|unit|unit_again)\d+_")


def written(folder: Path) -> set[str]:
    """The tags in the event files of a folder; a number stands for all of its kind."""
    paths = sorted(folder.glob("events.*"))
    assert paths
    return {
        NUMBERED.sub(r"/\g<1>0_", value.tag)
        for path in paths
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    }


def documented() -> set[str]:
    """The tags in the table of docs/monitoring.md."""
    table = PAGE.read_text("utf-8").partition("| tag |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    return {tag for cell in cells for tag in re.findall(r"`(.+?)`", cell)}
