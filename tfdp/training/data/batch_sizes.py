"""Sizes of a dataset's batches, as far as they are known before the data is read."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.ground._compat import tf_data
from tfdp.ground.text import pluralize
from tfdp.training.data.stages import MAPS, PASS_THROUGH, SELECTIONS

# Known batch sizes stay known after the stages of these two sets: the first keep the
# size of each batch, and the second select or order batches by settings that workers
# compare. Any other stage may change the sizes, so after it they count as unknown.
_SIZE_KEEPING_STAGES = {
    *(*MAPS, *PASS_THROUGH, "CacheDataset", "AssertCardinalityDataset"),
    *("ParseExampleDataset", "SnapshotDataset"),
}
_SELECTION_STAGES = {
    *(*SELECTIONS, "ShuffleDataset", "ShardDataset", "ConcatenateDataset", "ZipDataset")
}


def batch_size_of(dataset: tf.data.Dataset) -> int | None:
    """Return the number of rows of a dataset's batches, or `None` if it is unknown."""
    found = _size_in_spec(dataset) or tf_data.dataset_batch_size(dataset)
    return found if found > 0 else None


def sizes_of_batches(dataset: tf.data.Dataset) -> dict[str, Any] | None:
    """Describe the number of rows of every batch of a dataset.

    No data is read: the sizes follow from static shapes, or from a `batch` stage whose
    number of input rows is known. If the results of two workers are equal, batch i has
    the same number of rows on both, unless a `map` after `batch` removes rows.

    Args:
        dataset: `tf.data.Dataset` of batches.

    Returns:
        Dict that workers can send as JSON and compare, or `None` if sizes are unknown.

    Example:

    >>> sizes_of_batches(tf.data.Dataset.range(21).batch(8))
    {'size': 8, 'last': 5}
    """
    if size := _size_in_spec(dataset):
        return {"size": size}
    num_batches = _length(dataset)
    if num_batches == tf.data.UNKNOWN_CARDINALITY:
        return None
    sources = tf_data.dataset_sources(dataset)
    if batch_size := tf_data.size_of_batch_stage(dataset):
        return _sizes_of_batch_stage(_length(sources[0]), batch_size)
    kind = tf_data.kind_of_stage(dataset)
    if kind not in _SIZE_KEEPING_STAGES | _SELECTION_STAGES:
        return None
    parts = [part for source in sources if (part := sizes_of_batches(source))]
    if len(parts) < len(sources):
        return None
    first, is_one = parts[0], len(parts) == 1
    if kind in _SIZE_KEEPING_STAGES or (is_one and first.keys() == {"size"}):
        return first
    lengths = [_length(source) for source in sources]
    if kind == "TakeDataset" and "last" in first and num_batches < lengths[0]:
        return {"size": first["size"]}
    of = [
        part | {"batches": length} for part, length in zip(parts, lengths, strict=True)
    ]
    return {"by": kind, "of": of}


def describe_sizes(sizes: dict[str, Any]) -> str:
    """Describe the sizes of batches for a message.

    Args:
        sizes: Dict, as `sizes_of_batches` returns it.

    Example:

    >>> describe_sizes({"size": 8, "last": 5})
    'batches of 8 rows and a last one of 5'
    """
    if "of" in sizes:
        parts = [f"{describe_sizes(p)} ({p['batches']} in all)" for p in sizes["of"]]
        return f"a {sizes['by']} of {' and '.join(parts)}"
    last = f" and a last one of {sizes['last']}" if "last" in sizes else ""
    return f"batches of {pluralize(sizes['size'], 'row')}{last}"


def _sizes_of_batch_stage(num_rows: int, size: int) -> dict[str, Any] | None:
    """Return the sizes of the batches of a `batch` stage, see `sizes_of_batches`.

    Args:
        num_rows: Int, cardinality of the stage's input; negative if infinite or
            unknown.
        size: Int, the batch size.

    Returns:
        Dict such as `{"size": 8, "last": 5}`, or `None` if `num_rows` is unknown.
    """
    if num_rows == tf.data.UNKNOWN_CARDINALITY:
        return None
    is_whole = num_rows == tf.data.INFINITE_CARDINALITY or num_rows % size == 0
    return {"size": size} | ({} if is_whole else {"last": num_rows % size})


def _length(dataset: tf.data.Dataset) -> int:
    """Return a dataset's number of elements; negative if infinite or unknown."""
    return int(dataset.cardinality().numpy())


def _size_in_spec(dataset: tf.data.Dataset) -> int:
    """Return the batch size in a dataset's static shapes; 0 if none or ambiguous."""
    sizes = {
        spec.shape[0]
        for spec in tf.nest.flatten(dataset.element_spec)
        if isinstance(spec, tf.TensorSpec) and spec.shape.rank
    }
    known = sizes - {None}
    return known.pop() if len(known) == 1 else 0
