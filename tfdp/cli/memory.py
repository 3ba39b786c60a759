"""Memory of training state on a replica, predicted for `tfdp plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from rich.table import Table

from tfdp.cluster import Topology
from tfdp.options import CommunicationOptions
from tfdp.plans.memory import ReplicaMemory

# With more, a plan of slices would be longer than the model.
MOST_OWNERS = 2**16
_COLUMNS = ("parameters", "gradients", "accumulators", "slots", "total")
Row = tuple[str, ReplicaMemory]


def checked_optimizer(name: str) -> Any:
    """A Keras optimizer by the name that `compile` takes.

    Raises:
        click.UsageError: If Keras has none of that name.
    """
    import keras

    try:
        return keras.optimizers.get(name)
    except ValueError as error:
        raise click.UsageError(
            "--optimizer is a name that Keras's `compile` takes, such as adam. "
            f"Received: {name}"
        ) from error


def memory_of(
    model: Any,
    optimizer: Any,
    topology: Topology,
    options: CommunicationOptions,
    *,
    accumulates: bool,
) -> tuple[Row, ...]:
    """Memory of a replica, with and without sharding.

    Args:
        model: Keras model.
        optimizer: Keras optimizer.
        topology: `Topology`.
        options: `CommunicationOptions`.
        accumulates: Bool, whether gradients are accumulated.

    Returns:
        Tuple of pairs: what is sharded, and `ReplicaMemory` of the replica that
        holds most.
    """
    from tfdp.sharding import param_group_memory, shard_plan

    variables = model.trainable_variables
    rows = [
        (
            "nothing sharded",
            param_group_memory(optimizer, variables, accumulates=accumulates),
        )
    ]
    scopes = {"": topology.num_replicas}
    if topology.num_nodes > 1:
        scopes[", in each node"] = topology.replicas_per_node
    for where, num_owners in scopes.items():
        if not 1 < num_owners <= MOST_OWNERS:
            continue
        plan = shard_plan(optimizer, variables, num_owners, options)
        for stage in (1, 2) if accumulates else (1,):
            found = param_group_memory(
                optimizer,
                variables,
                plan,
                accumulates=accumulates,
                shards_gradients=stage == 2,
            )
            rows.append((f"stage {stage}{where}", found))
    return tuple(rows)


def table_of(rows: Sequence[Row]) -> Table:
    """A table of megabytes."""
    table = Table(title="memory on the replica that holds most, MB")
    table.add_column("sharding")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for title, memory in rows:
        sizes = [f"{getattr(memory, name) / 2**20:,.2f}" for name in _COLUMNS]
        table.add_row(title, *sizes)
    return table
