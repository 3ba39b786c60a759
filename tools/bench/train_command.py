"""`python -m tools.bench train`: weak and strong scaling of training steps."""

from __future__ import annotations

from typing import Any

import click

from tfdp.launch.cli import bench_options as options
from tfdp.launch.cli import parameter_types as types
from tools.bench import train as of_training
from tools.bench.stats import SCALINGS


@click.command(cls=types.ManyValues)
@options.models
@click.option(
    "--replicas",
    metavar="N...",
    multiple=True,
    default=(1, 2, 4),
    show_default=True,
    type=types.COUNT,
    help="Numbers of replicas; one is always measured, to compare with.",
)
@click.option(
    "--scaling",
    "scalings",
    multiple=True,
    type=click.Choice(SCALINGS),
    default=SCALINGS,
    show_default=True,
    help="weak: every replica keeps its batch. strong: all share one global batch.",
)
@options.batch("each replica; in strong scaling of each of the most replicas")
@click.option(
    "--placement",
    type=click.Choice(of_training.PLACEMENTS),
    default="processes",
    show_default=True,
    help="A process for each replica, or logical CPU devices of one process.",
)
@options.blocks(10)
@options.files
def train(**given: Any) -> None:
    """Time training steps on 1, 2, ... replicas: speedup and efficiency.

    The numbers of replicas take turns, block by block, on this machine's CPU.
    """
    options.run_benchmark("train", of_training, given)
