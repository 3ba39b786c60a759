"""Memory of training state on a replica, predicted for `tfdp plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from rich.table import Table

from tfdp.ground.options import CommunicationOptions
from tfdp.ground.plans.memory import ReplicaMemory
from tfdp.ground.plans.topology import Topology
from tfdp.ground.plans.units import DEFAULT_UNITS, most_gathered, plan_units

# With more, a plan of slices would be longer than the model.
MOST_OWNERS = 2**16
_COLUMNS = ("parameters", "gradients", "accumulators", "slots", "gathered", "total")
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
    from tfdp.training.sharding.memory_report import param_group_memory
    from tfdp.training.sharding.sharded_state import shard_plan

    variables = model.trainable_variables
    frozen, gathered = _frozen_and_gathered(model, options)
    whole = param_group_memory(optimizer, variables, accumulates=accumulates)
    rows = [("nothing sharded", whole + ReplicaMemory(frozen, 0, 0, 0))]
    scopes = {"": topology.num_replicas}
    if topology.num_nodes > 1:
        scopes[", in each node"] = topology.replicas_per_node
    for where, num_owners in scopes.items():
        if not 1 < num_owners <= MOST_OWNERS:
            continue
        plan = shard_plan(optimizer, variables, num_owners, options)
        for stage in (1, 2, 3) if accumulates else (1, 3):
            found = param_group_memory(
                optimizer,
                variables,
                plan,
                accumulates=accumulates,
                stage=stage,
                gathered=gathered if stage == 3 else 0,
            )
            held = -(-frozen // num_owners) if stage == 3 else frozen
            rows.append((f"stage {stage}{where}", found + ReplicaMemory(held, 0, 0, 0)))
    return tuple(rows)


def _frozen_and_gathered(model: Any, options: CommunicationOptions) -> tuple[int, int]:
    """Bytes of frozen parameters, and what a step gathers at a time in stage 3."""
    from tfdp.ground.base.param_groups import entry_of
    from tfdp.training.parameters.conversion import parameters_in_order
    from tfdp.training.reduction.fusion import bucket_bytes_of

    entries = list(map(entry_of, parameters_in_order(model, model.trainable_variables)))
    units = plan_units(entries, bucket_bytes_of(entries, options))
    sizes = [sum(entries[index].num_bytes for index in unit) for unit in units]
    trained = sum(entry_of(v).num_bytes for v in model.trainable_variables)
    frozen = sum(entry.num_bytes for entry in entries) - trained
    return frozen, most_gathered(sizes, DEFAULT_UNITS.prefetch)


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
