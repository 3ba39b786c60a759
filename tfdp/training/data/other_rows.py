"""Parts of a batch that have another number of rows than its first part.

Such parts come from zipped datasets with different batch sizes, and from a `map` after
`batch` that merges rows, such as the graphs of message passing. Each part is divided
among the replicas by its own number of rows, and is whole in the program of a step.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdp.ground._compat import pipelines, tf_data
from tfdp.training.data.batch_sizes import batch_size_of, sizes_of_batches
from tfdp.training.data.rows import OtherRows, count_of, has_rows
from tfdp.training.data.stages import (
    BATCHES,
    MAPS,
    PASS_THROUGH,
    SELECTIONS,
    gathers_array_rows,
    is_row_by_row,
    rebuild_batch,
    rebuild_map,
)

_ROW_KEEPING_STAGES = {
    *(*PASS_THROUGH, *SELECTIONS, "ShuffleDataset", "CacheDataset", "SnapshotDataset"),
    "AssertCardinalityDataset",
}
# Stands for the row count of a part that comes from a `map`. A `map` may change the
# number of rows, so the count is known only after a batch has been read.
_UNKNOWN_ROWS = "unsure"


def indices_of_other_rows(dataset: tf.data.Dataset) -> frozenset[int]:
    """Return the indices of parts whose row counts may differ from the first part's.

    The stages of the dataset determine the counts. Where a `map` follows `batch`, a
    first batch is read without shuffling, unless an operation has state that this
    would change.

    Args:
        dataset: `tf.data.Dataset` of global batches.

    Returns:
        Frozenset of ints, indices of the flattened parts of a batch; of dense and
        ragged parts only.

    Example:

    >>> rows = tf.data.Dataset.range(8)
    >>> indices_of_other_rows(tf.data.Dataset.zip((rows.batch(2), rows.batch(4))))
    frozenset({1})
    """
    specs = tf.nest.flatten(dataset.element_spec)
    places = [i for i, spec in enumerate(specs) if has_rows(spec)]
    if len(places) < 2:
        return frozenset()
    known = {i: tf.TensorShape(specs[i].shape)[:1] for i in places}
    sizes = {i: shape[0] if shape.rank else None for i, shape in known.items()}
    stages = _rows_by_stages(dataset)
    first, *rest = places
    differs: dict[int, bool | None] = {}
    for i in rest:
        is_known = None not in (sizes[first], sizes[i])
        differs[i] = (
            sizes[first] != sizes[i]
            if is_known
            else _rows_may_differ(stages[first], stages[i])
        )
    if None in differs.values() and (counts := _rows_of_first_batch(dataset)):
        for i, may_differ in differs.items():
            differs[i] = (
                counts[first] != counts[i] if may_differ is None else may_differ
            )
    can_be_whole = (tf.TensorSpec, tf.RaggedTensorSpec)
    return frozenset(
        i
        for i, may_differ in differs.items()
        if may_differ and isinstance(specs[i], can_be_whole)
    )


def unwrap_other_rows(args: Any) -> tuple[Any, frozenset[int]]:
    """Replace each `OtherRows` in a nest of arguments by the tensor that it wraps.

    Returns:
        Tuple of the plain arguments, and the indices of the unwrapped parts among the
        flattened arguments.
    """
    mark = object()
    marked = keras.tree.traverse(
        lambda part: mark if isinstance(part, OtherRows) else None, args
    )
    places = frozenset(i for i, x in enumerate(tf.nest.flatten(marked)) if x is mark)
    if not places:
        return args, places
    plain = keras.tree.traverse(
        lambda part: part.rows if isinstance(part, OtherRows) else None, args
    )
    return plain, places


class _ZippedBatches(NamedTuple):
    """Description of a part's row count, for a part from one of the zipped datasets.

    Args:
        sizes: String, the batch sizes of that dataset as JSON, such as `{"size": 8}`.
            If its last batch is smaller, the string ends with the dataset's length, or
            with its index in the `zip` if its batches are shuffled. Parts with
            different strings may differ in row counts.
        rows: String or `_ZippedBatches`, the description of a part within the zipped
            dataset, as `_rows_by_stages` returns it for this dataset.
    """

    sizes: str
    rows: Any


def _rows_by_stages(dataset: tf.data.Dataset) -> list:
    """Describe what determines the row count of each part of a dataset's batch.

    A part is a tensor of the batch. Two parts with equal descriptions have the same row
    count in each batch, unless the description is `_UNKNOWN_ROWS`. `_rows_may_differ`
    compares them.

    Returns:
        List with a description for each part: `_UNKNOWN_ROWS` after a `map` that may
        change the number, a `_ZippedBatches` for a part of a `zip`, or otherwise a
        constant text, because all parts of the dataset have the same row count.
    """
    num_parts = len(tf.nest.flatten(dataset.element_spec))
    kind = tf_data.kind_of_stage(dataset)
    if kind == "ZipDataset":
        return _rows_of_zip(tf.nest.flatten(pipelines.zipped(dataset)))
    if kind in MAPS and not gathers_array_rows(dataset):
        if not is_row_by_row(dataset):
            return [_UNKNOWN_ROWS] * num_parts
        rows = _rows_by_stages(*tf_data.dataset_sources(dataset))
        return [rows[0] if len(set(rows)) == 1 else _UNKNOWN_ROWS] * num_parts
    if kind in _ROW_KEEPING_STAGES:
        return _rows_by_stages(*tf_data.dataset_sources(dataset))
    return ["of one dataset"] * num_parts


def _rows_of_zip(datasets: list[tf.data.Dataset]) -> list:
    """Describe the row count of each flattened part of zipped datasets.

    Args:
        datasets: List of the zipped datasets.

    Returns:
        List of a `_ZippedBatches` for each part: the batch sizes of its dataset, as far
        as known, and the description of the part within that dataset.
    """
    sizes = [sizes_of_batches(each) for each in datasets]
    # If the length of a dataset is unknown, so is the size of its last batch. Then only
    # the batch sizes of all datasets are compared.
    if None in sizes:
        sizes = [{"size": batch_size_of(each)} for each in datasets]
        if {"size": None} in sizes:
            sizes = [{}] * len(datasets)
    described: list = []
    for i, (each, sizes_of_one) in enumerate(zip(datasets, sizes, strict=True)):
        text = json.dumps(sizes_of_one)
        if "last" in text:
            # Zipped datasets have equal row counts only if their smaller last batches
            # coincide. So the description gets the length of the dataset, or if its
            # batches are shuffled the dataset's index, by which it equals no other.
            is_shuffled = "ShuffleDataset" in text
            text += f" {i}" if is_shuffled else f" of {int(each.cardinality())}"
        described += [_ZippedBatches(text, rows) for rows in _rows_by_stages(each)]
    return described


def _rows_may_differ(one: Any, other: Any) -> bool | None:
    """Return whether two parts of a batch may have different row counts.

    Args:
        one: Description of a part, as `_rows_by_stages` returns it.
        other: Description of the other part.

    Returns:
        Bool, or `None` if only reading a batch shows it.
    """
    if isinstance(one, _ZippedBatches) and isinstance(other, _ZippedBatches):
        return one.sizes != other.sizes or _rows_may_differ(one.rows, other.rows)
    return None if _UNKNOWN_ROWS in (one, other) else one != other


def _rows_of_first_batch(dataset: tf.data.Dataset) -> list[int | None] | None:
    """Read a batch, and count the rows of each flattened part.

    Returns:
        List of ints, `None` for a part without an axis of rows; or `None` if no batch
        can be read.
    """
    plain = _without_state(dataset)
    if plain is None:
        return None
    try:
        for batch in plain.take(1):
            return [
                int(count_of(part)) if has_rows(part) else None
                for part in tf.nest.flatten(batch)
            ]
    except tf.errors.OpError:
        pass  # The same error is raised again when the loop reads the data.
    return None


def _without_state(dataset: tf.data.Dataset) -> tf.data.Dataset | None:
    """Rebuild a dataset without shuffling and caching; `None` if it has other state.

    Reading the dataset itself would change its next shuffle order and its cache.
    """
    kind = tf_data.kind_of_stage(dataset)
    has_stages = kind in (*_ROW_KEEPING_STAGES, *MAPS, *BATCHES, "ZipDataset")
    if not has_stages or gathers_array_rows(dataset):
        parts = list(tf_data.dataset_inputs(dataset))
        is_shuffled = any("Shuffle" in tf_data.kind_of_stage(part) for part in parts)
        has_state = is_shuffled or any(map(pipelines.stateful_operation, parts))
        return None if has_state else dataset
    if kind == "ZipDataset":
        nest = pipelines.zipped(dataset)
        sources = [_without_state(each) for each in tf.nest.flatten(nest)]
        if None in sources:
            return None
        return tf.data.Dataset.zip(tf.nest.pack_sequence_as(nest, sources))
    source = _without_state(*tf_data.dataset_sources(dataset))
    if source is None or kind in _ROW_KEEPING_STAGES:
        return source
    if kind in BATCHES:
        size = tf_data.size_of_batch_stage(dataset)
        return None if size is None else rebuild_batch(dataset, source, size)
    if pipelines.stateful_operation(dataset):
        return None
    return rebuild_map(dataset, pipelines.function_of_map(dataset)).append_to(source)
