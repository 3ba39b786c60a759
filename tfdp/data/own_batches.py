"""Batches of data that a worker has for itself: its part of each global batch."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp import _compat
from tfdp.data.early_rows import BATCHES, stage_of_batches
from tfdp.data.raw_elements import Stage, no_autograph
from tfdp.data.rows import bounds_of_ranks


def own_batches(
    batches: tf.data.Dataset, ranks: list[int], num_replicas: int
) -> tf.data.Dataset | None:
    """Batch a worker's own rows by its part of a global batch, and not by all of it.

    So the workers' batches of a step are together one of the size that the user gave,
    and a worker holds no more rows than it needs.

    Args:
        batches: `tf.data.Dataset` of this worker's own rows, in global batches.
        ranks: List of ints, consecutive, those of this worker.
        num_replicas: Int, on all workers.

    Returns:
        `tf.data.Dataset`, or `None` where the pipeline does not end in `batch`, or in
        stages after it that do not look into batches.

    Example:

    >>> rows = tf.data.Dataset.range(5).batch(4).take(2)
    >>> [rows.tolist() for rows in own_batches(rows, [0, 1], 4).as_numpy_iterator()]
    [[0, 1], [2, 3]]
    """
    after: list[Stage] = []
    stage = batches
    while _compat.kind_of_part(stage) not in BATCHES:
        again = stage_of_batches(stage)
        if again is None:
            return None
        after.insert(0, again)
        (stage,) = _compat.dataset_sources(stage)
    size = _compat.size_of_batch_stage(stage)
    if size is None:
        return None
    begin, end = bounds_of_ranks(size, ranks, num_replicas)
    (rows,) = _compat.dataset_sources(stage)
    own = rows.batch(
        int(end - begin),
        drop_remainder=_compat.drops_remainder(stage),
        num_parallel_calls=_compat.parallelism_of(stage),
    )
    for each in after:
        own = _applied(each, own)
    return own.with_options(batches.options())


def _applied(stage: Stage, batches: tf.data.Dataset) -> tf.data.Dataset:
    """Apply a stage to batches themselves."""
    call = stage.call
    if call is None:
        return stage.apply(batches)
    is_tuple = type(batches.element_spec) is tuple

    @no_autograph
    def of_batch(*parts: Any) -> Any:
        return call(parts if is_tuple else parts[0])

    return stage.apply(batches, of_batch)
