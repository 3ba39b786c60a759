"""`tfdp plan`: predicted communication of a model on a cluster that is not here."""

from __future__ import annotations

import dataclasses
import os
import warnings
import zipfile
from typing import TYPE_CHECKING, Any

import click

from tfdp.ground.links import DEFAULT_LINKS, Link, Links
from tfdp.ground.options import ADASUM, COMPRESSIONS, CommunicationOptions
from tfdp.ground.plans.buckets import BucketPlan
from tfdp.ground.plans.prediction import BACKWARD_FRACTION
from tfdp.ground.plans.topology import Topology
from tfdp.ground.text import pluralize
from tfdp.launch.cli import memory
from tfdp.launch.cli import parameter_types as types
from tfdp.launch.cli.forecast import Forecast, show
from tfdp.launch.cli.importing import first_line, import_without_gpus

if TYPE_CHECKING:  # it imports TensorFlow
    from tfdp.training.reduction.algorithm_choice import AlgorithmChoice

_COMPRESSIONS = (
    "none",
    *(f"{level}{name}" for level in ("", "outer:") for name in COMPRESSIONS),
)
_MOST_REPLICAS = 2**20


_EXAMPLES = """\b
Examples:
  tfdp plan model.keras --nodes 16 --replicas-per-node 8 --step-ms 120
  tfdp plan model.keras --nodes 2 --replicas-per-node 4 --backend ring \\
      --alpha 20,100 --beta 5,0.12
"""


@click.command(epilog=_EXAMPLES)
@click.argument("model", metavar="MODEL.keras", type=types.FILE)
@click.option(
    "--nodes",
    metavar="N",
    required=True,
    type=types.COUNT,
    help="Number of nodes.",
)
@click.option(
    "--replicas-per-node",
    metavar="L",
    required=True,
    type=types.COUNT,
    help="Number of replicas (GPUs) on each node.",
)
@click.option(
    "--alpha",
    metavar="US[,US]",
    type=types.LATENCIES,
    help="Latency of a message in microseconds: inside nodes and across nodes, as in "
    "20,100; or one number for both.",
)
@click.option(
    "--beta",
    metavar="GB/S[,GB/S]",
    type=types.BANDWIDTHS,
    help="Bandwidth in GB/s (10^9 bytes, one way): between two replicas of a node "
    "(with ring, of all together) and of the one link of a node, which its replicas "
    "share, as in 5,0.12; or one number for both.",
)
@click.option(
    "--backend",
    type=click.Choice(tuple(DEFAULT_LINKS)),
    default="nccl",
    show_default=True,
    help="What moves the bytes, and --alpha and --beta where they are not given: nccl "
    "over NVLink and 100 Gbit/s; ring, TensorFlow's own, over loopback and 10 Gbit/s; "
    "direct and mpi, shared memory and 10 Gbit/s.",
)
@click.option(
    "--step-ms",
    metavar="MS",
    type=types.POSITIVE,
    help="Time of a step on one replica, in milliseconds: for the scaling efficiency.",
)
@click.option(
    "--overlap",
    metavar="SHARE",
    type=types.FRACTION,
    help="The last part of that time, in which gradients become ready and "
    "communication can hide. Default: 2/3, the backward pass.",
)
@click.option(
    "--algorithm",
    metavar="NAME",
    default="auto",
    show_default=True,
    type=types.ALGORITHM,
    help="auto (the fastest for each bucket), ring, tree, halving_doubling, "
    "hierarchical, hierarchical:INNER,OUTER, or adasum.",
)
@click.option(
    "--compression",
    type=click.Choice(_COMPRESSIONS),
    default="none",
    show_default=True,
    help="The type on the wire; outer: across nodes only.",
)
@click.option(
    "--bucket-mb",
    metavar="MB",
    default=25,
    show_default=True,
    type=types.POSITIVE,
    help="Largest size of a bucket, as in CommunicationOptions.",
)
@click.option(
    "--optimizer",
    metavar="NAME",
    default="adam",
    show_default=True,
    help="Whose slots take memory: a name that Keras's compile takes.",
)
@click.option(
    "--accumulates",
    is_flag=True,
    help="Gradients are accumulated over micro-batches, which takes memory too.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    model: str,
    nodes: int,
    replicas_per_node: int,
    alpha: tuple[float, float] | None,
    beta: tuple[float, float] | None,
    backend: str,
    step_ms: float | None,
    overlap: float | None,
    algorithm: str | dict[str, str],
    compression: str,
    bucket_mb: float,
    optimizer: str,
    accumulates: bool,
    as_json: bool,
) -> None:
    """Predict communication and scaling of MODEL.keras on a cluster.

    Nothing is trained and no cluster is needed. The prediction is weak scaling:
    every replica keeps its batch.
    """
    if overlap is not None and step_ms is None:
        raise click.UsageError("--overlap is a share of the time that --step-ms gives.")
    topology = _topology(nodes, replicas_per_node)
    links = _links(alpha, beta, DEFAULT_LINKS[backend])
    try:
        options = CommunicationOptions(
            bucket_mb=bucket_mb,
            algorithm=algorithm,
            compression=compression_option(compression),
            links=links,
        )
    except ValueError as error:  # two that do not go together
        raise click.UsageError(first_line(error)) from error
    loaded = _loaded(model)
    from tfdp.training.program.gathers import gathers_of_model  # it imports TensorFlow

    levels = algorithm.values() if isinstance(algorithm, dict) else (algorithm,)
    buckets, sparse = _plan_of(loaded, model, options, makes_dense=ADASUM in levels)
    routes, warned = routes_of(buckets, options, topology, backend)
    by_ring = dataclasses.replace(options, algorithm="ring")
    forecast = Forecast(
        model=model,
        buckets=buckets.buckets,
        sparse=tuple(sparse),
        topology=topology,
        links=links,
        backend=backend,
        is_given=bool(alpha and beta),
        compression=compression,
        routes=routes,
        ring=routes_of(buckets, by_ring, topology, backend)[0],
        warned=warned,
        compute_seconds=None if step_ms is None else step_ms / 1e3,
        overlap=BACKWARD_FRACTION if overlap is None else overlap,
        optimizer=optimizer,
        memory=memory.memory_of(
            loaded,
            memory.checked_optimizer(optimizer),
            topology,
            options,
            accumulates=accumulates,
        ),
        gathers=gathers_of_model(loaded),
    )
    show(forecast, as_json=as_json)


def _topology(nodes: int, replicas_per_node: int) -> Topology:
    if nodes * replicas_per_node > _MOST_REPLICAS:
        raise click.UsageError(
            f"A cluster may have at most {_MOST_REPLICAS:,} replicas. "
            f"Received: {pluralize(nodes, 'node')} of {replicas_per_node:,}"
        )
    ranks = range(0, nodes * replicas_per_node, replicas_per_node)
    return Topology(
        tuple(tuple(range(first, first + replicas_per_node)) for first in ranks)
    )


def _links(
    alpha: tuple[float, float] | None,
    beta: tuple[float, float] | None,
    default: Links,
) -> Links:
    """Links from microseconds and GB/s, where these are given."""
    levels = []
    for level, link in enumerate((default.inside, default.across)):
        seconds = link.alpha_seconds if alpha is None else alpha[level] * 1e-6
        per_byte = link.seconds_per_byte if beta is None else 1e-9 / beta[level]
        levels.append(Link(seconds, per_byte))
    return dataclasses.replace(default, inside=levels[0], across=levels[1])


def compression_option(compression: str) -> str | dict[str, str] | None:
    """Option of `CommunicationOptions` for a compression of the command line."""
    level, _, name = compression.rpartition(":")
    if level:
        return {level: name}
    return None if name == "none" else name


def routes_of(
    buckets: BucketPlan,
    options: CommunicationOptions,
    topology: Topology,
    backend: str,
) -> tuple[tuple[AlgorithmChoice, ...], tuple[str, ...]]:
    """Algorithms that training would select for each bucket, and its warnings."""
    from tfdp.training.reduction.algorithm_selector import AlgorithmSelector

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        algorithm_selector = AlgorithmSelector(options, topology, backend)
    routes = tuple(
        algorithm_selector.select(b.num_bytes, b.dtype, bucket=b) for b in buckets
    )
    return routes, tuple(str(warning.message) for warning in caught)


def _plan_of(
    model: Any, path: str, options: CommunicationOptions, *, makes_dense: bool
) -> tuple[BucketPlan, list[str]]:
    """The buckets of a model, and its variables with sparse gradients."""
    from tfdp.training.reduction.communication_plan import plan_of_backward_pass

    try:
        buckets, sparse = plan_of_backward_pass(model, options, makes_dense=makes_dense)
    except ValueError as error:
        raise click.UsageError(first_line(error)) from error
    if not (buckets.buckets or sparse):
        raise click.UsageError(f"The model has no variables to train. Received: {path}")
    return buckets, sparse


def _loaded(path: str) -> Any:
    """A saved model."""
    if not os.path.isfile(path):  # false, too, of what no file can be called
        raise click.UsageError(
            f"There is no such file; give the path of a saved model. Received: {path}"
        )
    if not (zipfile.is_zipfile(path) or path.endswith((".h5", ".hdf5"))):
        raise click.UsageError(
            "The file is not a saved Keras model; give one that `model.save` wrote. "
            f"Received: {path}"
        )
    import_without_gpus("tfdp.training.reduction.communication_plan")
    import keras

    try:
        return keras.saving.load_model(path, compile=False)
    except Exception as error:  # a file can be wrong in any way
        raise click.UsageError(
            f"Keras cannot load the model ({first_line(error).split('. ')[0]}); for "
            "one with classes of its own call `strategy.communication_plan` in its "
            f"script. Received: {path}"
        ) from error
