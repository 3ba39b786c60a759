"""`tfdp bench train` and `tfdp bench compare`: training steps, side by side."""

from __future__ import annotations

import sys
from typing import Any

import click

from tfdp.bench import arguments
from tfdp.bench import compare as of_sides
from tfdp.bench import train as of_training
from tfdp.bench.arguments import ManyValues
from tfdp.bench.scaling import SCALINGS
from tfdp.cli import bench_options as options
from tfdp.cli import values


@click.command(cls=ManyValues)
@options.models
@click.option(
    "--replicas",
    metavar="N...",
    multiple=True,
    default=("1", "2", "4"),
    show_default=True,
    callback=arguments.counts,
    help="Numbers of replicas; one is always measured, to compare with.",
)
@click.option(
    "--scaling",
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
    """Times training steps on 1, 2, ... replicas: speedup and efficiency.

    The numbers of replicas take turns, block by block, on this machine's CPU.
    """
    files = options.checked_files("train", given)
    settings = of_training.Settings(
        family=given["family"],
        millions=given["models"],
        replicas=given["replicas"],
        scalings=given["scaling"],
        batch_size=given["batch"],
        blocks=given["blocks"],
        placement=given["placement"],
    )
    with options.one_sentence():
        of_training.run(settings, files)


@click.command(cls=ManyValues)
@click.option(
    "-n",
    "--workers",
    metavar="N",
    default="2",
    show_default=True,
    callback=values.count,
    help="Local worker processes of each side, of one thread each.",
)
@options.models
@options.batch("each worker")
@click.option(
    "--torch-python",
    metavar="PATH",
    default=sys.executable,
    help="An interpreter that has PyTorch. Default: this one.",
)
@options.blocks(20)
@options.files
def compare(**given: Any) -> None:
    """Times a training step of tfdp, stock tf.distribute and PyTorch's DDP.

    All are alive at the same time and take turns, block by block. Stock is taken at
    its defaults and at its best pack size, DDP (with Gloo, where PyTorch is
    installed) at its defaults and tuned.
    """
    files = options.checked_files("compare", given)
    if given["workers"] < 2:
        raise click.UsageError(
            f"A comparison needs at least 2 workers. Received: -n {given['workers']}"
        )
    settings = of_sides.Settings(
        num_workers=given["workers"],
        family=given["family"],
        millions=given["models"],
        batch_size=given["batch"],
        blocks=given["blocks"],
        torch_python=given["torch_python"],
    )
    with options.one_sentence():
        of_sides.run(settings, files)
