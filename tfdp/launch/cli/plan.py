"""`tfdp plan`: predicted communication of a model on a hypothetical cluster."""

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
from tfdp.ground.plans.memory import ReplicaMemory
from tfdp.ground.plans.prediction import BACKWARD_FRACTION
from tfdp.ground.plans.sharding import SHARDINGS, ShardingOptions
from tfdp.ground.plans.topology import Topology
from tfdp.ground.plans.units import DEFAULT_UNITS, peak_gathered_bytes, plan_units
from tfdp.ground.text import pluralize
from tfdp.launch.cli import parameter_types as types
from tfdp.launch.cli.errors import first_line, import_without_gpus, usage_errors
from tfdp.launch.cli.forecast import Forecast, show

if TYPE_CHECKING:  # `algorithm_choice` imports TensorFlow, which takes seconds
    from tfdp.training.compression.algorithm_choice import AlgorithmChoice

_COMPRESSIONS = (
    "none",
    *(f"{level}{name}" for level in ("", "outer:") for name in COMPRESSIONS),
)
_MAX_REPLICAS = 2**20
# The plan of a model's shards grows with the number of their owners, so memory is
# predicted for at most this many owners.
_MAX_OWNERS = 2**16


_EXAMPLES = """\b
Examples:
  tfdp plan model.keras --nodes 16 --replicas-per-node 8 --step-ms 120
  tfdp plan model.keras --nodes 2 --replicas-per-node 4 --backend ring \\
      --alpha 20,100 --beta 5,0.12
"""


@click.command(epilog=_EXAMPLES)
@click.argument("model", metavar="MODEL.keras", type=types.FILE)
@types.count_option("--nodes N", "Number of nodes.", required=True)
@types.count_option(
    "--replicas-per-node L", "Number of replicas (GPUs) on each node.", required=True
)
@types.option(
    "--alpha US[,US]",
    "Latency of a message in microseconds: inside nodes and across nodes, as in "
    "20,100; or one number for both.",
    types.LATENCIES,
)
@types.option(
    "--beta GB/S[,GB/S]",
    "Bandwidth in GB/s (10^9 bytes, one way): between two replicas of a node "
    "(with ring, of all together) and of the one link of a node, which its replicas "
    "share, as in 5,0.12; or one number for both.",
    types.BANDWIDTHS,
)
@types.option(
    "--backend",
    "Transport, and the defaults of --alpha and --beta: nccl over NVLink and 100 "
    "Gbit/s; ring, TensorFlow's own, over loopback and 10 Gbit/s; "
    "direct and mpi, shared memory and 10 Gbit/s.",
    click.Choice(tuple(DEFAULT_LINKS)),
    default="nccl",
)
@types.positive_option(
    "--step-ms MS",
    "Time of a step on one replica, in milliseconds: for the scaling efficiency.",
)
@types.option(
    "--overlap SHARE",
    "The last part of that time, in which gradients become ready and "
    "communication can hide. Default: 2/3, the backward pass.",
    types.FRACTION,
)
@types.option(
    "--algorithm NAME",
    "auto (the fastest for each bucket), ring, tree, halving_doubling, "
    "hierarchical, hierarchical:INNER,OUTER, or adasum.",
    types.ALGORITHM,
    default="auto",
)
@types.option(
    "--compression",
    "The type on the wire; outer: across nodes only.",
    click.Choice(_COMPRESSIONS),
    default="none",
)
@types.positive_option(
    "--bucket-mb MB",
    "Largest size of a bucket, as in CommunicationOptions.",
    default=25,
)
@types.option(
    "--optimizer NAME",
    "Optimizer whose slots take memory: a name that Keras's compile takes.",
    default="adam",
)
@types.option(
    "--accumulates",
    "Gradients are accumulated over micro-batches: their sums, dense and at least "
    "float32, take memory and are reduced.",
)
@types.option("--json", "Print JSON.", name="as_json")
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
        raise click.UsageError("--overlap is a share of --step-ms. Give both.")
    topology = _topology(nodes, replicas_per_node)
    links = _links(alpha, beta, DEFAULT_LINKS[backend])
    # `CommunicationOptions` raises `ValueError` if the algorithm does not support the
    # compression, which is an error of the user.
    with usage_errors(text_of=first_line):
        options = CommunicationOptions(
            bucket_mb=bucket_mb,
            algorithm=algorithm,
            compression=compression_option(compression),
            links=links,
        )
    loaded = _load_model(model)
    # `gathers` is imported late, since it imports TensorFlow, which takes seconds.
    from tfdp.training.program.gathers import gathers_of_model

    levels = algorithm.values() if isinstance(algorithm, dict) else (algorithm,)
    buckets, sparse = _plan_buckets(
        loaded,
        model,
        options,
        makes_dense=ADASUM in levels,
        accumulates=accumulates,
    )
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
        memory=_predict_memory(loaded, optimizer, topology, options, accumulates),
        gathers=gathers_of_model(loaded),
    )
    show(forecast, as_json=as_json)


def _topology(nodes: int, replicas_per_node: int) -> Topology:
    """Return the topology of equal nodes; raise a usage error if it is too large."""
    if nodes * replicas_per_node > _MAX_REPLICAS:
        raise click.UsageError(
            f"A cluster may have at most {_MAX_REPLICAS:,} replicas. "
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
    """Return links with the given numbers in place of defaults.

    Args:
        alpha: Tuple of microseconds inside nodes and across nodes, or `None`.
        beta: Tuple of GB/s inside nodes and across nodes, or `None`.
        default: `Links` of the backend.
    """
    levels = []
    for level, link in enumerate((default.inside, default.across)):
        seconds = link.alpha_seconds if alpha is None else alpha[level] * 1e-6
        per_byte = link.seconds_per_byte if beta is None else 1e-9 / beta[level]
        levels.append(Link(seconds, per_byte))
    return dataclasses.replace(default, inside=levels[0], across=levels[1])


def compression_option(compression: str) -> str | dict[str, str] | None:
    """Convert the value of `--compression` to the option of `CommunicationOptions`.

    Returns:
        Dict `{level: name}` for `"level:name"`, `None` for `"none"`, or else the value.
    """
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
    """Return the algorithm that training would select for each bucket, and warnings.

    Args:
        buckets: `BucketPlan` of the model.
        options: `CommunicationOptions`.
        topology: `Topology` of the cluster.
        backend: String, the communication backend, such as `"nccl"`.

    Returns:
        Tuple of the tuple of an `AlgorithmChoice` for each bucket, and the tuple of the
        warnings, strings.
    """
    from tfdp.training.reduction.algorithm_selector import AlgorithmSelector

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        algorithm_selector = AlgorithmSelector(options, topology, backend)
    routes = tuple(
        algorithm_selector.select(b.num_bytes, b.dtype, bucket=b) for b in buckets
    )
    return routes, tuple(str(warning.message) for warning in caught)


def _plan_buckets(
    model: Any, path: str, options: CommunicationOptions, **how: bool
) -> tuple[BucketPlan, list[str]]:
    """Return the buckets of a model, and the names of variables with sparse gradients.

    Args:
        model: A `keras.Model`.
        path: String, path of the model's file, for an error.
        options: `CommunicationOptions`.
        **how: Arguments of `plan_of_backward_pass`, such as `makes_dense`.

    Raises:
        click.UsageError: If no plan can be made, or the model has nothing to train.
    """
    from tfdp.training.reduction.communication_plan import plan_of_backward_pass

    with usage_errors(text_of=first_line):
        buckets, sparse = plan_of_backward_pass(model, options, **how)
    if not (buckets.buckets or sparse):
        raise click.UsageError(f"The model has no variables to train. Received: {path}")
    return buckets, sparse


def _load_model(path: str) -> Any:
    """Load a saved model without compiling it; raise a usage error if that fails."""
    if not os.path.isfile(path):
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
    except Exception as error:  # a broken file may raise anything
        raise click.UsageError(
            f"Keras cannot load the model ({first_line(error).split('. ')[0]}); for a "
            "model with custom classes call `strategy.communication_plan` in its "
            f"script. Received: {path}"
        ) from error


def _predict_memory(
    model: Any,
    optimizer_name: str,
    topology: Topology,
    options: CommunicationOptions,
    accumulates: bool,
) -> tuple[tuple[str, ReplicaMemory], ...]:
    """Predict the memory of the largest replica for each kind of sharding.

    Args:
        model: A `keras.Model`.
        optimizer_name: String, a name that Keras's `compile` takes.
        topology: `Topology` of the cluster.
        options: `CommunicationOptions`, for the size of buckets.
        accumulates: Bool, whether gradients are accumulated over micro-batches.

    Returns:
        Tuple of pairs of a kind of sharding and its `ReplicaMemory`.

    Raises:
        click.UsageError: If Keras cannot create an optimizer of this name.
    """
    import keras

    from tfdp.ground.base.param_groups import is_elementwise
    from tfdp.training.sharding.memory_report import param_group_memory
    from tfdp.training.sharding.sharded_state import shard_plan

    try:
        optimizer = keras.optimizers.get(optimizer_name)
    except Exception as error:  # a class that needs arguments may raise anything
        raise click.UsageError(
            "--optimizer is a name that Keras's `compile` takes, such as adam. "
            f"Received: {optimizer_name}"
        ) from error
    variables = model.trainable_variables
    frozen, gathered = _frozen_and_gathered(model, options)
    whole = param_group_memory(optimizer, variables, accumulates=accumulates)
    undivided = ReplicaMemory(frozen, 0, 0, 0)
    rows = [("nothing sharded", whole + undivided)]
    # If variables are not divided, each has one owner, so owners beyond the number of
    # variables hold nothing and do not change the largest memory. A plan for all owners
    # would take minutes.
    most = _MAX_OWNERS if is_elementwise(optimizer) else len(variables)
    scopes = {"": topology.num_replicas}
    if topology.num_nodes > 1:
        scopes[", in each node"] = topology.replicas_per_node
    for where, num_owners in scopes.items():
        if not 1 < num_owners <= _MAX_OWNERS:
            continue
        shards = shard_plan(optimizer, variables, min(num_owners, most), options)
        divided = ReplicaMemory(-(-frozen // num_owners), 0, 0, 0, gathered)
        # Without accumulation of gradients, ZeRO's stage 2 needs as much memory as its
        # stage 1, so stage 2 gets no row.
        for stage in (1, 2, 3) if accumulates else (1, 3):
            sharding = ShardingOptions(SHARDINGS[stage])
            memory = param_group_memory(
                optimizer,
                variables,
                shards,
                accumulates=accumulates,
                sharding=sharding,
            )
            memory += divided if sharding.shards_parameters else undivided
            rows.append((f"stage {stage}{where}", memory))
    return tuple(rows)


def _frozen_and_gathered(model: Any, options: CommunicationOptions) -> tuple[int, int]:
    """Return the bytes of frozen parameters, and the most bytes gathered at once.

    ZeRO-3 gathers the parameters, both frozen and trained, a few at a time.
    """
    from tfdp.ground.base.param_groups import entry_of
    from tfdp.training.parameters.conversion import parameters_in_order
    from tfdp.training.reduction.fusion import bucket_bytes_of

    entries = list(map(entry_of, parameters_in_order(model, model.trainable_variables)))
    units = plan_units(entries, bucket_bytes_of(entries, options))
    sizes = [sum(entries[index].num_bytes for index in unit) for unit in units]
    trained = sum(entry_of(v).num_bytes for v in model.trainable_variables)
    frozen = sum(entry.num_bytes for entry in entries) - trained
    return frozen, peak_gathered_bytes(sizes, DEFAULT_UNITS.prefetch)
