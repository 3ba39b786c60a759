"""Bucket plan: the gradients that each collective reduces together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

# Several buckets overlap with the backward pass, so a step aims for this many. A bucket
# of fewer bytes than the minimum takes longer to launch than to send.
_WANTED_BUCKETS = 8
_MIN_BUCKET_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class Entry:
    """Name, shape and dtype of a gradient or variable, for plans.

    Args:
        name: String, the variable's path, for messages.
        shape: Tuple of ints.
        dtype: String, such as `"float32"`.
        itemsize: Int, bytes of one element.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def num_elements(self) -> int:
        """Int, the number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Int, the size in bytes."""
        return self.num_elements * self.itemsize


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Gradients that one collective reduces, concatenated.

    Args:
        indices: Tuple of ints, positions of the entries in the list that
            `plan_buckets` received, in the order in which the backward pass produces
            the gradients.
        entries: Tuple of the `Entry` at each of these positions.
        dtype: String, the dtype of all entries.
    """

    indices: tuple[int, ...]
    entries: tuple[Entry, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Int, the size in bytes."""
        return sum(entry.num_bytes for entry in self.entries)


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """Buckets of a step, in launch order.

    The plan depends on shapes, dtypes and order alone, so every worker computes the
    same one; `check_same_plan` compares them.

    Args:
        buckets: Tuple of `Bucket`, in launch order.
    """

    buckets: tuple[Bucket, ...]

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self.buckets)

    def __len__(self) -> int:
        return len(self.buckets)

    @property
    def entries(self) -> dict[int, Entry]:
        """Dict from each position in the list for `plan_buckets` to its `Entry`."""
        return {
            index: entry
            for bucket in self.buckets
            for index, entry in zip(bucket.indices, bucket.entries, strict=True)
        }

    @property
    def num_bytes(self) -> int:
        """Int, the bytes of all buckets, which a step reduces."""
        return sum(bucket.num_bytes for bucket in self.buckets)


def effective_bucket_bytes(total_bytes: int, bucket_bytes: int) -> int:
    """Return the largest size of a bucket, which is smaller for a small model.

    Several buckets overlap each other and the backward pass, and large gradients are
    not copied into buckets. docs/reports/performance.md has measurements.

    Args:
        total_bytes: Int, size of all gradients.
        bucket_bytes: Int, largest size of a bucket.

    Returns:
        Int, an eighth of `total_bytes`, or 1 MB (2**20 bytes) if that is more; at most
        `bucket_bytes`.

    Example:

    >>> effective_bucket_bytes(total_bytes=80 * 2**20, bucket_bytes=25 * 2**20) / 2**20
    10.0
    """
    fraction = max(total_bytes // _WANTED_BUCKETS, _MIN_BUCKET_BYTES)
    return min(bucket_bytes, fraction)


def plan_buckets(
    entries: Sequence[Entry],
    order: Sequence[int],
    *,
    bucket_bytes: int,
    first_bucket_bytes: int,
) -> BucketPlan:
    """Fill buckets in the order in which gradients become ready.

    One bucket is open per dtype at any time. A bucket is closed when the next gradient
    of its dtype would make it larger than allowed. A gradient that fills a bucket by
    itself is reduced alone, without a copy, and leaves the open bucket open. So a small
    gradient needs no separate collective because a large one follows it. Buckets are
    launched in the order in which their last gradient becomes ready.

    Args:
        entries: Sequence of `Entry`.
        order: Sequence of ints, a permutation of the positions in `entries`:
            the order in which the backward pass produces them.
        bucket_bytes: Int, largest size of a bucket.
        first_bucket_bytes: Int, largest size of the first bucket.

    Returns:
        A `BucketPlan` that holds every entry exactly once.

    Raises:
        ValueError: If `order` is not a permutation.

    Example:

    >>> entries = [Entry("w", (256,), "float32", 4), Entry("b", (4,), "float32", 4)]
    >>> plan = plan_buckets(entries, [1, 0], bucket_bytes=1024, first_bucket_bytes=64)
    >>> [bucket.indices for bucket in plan]
    [(1,), (0,)]

    Source: Li et al. 2020, https://arxiv.org/abs/2006.15704, section 3.2.3.
    """
    if sorted(order) != list(range(len(entries))):
        raise ValueError(
            f"`order` must name each entry from 0 to {len(entries) - 1} once. "
            f"Received: order={list(order)}"
        )
    open_buckets: dict[str, list[int]] = {}
    closed: list[list[int]] = []
    sizes: dict[str, int] = {}

    for index in order:
        entry = entries[index]
        dtype = entry.dtype
        is_first = not closed
        limit = first_bucket_bytes if is_first else bucket_bytes
        if entry.num_bytes >= limit:
            closed.append([index])
            continue
        members = open_buckets.get(dtype)
        if members and sizes[dtype] + entry.num_bytes > limit:
            closed.append(members)
            members = None
        if not members:
            members = open_buckets[dtype] = []
            sizes[dtype] = 0
        members.append(index)
        sizes[dtype] += entry.num_bytes
    closed.extend(open_buckets.values())

    ready = {index: position for position, index in enumerate(order)}
    closed.sort(key=lambda members: ready[members[-1]])
    return BucketPlan(
        tuple(
            Bucket(
                tuple(members),
                tuple(entries[index] for index in members),
                entries[members[0]].dtype,
            )
            for members in closed
        )
    )
