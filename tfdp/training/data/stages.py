"""Stages of a tf.data pipeline: found from its end backwards, and rebuilt elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.ground._compat import pipelines, tf_data

MAPS = ("MapDataset", "ParallelMapDataset")
BATCHES = ("BatchDataset", "ParallelBatchDataset")
# Stages that pass elements through unchanged, and stages that select or repeat elements
# without reading their values. `cache` is not listed: the user's cache is filled once
# for all calls of `fit`, but a rebuilt `cache` would be filled again in each call.
PASS_THROUGH = ("PrefetchDataset", "OptionsDataset")
SELECTIONS = ("TakeDataset", "SkipDataset", "RepeatDataset")
# The function of a `map` identifies the stage: this prefix of its qualified name marks
# the `map` by which tfdp reads rows of arrays in files.
_STORED_ARRAYS = "tfdp.training.data.own_rows.StoredArraysAdapter."


@dataclasses.dataclass
class Stage:
    """A `tf.data` stage (map, selection or prefetch) to append to another pipeline.

    Args:
        build: Function that appends the stage to a dataset. Its arguments are the
            dataset and the function to map, which only a `map` uses.
        call: Function of an element, for a `map`; `None` for other stages. Defaults to
            `None`.
    """

    build: Callable[[tf.data.Dataset, Any], tf.data.Dataset]
    call: Any = None

    def append_to(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Append the stage to a dataset of elements."""
        return self.build(dataset, as_map_function(dataset, self.call))

    def append_to_pairs(self, pairs: tf.data.Dataset) -> tf.data.Dataset:
        """Append the stage to pairs of an element and its global batch's row count."""
        call = no_autograph(lambda element, total: (self.call(element), total))
        return self.build(pairs, call)

    def append_to_parts(self, divided: tf.data.Dataset) -> tf.data.Dataset:
        """Append the stage to pairs of a tuple and the row count of its global batch.

        The tuple has an element for each local replica, and a `map` applies to each.
        """
        each = Stage(self.build, lambda parts: tuple(map(self.call, parts)))
        return each.append_to_pairs(divided)


def stages_after_batch(
    dataset: tf.data.Dataset,
) -> tuple[tf.data.Dataset, list[Stage]]:
    """Find the stages after `batch` that can also run on a part of a batch's rows.

    Returns:
        Pair of the dataset that the stages follow, which ends in `batch`, in Keras's
        gathering of arrays, or in any stage that reads whole batches; and the list of
        stages, in order.
    """
    after: list[Stage] = []
    while True:
        kind = tf_data.kind_of_stage(dataset)
        if kind in (*PASS_THROUGH, *SELECTIONS):
            after.insert(0, rebuild_stage(dataset))
        elif is_row_by_row(dataset):
            # The traced function of the `map` may have a fixed batch size. So its
            # Python function is traced again, with the sizes of the rebuilt pipeline.
            call = pipelines.python_function_of_map(dataset)
            after.insert(0, rebuild_map(dataset, call))
        else:
            return dataset, after
        (dataset,) = tf_data.dataset_sources(dataset)


def is_row_by_row(dataset: tf.data.Dataset) -> bool:
    """Return whether the last stage is a `map` that treats each row separately.

    These are Keras's `map` for `class_weight`, and tfdp's for arrays in files.
    """
    return tf_data.kind_of_stage(dataset) in MAPS and (
        pipelines.applies_class_weight(dataset)
        or pipelines.name_of_map(dataset).startswith(_STORED_ARRAYS)
    )


def gathers_array_rows(dataset: tf.data.Dataset) -> bool:
    """Return whether the last stage is Keras's `map` that gathers rows of arrays."""
    return tf_data.kind_of_stage(dataset) in MAPS and pipelines.gathers_rows(dataset)


def rebuild_map(dataset: tf.data.Dataset, call: Callable[[Any], Any]) -> Stage:
    """Return a `Stage` that maps `call`, as parallel as the last `map` of a dataset."""
    parallel = pipelines.parallelism_of(dataset)
    return Stage(lambda rows, call: rows.map(call, num_parallel_calls=parallel), call)


def rebuild_stage(dataset: tf.data.Dataset) -> Stage:
    """Return a `Stage` like the last stage of a dataset, to append elsewhere.

    The stage must be one of `PASS_THROUGH` and `SELECTIONS`.
    """
    kind = tf_data.kind_of_stage(dataset)
    # Callers set the options of the whole rebuilt pipeline, so this stage adds none.
    if kind == "OptionsDataset":
        return Stage(lambda rows, _: rows)
    is_prefetch = kind == "PrefetchDataset"
    value_of = pipelines.buffer_size_of if is_prefetch else pipelines.count_of_stage
    method, value = kind.removesuffix("Dataset").lower(), value_of(dataset)
    return Stage(lambda rows, _: getattr(rows, method)(value))


def rebuild_batch(
    dataset: tf.data.Dataset, rows: tf.data.Dataset, size: int
) -> tf.data.Dataset:
    """Batch rows by a size, with the other settings of a dataset's last `batch`."""
    return rows.batch(
        size,
        drop_remainder=pipelines.drops_remainder(dataset),
        num_parallel_calls=pipelines.parallelism_of(dataset),
    )


def restart_shuffles(
    dataset: tf.data.Dataset, restarted: dict[int, tf.data.Dataset] | None = None
) -> tf.data.Dataset | None:
    """Rebuild a dataset so that its shuffles draw their seeds from the beginning.

    A shuffle with a new order in each iteration continues its sequence of seeds for as
    long as the dataset exists.

    Args:
        dataset: `tf.data.Dataset`.
        restarted: Dict from the `id` of a shuffle to the one that replaces it, for
            datasets that share shuffles and so their seeds. Defaults to none.

    Returns:
        `tf.data.Dataset`, the same one if it has no such shuffle; or `None` if a stage
        after a shuffle cannot be rebuilt.
    """
    if not tf_data.reshuffles(dataset):
        return dataset
    sources = tf_data.dataset_sources(dataset)
    restarted = {} if restarted is None else restarted
    if id(dataset) in restarted:
        return restarted[id(dataset)]
    source = restart_shuffles(sources[0], restarted) if len(sources) == 1 else None
    kind = tf_data.kind_of_stage(dataset)
    if source is None:
        return None
    if kind == "OptionsDataset":
        return source.with_options(dataset.options())
    if kind == "ShuffleDataset":
        restarted[id(dataset)] = tf_data.shuffle_alike(dataset, source)
        return restarted[id(dataset)]
    if kind in MAPS:
        rebuilt = rebuild_map(dataset, pipelines.function_of_map(dataset))
        return rebuilt.append_to(source)
    if kind in BATCHES:
        size = tf_data.size_of_batch_stage(dataset)
        return None if size is None else rebuild_batch(dataset, source, size)
    if kind in (*PASS_THROUGH, *SELECTIONS):
        return rebuild_stage(dataset).append_to(source)
    return None


def no_autograph(function: Callable) -> Callable:
    """Return a function that AutoGraph leaves as it is; a conversion is slow."""
    return tf.autograph.experimental.do_not_convert(function)


def as_map_function(
    dataset: tf.data.Dataset, function: Callable[[Any], Any]
) -> Callable:
    """Adapt a function of an element to `dataset.map`, which unpacks tuple elements."""
    is_tuple = type(dataset.element_spec) is tuple
    return no_autograph(lambda *parts: function(parts if is_tuple else parts[0]))
