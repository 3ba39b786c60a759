"""`python -m tools.bench models`: reductions of the gradients of published models."""

from __future__ import annotations

from typing import Any

import click

from tfdp.launch.cli import bench_options as options
from tfdp.launch.cli import parameter_types as types
from tools.bench import gradients
from tools.bench.link_rate import LINK_RATE
from tools.bench.published_models import PUBLISHED_MODELS


@click.command(cls=types.ManyValues)
@options.workers
@click.option(
    "--models",
    metavar="NAME...",
    multiple=True,
    type=click.Choice(tuple(PUBLISHED_MODELS)),
    default=tuple(PUBLISHED_MODELS),
    show_default=True,
    help=f"Of {', '.join(PUBLISHED_MODELS)}.",
)
@options.algorithms
@click.option(
    "--backends",
    metavar="NAME...",
    multiple=True,
    type=click.Choice(gradients.BACKENDS),
    default=("direct", "ring"),
    show_default=True,
    help="What carries the bytes: direct (shared memory and TCP), ring (TensorFlow's "
    "own, over gRPC), or mpi, in a job of MPI.",
)
@click.option(
    "--bucket-mb",
    metavar="MB",
    type=types.POSITIVE,
    help="Largest size of a bucket. Default: as in training, 25 MB or an eighth of "
    "the gradients.",
)
@options.node_size
@click.option(
    "--link-rate",
    metavar="RATE",
    type=LINK_RATE,
    help="Rate of each node's link in each direction, such as 10gbit: the share of "
    "its bound is shown.",
)
@options.blocks(10)
@options.files
def models(**given: Any) -> None:
    """Reduce the gradients of ResNet-50, VGG-16 and BERT-large.

    Gradients of the shapes of each model are all-reduced in the buckets of a training
    step, by each algorithm on each backend, which take turns: time, payload against
    2 (N - 1) / N times the model, and bandwidth. Every sum is checked. BERT-large
    takes 4 GB of memory in each worker.
    """
    given["models"] = [PUBLISHED_MODELS[name]() for name in given["models"]]
    options.run_benchmark("models", gradients, given)
