"""Parts of a batch that have another number of rows than its first part.

Two datasets of other batch sizes that are zipped have such parts, and so has a `map`
after `batch` that merges rows, such as the graphs of message passing. Each part is
divided by itself among the replicas, and is whole in the program of a step.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdp.ground import _compat
from tfdp.training.data.batch_sizes import batch_size_of, sizes_of_batches
from tfdp.training.data.rows import OtherRows, count_of, has_rows
from tfdp.training.data.stages import (
    BATCHES,
    CHOOSE,
    MAPS,
    PASS_ON,
    is_of_arrays,
    is_row_by_row,
    rebuild_batch,
    rebuild_map,
)

_KEEP_ROWS = {
    *(*PASS_ON, *CHOOSE, "ShuffleDataset", "CacheDataset", "SnapshotDataset"),
    "AssertCardinalityDataset",
}
# The rows of what a `map` returns, which only a batch shows.
_UNSURE = "unsure"


def places_of_others(dataset: tf.data.Dataset) -> frozenset[int]:
    """Return the places of the parts that may have other rows than the first one.

    The stages of the dataset tell it. Where a `map` follows `batch`, a first batch
    does, which is read without shuffling, if no operation has a state that this would
    change.

    Args:
        dataset: `tf.data.Dataset` of global batches.

    Returns:
        Frozenset of ints, places among the flat parts.

    Example:

    >>> rows = tf.data.Dataset.range(8)
    >>> places_of_others(tf.data.Dataset.zip((rows.batch(2), rows.batch(4))))
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
    differ: dict[int, bool | None] = {}
    for i in rest:
        is_known = None not in (sizes[first], sizes[i])
        differ[i] = (
            sizes[first] != sizes[i] if is_known else _differ(stages[first], stages[i])
        )
    if None in differ.values() and (counts := _rows_of_first_batch(dataset)):
        for i, found in differ.items():
            differ[i] = counts[first] != counts[i] if found is None else found
    can_be_whole = (tf.TensorSpec, tf.RaggedTensorSpec)
    return frozenset(
        i for i, found in differ.items() if found and isinstance(specs[i], can_be_whole)
    )


def without_marks(args: Any) -> tuple[Any, frozenset[int]]:
    """Return arguments without `OtherRows`, and the flat places where they were."""
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


class _Batches(NamedTuple):
    """Rows of the batches of a dataset that is zipped, as far as they are known."""

    sizes: str
    rows: Any


def _rows_by_stages(dataset: tf.data.Dataset) -> list:
    """Return for each flat part what tells its rows, to be compared by `_differ`."""
    num_parts = len(tf.nest.flatten(dataset.element_spec))
    kind = _compat.kind_of_part(dataset)
    if kind == "ZipDataset":
        return _rows_of_zip(tf.nest.flatten(_compat.zipped(dataset)))
    if kind in MAPS and not is_of_arrays(dataset):
        if not is_row_by_row(dataset):
            return [_UNSURE] * num_parts
        found = _rows_by_stages(*_compat.dataset_sources(dataset))
        return [found[0] if len(set(found)) == 1 else _UNSURE] * num_parts
    if kind in _KEEP_ROWS:
        return _rows_by_stages(*_compat.dataset_sources(dataset))
    return ["of one dataset"] * num_parts


def _rows_of_zip(datasets: list[tf.data.Dataset]) -> list:
    sizes = [sizes_of_batches(each) for each in datasets]
    if None in sizes:  # of one of which the length is not known
        sizes = [{"size": batch_size_of(each)} for each in datasets]
        if {"size": None} in sizes:
            sizes = [{}] * len(datasets)
    found: list = []
    for i, (each, own) in enumerate(zip(datasets, sizes, strict=True)):
        text = json.dumps(own)
        if "last" in text:  # which comes at one place, or anywhere
            is_shuffled = "ShuffleDataset" in text
            text += f" {i}" if is_shuffled else f" of {int(each.cardinality())}"
        found += [_Batches(text, rows) for rows in _rows_by_stages(each)]
    return found


def _differ(one: Any, other: Any) -> bool | None:
    """Return whether parts may have other numbers of rows, or `None`: not known."""
    if isinstance(one, _Batches) and isinstance(other, _Batches):
        return one.sizes != other.sizes or _differ(one.rows, other.rows)
    return None if _UNSURE in (one, other) else one != other


def _rows_of_first_batch(dataset: tf.data.Dataset) -> list[int | None] | None:
    """Count the rows of each flat part of a batch, or `None` if none can be read."""
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
        pass  # It is raised where the data is read.
    return None


def _without_state(dataset: tf.data.Dataset) -> tf.data.Dataset | None:
    """Return a dataset of the same batches in another order, which may be read again.

    To read a dataset itself would change its next order, and what it caches.
    """
    kind = _compat.kind_of_part(dataset)
    has_stages = kind in (*_KEEP_ROWS, *MAPS, *BATCHES, "ZipDataset")
    if not has_stages or is_of_arrays(dataset):
        parts = list(_compat.dataset_inputs(dataset))
        is_shuffled = any("Shuffle" in _compat.kind_of_part(part) for part in parts)
        has_state = is_shuffled or any(map(_compat.stateful_operation, parts))
        return None if has_state else dataset
    if kind == "ZipDataset":
        nest = _compat.zipped(dataset)
        sources = [_without_state(each) for each in tf.nest.flatten(nest)]
        if None in sources:
            return None
        return tf.data.Dataset.zip(tf.nest.pack_sequence_as(nest, sources))
    source = _without_state(*_compat.dataset_sources(dataset))
    if source is None or kind in _KEEP_ROWS:
        return source
    if kind in BATCHES:
        size = _compat.size_of_batch_stage(dataset)
        return None if size is None else rebuild_batch(dataset, source, size)
    if _compat.stateful_operation(dataset):
        return None
    return rebuild_map(dataset, _compat.function_of_map(dataset)).on(source)
