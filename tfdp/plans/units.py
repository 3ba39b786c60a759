"""Units of sharded parameters: which ones are gathered together, and who holds what."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tfdp.plans.buckets import Entry
from tfdp.plans.shards import Row, Segment, ShardBucket

# Elements of a flattened parameter that each owner holds: first, one after the last.
Ranges = tuple[tuple[int, int], ...]


def equal_ranges(size: int, num_owners: int) -> Ranges:
    """Divide the elements of a parameter equally; the last owners may have fewer.

    Args:
        size: Int, elements of the parameter.
        num_owners: Int.

    Returns:
        Tuple with a pair of ints for each owner.

    Example:

    >>> equal_ranges(7, 3)
    ((0, 3), (3, 6), (6, 7))

    Source: Zhao et al. 2023, https://arxiv.org/abs/2304.11277, section 4.2.
    """
    length = -(-size // num_owners)
    bounds = [min(owner * length, size) for owner in range(num_owners + 1)]
    return tuple(itertools.pairwise(bounds))


def range_of_owner(size: int, num_owners: int, owner: int) -> Ranges:
    """Give all elements of a parameter to one owner.

    Example:

    >>> range_of_owner(7, 3, 1)
    ((0, 0), (0, 7), (7, 7))
    """
    return tuple(
        (0, size) if number == owner else (0 if number < owner else size,) * 2
        for number in range(num_owners)
    )


def plan_units(
    entries: Sequence[Entry], layers: Sequence[str], unit_bytes: int
) -> list[tuple[int, ...]]:
    """Divide parameters into units: runs of whole layers of about a size.

    Args:
        entries: Sequence of `Entry`, in the order in which a forward pass reads them.
        layers: Sequence of strings, the layer of each one. A layer is not divided.
        unit_bytes: Int, largest size of a unit that has more than one layer.

    Returns:
        List of tuples of ints, the positions of each unit.

    Example:

    >>> entries = [Entry(name, (10,), "float32", 4) for name in "abcd"]
    >>> plan_units(entries, ["x", "x", "y", "z"], 80)
    [(0, 1), (2, 3)]
    """
    units: list[list[int]] = []
    room = 0
    for _, run in itertools.groupby(range(len(entries)), key=layers.__getitem__):
        layer = list(run)
        num_bytes = sum(entries[index].num_bytes for index in layer)
        if not units or num_bytes > room:
            units.append([])
            room = unit_bytes
        units[-1] += layer
        room -= num_bytes
    return [tuple(unit) for unit in units]


def unit_bucket(
    indices: Sequence[int], ranges: Sequence[Ranges], dtype: str
) -> ShardBucket:
    """Lay the parts of some parameters end to end, one row for each owner.

    Args:
        indices: Sequence of ints, positions of parameters of one dtype.
        ranges: Sequence of `Ranges`, one for each position.
        dtype: String.

    Returns:
        `ShardBucket`.

    Example:

    >>> unit_bucket([0], [((0, 2), (2, 3))], "float32").slice_size
    2
    """
    num_owners = len(ranges[0])
    rows = tuple(
        _row(indices, [ranges_of[owner] for ranges_of in ranges])
        for owner in range(num_owners)
    )
    sizes = [sum(segment.size for segment in row) for row in rows]
    return ShardBucket(rows, max(sizes), dtype)


def _row(indices: Sequence[int], ranges: Sequence[tuple[int, int]]) -> Row:
    return tuple(
        Segment(index, start, stop)
        for index, (start, stop) in zip(indices, ranges, strict=True)
        if start < stop
    )
