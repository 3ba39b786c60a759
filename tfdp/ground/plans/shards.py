"""Shard plan: the replica that owns each element of the optimizer state.

Each owner has a row of concatenated variables. Buckets are column ranges of all rows,
which one collective moves together. An owner's part of a bucket is a slice.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence

from tfdp.ground.plans.buckets import Entry, plan_buckets


@dataclasses.dataclass(frozen=True)
class Segment:
    """Contiguous elements of one flattened variable.

    Args:
        index: Int, position of the variable in the list that the plan was made for.
        start: Int, the first element.
        stop: Int, one after the last.
    """

    index: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Int, the number of elements."""
        return self.stop - self.start


Row = tuple[Segment, ...]

# Largest ratio of the elements in padded slices to the elements of variables. An
# all-reduce moves each element twice, so at a larger ratio it moves less than a
# reduce-scatter and an all-gather of padded slices.
_MAX_PADDING = 2.0


@dataclasses.dataclass(frozen=True)
class ShardBucket:
    """Elements that one reduce-scatter and one all-gather move together.

    Args:
        rows: Tuple of tuples of `Segment`, the shard of each owner in this bucket.
        slice_size: Int, elements of a shard with its padding.
        dtype: String, the dtype of all variables.
    """

    rows: tuple[Row, ...]
    slice_size: int
    dtype: str

    @property
    def indices(self) -> frozenset[int]:
        """Frozen set of ints, the positions of the variables that the bucket holds."""
        return frozenset(segment.index for row in self.rows for segment in row)

    def padding(self, owner: int) -> int:
        """Return the number of elements of an owner's shard that only pad it."""
        return self.slice_size - _length(self.rows[owner])

    def places(self, owner: int) -> Iterator[tuple[Segment, int, int]]:
        """Yield each segment of an owner, with its start and stop in the shard."""
        end = 0
        for segment in self.rows[owner]:
            begin, end = end, end + segment.size
            yield segment, begin, end

    @property
    def num_elements(self) -> int:
        """Int, elements of variables, without padding."""
        return sum(map(_length, self.rows))

    @property
    def is_lopsided(self) -> bool:
        """Bool, whether padding more than doubles the number of elements."""
        return len(self.rows) * self.slice_size > _MAX_PADDING * self.num_elements

    @property
    def joined(self) -> ShardBucket:
        """`ShardBucket` with one row: those of all owners concatenated, not padded."""
        row = tuple(segment for row in self.rows for segment in row)
        return ShardBucket((row,), self.num_elements, self.dtype)

    @property
    def moved(self) -> ShardBucket:
        """`ShardBucket` in the layout that collectives move: `joined`, or this one.

        It is `joined`, for an all-reduce, if padding more than doubles the elements: a
        reduce-scatter and an all-gather would move more.
        """
        return self.joined if self.is_lopsided else self

    def range_in_joined(self, owner: int) -> tuple[int, int]:
        """Return the range of an owner's elements in `joined`, the row without padding.

        Returns:
            Tuple of two ints: the first position, and the one after the last.
        """
        start = sum(map(_length, self.rows[:owner]))
        return start, start + _length(self.rows[owner])


@dataclasses.dataclass(frozen=True)
class ShardPlan:
    """Assignment of the elements of variables to the replicas that own them.

    Args:
        buckets: Tuple of `ShardBucket`, in launch order.
        num_owners: Int, the number of replicas that own shards.
        owners: Tuple of ints, the owner of each variable in a plan of variable
            shards, or `None` in one of element shards.
    """

    buckets: tuple[ShardBucket, ...]
    num_owners: int
    owners: tuple[int, ...] | None = None

    @property
    def shards_variables(self) -> bool:
        """Bool, whether every variable has one owner."""
        return self.owners is not None

    def owned(self, owner: int) -> tuple[int, ...]:
        """Return positions of an owner's variables; none in plans of element shards."""
        owners = self.owners or ()
        return tuple(
            index for index, its_owner in enumerate(owners) if its_owner == owner
        )

    @property
    def fingerprint(self) -> str:
        """String, a digest of the plan for comparison between workers."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def plan_element_shards(
    entries: Sequence[Entry],
    num_owners: int,
    *,
    bucket_bytes: int,
    first_bucket_bytes: int,
) -> ShardPlan:
    """Shard by elements: cut each bucket of concatenated variables into equal slices.

    It is for elementwise optimizers. The last variable comes first, as its gradient is
    the first one in the backward pass.

    Args:
        entries: Sequence of `Entry`, the variables.
        num_owners: Int, the number of replicas that own shards.
        bucket_bytes: Int, largest size of a bucket.
        first_bucket_bytes: Int, largest size of the first bucket.

    Returns:
        A `ShardPlan` in which every element has one owner.

    Example:

    >>> entries = [Entry("w", (5,), "float32", 4)]
    >>> plan = plan_element_shards(entries, 2, bucket_bytes=100, first_bucket_bytes=100)
    >>> plan.buckets[0].rows
    ((Segment(index=0, start=0, stop=3),), (Segment(index=0, start=3, stop=5),))

    Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054.
    """
    buckets = plan_buckets(
        entries,
        list(reversed(range(len(entries)))),
        bucket_bytes=bucket_bytes,
        first_bucket_bytes=first_bucket_bytes,
    )
    return ShardPlan(
        tuple(
            _bucket_of_rows(
                _rows_of_equal_length(bucket.indices, entries, num_owners),
                bucket.dtype,
            )
            for bucket in buckets
            if bucket.num_bytes
        ),
        num_owners,
    )


def plan_variable_shards(
    entries: Sequence[Entry], num_owners: int, *, bucket_bytes: int
) -> ShardPlan:
    """Shard by variables: assign each variable to one owner, with balanced bytes.

    It is for optimizers that need whole tensors. The largest variables are assigned
    first, each to the owner with the fewest bytes. An owner's row is the concatenation
    of its variables, and buckets are column ranges of all rows.

    Args:
        entries: Sequence of `Entry`, the variables.
        num_owners: Int, the number of replicas that own shards.
        bucket_bytes: Int, largest size of a bucket.

    Returns:
        A `ShardPlan` in which every variable has one owner.

    Example:

    >>> entries = [Entry(name, (size,), "float32", 4) for name, size in
    ...            (("a", 6), ("b", 3), ("c", 2))]
    >>> plan_variable_shards(entries, 2, bucket_bytes=1000).owners
    (0, 1, 1)

    Source: Graham 1969, "Bounds on multiprocessing timing anomalies", for the
    largest first.
    """
    owners = _balance_owners(entries, num_owners)
    buckets = []
    for dtype in dict.fromkeys(entry.dtype for entry in entries):
        rows: list[list[Segment]] = [[] for _ in range(num_owners)]
        for index in reversed(range(len(entries))):
            entry = entries[index]
            if entry.dtype == dtype and entry.num_elements:
                rows[owners[index]].append(Segment(index, 0, entry.num_elements))
        itemsize = next(e.itemsize for e in entries if e.dtype == dtype)
        width = max(1, bucket_bytes // (num_owners * itemsize))
        length = max(_length(row) for row in rows)
        buckets += [
            _bucket_of_rows(
                [_columns(row, first, first + width) for row in rows], dtype
            )
            for first in range(0, length, width)
        ]
    return ShardPlan(tuple(buckets), num_owners, tuple(owners))


def _rows_of_equal_length(
    indices: Sequence[int], entries: Sequence[Entry], num_owners: int
) -> list[Row]:
    """Cut the concatenation of variables into rows of equal length.

    Args:
        indices: Sequence of ints, positions of the variables in `entries`.
        entries: Sequence of `Entry`.
        num_owners: Int, the number of rows.
    """
    whole = tuple(Segment(i, 0, entries[i].num_elements) for i in indices)
    length = -(-_length(whole) // num_owners)
    return [
        _columns(whole, owner * length, (owner + 1) * length)
        for owner in range(num_owners)
    ]


def _columns(row: Sequence[Segment], first: int, last: int) -> Row:
    """Return the segments of a row's elements from `first` to the one before `last`."""
    segments, begin = [], 0
    for segment in row:
        start = segment.start + max(0, first - begin)
        stop = min(segment.stop, segment.start + last - begin)
        if start < stop:
            segments.append(Segment(segment.index, start, stop))
        begin += segment.size
    return tuple(segments)


def _bucket_of_rows(rows: Sequence[Row], dtype: str) -> ShardBucket:
    """Create a `ShardBucket` of one row per owner, padded to the longest row."""
    return ShardBucket(tuple(rows), max(_length(row) for row in rows), dtype)


def _length(row: Sequence[Segment]) -> int:
    """Return the number of elements in all segments of a row."""
    return sum(segment.size for segment in row)


def _balance_owners(entries: Sequence[Entry], num_owners: int) -> list[int]:
    """Return the owner of each variable, with about equal bytes of each dtype.

    The largest variable comes first, and goes to the owner with the fewest bytes.
    """
    owners = [0] * len(entries)
    loads: dict[str, list[int]] = {}
    for index in sorted(range(len(entries)), key=lambda i: -entries[i].num_bytes):
        load = loads.setdefault(entries[index].dtype, [0] * num_owners)
        owner = load.index(min(load))
        owners[index] = owner
        load[owner] += entries[index].num_bytes
    return owners
