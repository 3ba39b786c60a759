"""Packing of variables into the rows of a shard plan's buckets, and unpacking.

A bucket has a row for each owner: segments, which are ranges of elements of variables.
A row that is padded to `slice_size` elements is a slice. In a lopsided bucket slices
would be mostly padding, so its rows are joined without padding. See
`tfdp.ground.plans.shards`. A position is that of a variable in the planned list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import tensorflow as tf

from tfdp.ground.plans.shards import Segment, ShardBucket, ShardPlan


def pack_rows(
    bucket: ShardBucket, tensors: Mapping[int, tf.Tensor], dtype: tf.DType
) -> tf.Tensor:
    """Concatenate a bucket's elements in the order of the owners of its shards.

    Each owner's elements, a row, are padded to one size, unless that would be mostly
    padding.

    Args:
        bucket: `ShardBucket`.
        tensors: Dict from the position of a variable in the plan to its tensor; missing
            tensors count as zeros.
        dtype: `tf.DType` of the result.

    Returns:
        Tensor of shape `[num_owners * slice_size]`; without padding, of shape
        `[num_elements]`.
    """
    moved = bucket.moved
    return _pack(moved, range(len(moved.rows)), tensors, dtype)


def pack_row(
    bucket: ShardBucket, owner: int, tensors: Mapping[int, tf.Tensor], dtype: tf.DType
) -> tf.Tensor:
    """Concatenate the elements of a bucket that one owner holds, with padding.

    Args:
        bucket: `ShardBucket`.
        owner: Int, index of the owner.
        tensors: Dict from the position of a variable in the plan to its tensor; missing
            tensors count as zeros.
        dtype: `tf.DType` of the result.

    Returns:
        Tensor of shape `[slice_size]`.
    """
    return _pack(bucket, [owner], tensors, dtype)


def place_row(bucket: ShardBucket, owner: int, row: tf.Tensor) -> tf.Tensor:
    """Put an owner's row between zeros that stand for the rows of the other owners.

    Args:
        bucket: `ShardBucket`.
        owner: Int, index of the owner.
        row: Tensor of shape `[slice_size]`, the owner's elements of the bucket; its
            padding may be missing.

    Returns:
        Tensor of shape `[bucket.num_elements]`.
    """
    start, stop = bucket.range_in_joined(owner)
    return tf.pad(row[: stop - start], [[start, bucket.num_elements - stop]])


def take_row(bucket: ShardBucket, owner: int, flat: tf.Tensor) -> tf.Tensor:
    """Cut the elements of one owner out of a bucket without padding.

    Args:
        bucket: `ShardBucket`.
        owner: Int, index of the owner.
        flat: Tensor of shape `[bucket.num_elements]`, in the order of owners.

    Returns:
        Tensor of shape `[slice_size]`, padded with zeros.
    """
    start, stop = bucket.range_in_joined(owner)
    return tf.pad(flat[start:stop], [[0, bucket.padding(owner)]])


def elements_of(tensor: tf.Tensor, segment: Segment) -> tf.Tensor:
    """Return a segment's elements as a flat tensor; a whole tensor is not copied."""
    flat = tf.reshape(tensor, [-1])
    if segment.start == 0 and segment.stop == flat.shape[0]:
        return flat
    return flat[segment.start : segment.stop]


def unpack_rows(
    plan: ShardPlan, flats: Sequence[tf.Tensor | None]
) -> dict[int, tf.Tensor]:
    """Unpack whole variables from gathered buckets, the inverse of `pack_rows`.

    Args:
        plan: `ShardPlan`.
        flats: Sequence with a tensor for each bucket, as `pack_rows` returns it; or
            `None` for a bucket that was not gathered.

    Returns:
        Dict from the position of a variable in the plan to its flat tensor, for the
        variables in gathered buckets.
    """
    ranges: dict[int, list[tuple[int, int, int, int]]] = {}
    for number, bucket in enumerate(plan.buckets):
        if flats[number] is None:
            continue
        moved = bucket.moved
        for owner in range(len(moved.rows)):
            first = owner * moved.slice_size
            for segment, begin, end in moved.places(owner):
                found = (segment.start, number, first + begin, first + end)
                ranges.setdefault(segment.index, []).append(found)
    return {index: _join(sorted(parts), flats) for index, parts in ranges.items()}


def _join(
    parts: list[tuple[int, int, int, int]], flats: Sequence[tf.Tensor | None]
) -> tf.Tensor:
    """Concatenate the ranges of gathered buckets that make up one variable.

    Args:
        parts: List of tuples of four ints: the range's first element in the variable,
            the number of the bucket, and the begin and the end of the range in the
            bucket. They are in the order of elements.
        flats: Sequence with a tensor for each bucket, or `None` if not gathered.

    Returns:
        Flat tensor, all elements of the variable.
    """
    merged: list[list[int]] = []
    for _, number, begin, end in parts:
        if merged and merged[-1][0] == number and merged[-1][2] == begin:
            merged[-1][2] = end
        else:
            merged.append([number, begin, end])
    tensors = [
        cast(tf.Tensor, flats[number])[begin:end] for number, begin, end in merged
    ]
    return tensors[0] if len(tensors) == 1 else tf.concat(tensors, axis=0)


def _append(runs: list[Segment | int], item: Segment | int) -> None:
    """Append a segment, or a number of zeros, to the list of runs to concatenate.

    If it continues the last run, it is merged with this run.

    Args:
        runs: List of segments and numbers of zeros, in order; changed in place.
        item: `Segment`, or int, a number of zeros.
    """
    last = runs[-1] if runs else None
    if isinstance(item, int):
        if isinstance(last, int):
            runs[-1] = last + item
        elif item:
            runs.append(item)
    elif (
        isinstance(last, Segment)
        and last.index == item.index
        and last.stop == item.start
    ):
        runs[-1] = Segment(item.index, last.start, item.stop)
    else:
        runs.append(item)


def _pack(
    bucket: ShardBucket,
    owners: Sequence[int],
    tensors: Mapping[int, tf.Tensor],
    dtype: tf.DType,
) -> tf.Tensor:
    """Concatenate the padded rows of some owners of a bucket into one flat tensor.

    Args:
        bucket: `ShardBucket`.
        owners: Sequence of ints, indices of the rows.
        tensors: Dict from the position of a variable in the plan to its tensor; missing
            tensors count as zeros.
        dtype: `tf.DType` of the result.
    """
    runs: list[Segment | int] = []
    for owner in owners:
        for segment in bucket.rows[owner]:
            _append(runs, segment if segment.index in tensors else segment.size)
        _append(runs, bucket.padding(owner))
    parts = [
        tf.zeros([run], dtype)
        if isinstance(run, int)
        else tf.cast(elements_of(tensors[run.index], run), dtype)
        for run in runs
    ]
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis=0)
