"""Stages of a pipeline of tf.data: found from its end on, and rebuilt elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.ground import _compat

MAPS = ("MapDataset", "ParallelMapDataset")
BATCHES = ("BatchDataset", "ParallelBatchDataset")
# Stages that pass elements on as they are; and that choose some, whatever they hold.
# Not `cache`: what the user's keeps lasts for all calls of `fit`, that of a copy not.
PASS_ON = ("PrefetchDataset", "OptionsDataset")
CHOOSE = ("TakeDataset", "SkipDataset", "RepeatDataset")
# The function of Keras's `class_weight`, and that which reads the rows of arrays in
# files: they treat each row of a batch by itself.
_ROW_BY_ROW = (
    "keras.src.trainers.data_adapters.tf_dataset_adapter.make_class_weight_map_fn.",
    "tfdp.training.data.own_rows.StoredArraysAdapter.",
)
# The function that gathers the rows of a batch from arrays.
_OF_ARRAYS = "keras.src.trainers.data_adapters.array_data_adapter.ArrayDataAdapter."


@dataclasses.dataclass
class Stage:
    """A stage that treats each element by itself, or only passes it on.

    Args:
        build: Function of the dataset to build it upon, and of a function for its
            elements, which only a `map` calls.
        call: Function of an element, of a `map`; otherwise `None`.
    """

    build: Callable[[tf.data.Dataset, Any], tf.data.Dataset]
    call: Any = None

    def on(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Rebuild it upon a dataset of such elements."""
        return self.build(dataset, of_element(dataset, self.call))

    def on_pairs(self, pairs: tf.data.Dataset) -> tf.data.Dataset:
        """Rebuild it upon pairs of an element and the rows of its global batch."""
        call = no_autograph(lambda element, total: (self.call(element), total))
        return self.build(pairs, call)

    def on_parts(self, divided: tf.data.Dataset) -> tf.data.Dataset:
        """Rebuild it upon such pairs, with an element for each local replica."""
        each = Stage(self.build, lambda parts: tuple(map(self.call, parts)))
        return each.on_pairs(divided)


def stages_after_batch(
    dataset: tf.data.Dataset,
) -> tuple[tf.data.Dataset, list[Stage]]:
    """Find the stages after `batch` that do not look into batches, or by rows only.

    Returns:
        Pair of the dataset that they follow, which ends in `batch`, or in the gathering
        of arrays, or in a stage of another kind; and the stages in their order.
    """
    after: list[Stage] = []
    while True:
        kind = _compat.kind_of_part(dataset)
        if kind in (*PASS_ON, *CHOOSE):
            after.insert(0, rebuild_stage(dataset))
        elif is_row_by_row(dataset):
            # The function as it was traced may be for batches of a fixed size.
            call = _compat.python_function_of_map(dataset)
            after.insert(0, rebuild_map(dataset, call))
        else:
            return dataset, after
        (dataset,) = _compat.dataset_sources(dataset)


def is_row_by_row(dataset: tf.data.Dataset) -> bool:
    """Return whether the last stage is a `map` over each row of a batch by itself."""
    return _is_map_of(dataset, _ROW_BY_ROW)


def is_of_arrays(dataset: tf.data.Dataset) -> bool:
    """Return whether the last stage is Keras's `map` that gathers rows of arrays."""
    return _is_map_of(dataset, _OF_ARRAYS)


def _is_map_of(dataset: tf.data.Dataset, names: str | tuple[str, ...]) -> bool:
    is_map = _compat.kind_of_part(dataset) in MAPS
    return is_map and _compat.name_of_map(dataset).startswith(names)


def rebuild_map(dataset: tf.data.Dataset, call: Callable[[Any], Any]) -> Stage:
    """Return the stage of a `map`, with its parallelism and the given function."""
    parallel = _compat.parallelism_of(dataset)
    return Stage(lambda rows, call: rows.map(call, num_parallel_calls=parallel), call)


def rebuild_stage(dataset: tf.data.Dataset) -> Stage:
    """Return a last stage that passes elements on or chooses some."""
    kind = _compat.kind_of_part(dataset)
    if kind == "OptionsDataset":  # those of the whole pipeline are set at its end
        return Stage(lambda rows, _: rows)
    is_prefetch = kind == "PrefetchDataset"
    value_of = _compat.buffer_size_of if is_prefetch else _compat.count_of_stage
    method, value = kind.removesuffix("Dataset").lower(), value_of(dataset)
    return Stage(lambda rows, _: getattr(rows, method)(value))


def rebuild_batch(
    dataset: tf.data.Dataset, rows: tf.data.Dataset, size: int
) -> tf.data.Dataset:
    """Batch rows by another size, with the settings of the `batch` of a dataset."""
    return rows.batch(
        size,
        drop_remainder=_compat.drops_remainder(dataset),
        num_parallel_calls=_compat.parallelism_of(dataset),
    )


def no_autograph(function: Callable) -> Callable:
    """Keep AutoGraph, which would take a second to find nothing, from a function."""
    return tf.autograph.experimental.do_not_convert(function)


def of_element(dataset: tf.data.Dataset, function: Callable[[Any], Any]) -> Callable:
    """Wrap a function of an element for `map`, which passes a tuple as arguments."""
    is_tuple = type(dataset.element_spec) is tuple
    return no_autograph(lambda *parts: function(parts if is_tuple else parts[0]))
