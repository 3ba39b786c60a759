"""Memory of training state on a replica, with and without sharding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfdp.ground.plans.buckets import Entry
from tfdp.ground.plans.sharding import NOT_SHARDED, ShardingOptions
from tfdp.ground.plans.shards import ShardPlan

_FLOAT32_BYTES = 4


@dataclasses.dataclass(frozen=True)
class ReplicaMemory:
    """Bytes of training state on one replica.

    Args:
        parameters: Int, bytes of the parameters.
        gradients: Int, bytes of the reduced gradients.
        accumulators: Int, bytes of gradients accumulated over micro-batches.
        slots: Int, bytes of the optimizer's slots.
        gathered: Int, the most bytes of sharded parameters that are gathered at a
            time. Defaults to 0.
    """

    parameters: int
    gradients: int
    accumulators: int
    slots: int
    gathered: int = 0

    def __add__(self, other: ReplicaMemory) -> ReplicaMemory:
        """Return the sums of all fields."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return ReplicaMemory(*(first + second for first, second in pairs))

    @property
    def total(self) -> int:
        """Int, the sum of all bytes."""
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Bytes of training state on the largest replica, with and without sharding.

    Args:
        sharded: `ReplicaMemory` of the sharded state.
        whole: `ReplicaMemory` of the unsharded state.

    Example:

    >>> whole = ReplicaMemory(400, 400, 0, 800)
    >>> print(MemoryReport(ReplicaMemory(400, 200, 0, 400), whole))
    bytes on a replica: parameters 400, gradients 200 (unsharded 400), accumulators 0,
    slots 400 (unsharded 800), gathered 0; in all 1,000 (unsharded 1,600)
    """

    sharded: ReplicaMemory
    whole: ReplicaMemory

    def __str__(self) -> str:
        """Return the sizes as two lines of text, unsharded ones in parentheses."""
        names = [field.name for field in dataclasses.fields(ReplicaMemory)]
        *parts, total = [_format_field(name, self) for name in [*names, "total"]]
        return (
            f"bytes on a replica: {', '.join(parts[:3])},\n"
            f"{', '.join(parts[3:])}; in all {total.removeprefix('total ')}"
        )


def replica_memory(
    entries: Sequence[Entry],
    slot_bytes: Sequence[int],
    plan: ShardPlan | None = None,
    *,
    accumulates: bool,
    sharding: ShardingOptions = NOT_SHARDED,
) -> ReplicaMemory:
    """Compute the memory of the replica that holds most of the training state.

    Args:
        entries: Sequence of `Entry`, the trained variables.
        slot_bytes: Sequence of ints, bytes of each variable's slots.
        plan: `ShardPlan` of the variables, or `None` without sharding. Defaults to
            `None`.
        accumulates: Bool, whether gradients are accumulated.
        sharding: `ShardingOptions`, which decide whether accumulated gradients and
            parameters are sharded, like slots. Defaults to neither.

    Returns:
        `ReplicaMemory`, whose `gathered` is 0.

    Example:

    >>> from tfdp.ground.plans.shards import plan_element_shards
    >>> entries = [Entry("w", (100,), "float32", 4)]
    >>> sizes = {"bucket_bytes": 1000, "first_bucket_bytes": 1000}
    >>> plan = plan_element_shards(entries, 4, **sizes)
    >>> replica_memory(entries, [800], plan, accumulates=False).slots
    200
    """
    num_bytes = sum(entry.num_bytes for entry in entries)
    sums = sum(
        entry.num_elements * _accumulated_itemsize(entry.itemsize) for entry in entries
    )
    accumulators = sums if accumulates else 0
    if plan is None:
        return ReplicaMemory(num_bytes, num_bytes, accumulators, sum(slot_bytes))
    itemsizes = {entry.dtype: entry.itemsize for entry in entries}
    slices = [(bucket.slice_size, itemsizes[bucket.dtype]) for bucket in plan.buckets]
    slice_bytes = sum(size * itemsize for size, itemsize in slices)
    if accumulates and sharding.shards_gradients:
        accumulators = sum(
            size * _accumulated_itemsize(itemsize) for size, itemsize in slices
        )
    owners = range(plan.num_owners)
    return ReplicaMemory(
        slice_bytes if sharding.shards_parameters else num_bytes,
        slice_bytes,
        accumulators,
        max(_owned_slot_bytes(entries, slot_bytes, plan, owner) for owner in owners),
    )


def _owned_slot_bytes(
    entries: Sequence[Entry], slot_bytes: Sequence[int], plan: ShardPlan, owner: int
) -> int:
    """Return the bytes of the slots of an owner's elements.

    Args:
        entries: Sequence of `Entry`, the trained variables.
        slot_bytes: Sequence of ints, bytes of each variable's slots.
        plan: `ShardPlan` of the variables.
        owner: Int, the replica that owns the elements.
    """
    elements = [0] * len(entries)
    for bucket in plan.buckets:
        for segment in bucket.rows[owner]:
            elements[segment.index] += segment.size
    return sum(
        round(num * slots / entry.num_elements)
        for num, slots, entry in zip(elements, slot_bytes, entries, strict=True)
        if num
    )


def _accumulated_itemsize(itemsize: int) -> int:
    """Return the bytes of an element in a sum of gradients: at least float32's 4."""
    return max(itemsize, _FLOAT32_BYTES)


def _format_field(name: str, report: MemoryReport) -> str:
    """Format the field `name` of both memories: "slots 400 (unsharded 800)"."""
    sharded, whole = getattr(report.sharded, name), getattr(report.whole, name)
    text = f"{name} {sharded:,}"
    return text if sharded == whole else f"{text} (unsharded {whole:,})"
