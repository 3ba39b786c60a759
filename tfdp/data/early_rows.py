"""Selection of a worker's rows before they are prepared.

Every worker reads the same elements, and takes its rows of each global batch. Where
`map` prepares each element by itself, the rows are taken from the raw elements: of N
workers each prepares an N-th of them, and not all.

    raw elements -> windows of a global batch -> this worker's elements of each
      -> the pipeline's `map` and `prefetch` -> batches of this worker's rows
      -> the rows of each replica, and the number of rows of the global batch

Rows, order and number of steps are those of `tfdp.data.rows.divide_batches`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfdp import _compat
from tfdp.data.raw_elements import (
    CHOOSE,
    MAPS,
    PASS_ON,
    Stage,
    elements_of,
    map_again,
    no_autograph,
    obstacle_of,
    obstacle_of_generator,
    obstacle_of_order,
    stage_again,
)
from tfdp.data.rows import Part, bounds_of_ranks, num_rows, rows_of_rank

BATCHES = ("BatchDataset", "ParallelBatchDataset")
# The function of Keras's `class_weight`, which treats each row of a batch by itself.
_OF_CLASS_WEIGHT = (
    "keras.src.trainers.data_adapters.tf_dataset_adapter.make_class_weight_map_fn."
)
# And that which reads the rows of arrays in files.
_OF_FILES = "tfdp.data.stored_rows."
ROW_BY_ROW = (_OF_CLASS_WEIGHT, _OF_FILES)
# That which gathers the rows of a batch from arrays.
_OF_ARRAYS = "keras.src.trainers.data_adapters.array_data_adapter.ArrayDataAdapter."


@dataclasses.dataclass
class Division:
    """Rows that were taken early.

    Args:
        dataset: `tf.data.Dataset` as `rows.divide_batches` returns it, or `None` where
            nothing is gained or it cannot be done.
        obstacle: String, what makes each worker prepare all rows, and what to do; empty
            if nothing does.
    """

    dataset: tf.data.Dataset | None = None
    obstacle: str = ""


def divide_early(
    batches: tf.data.Dataset, ranks: list[int], num_replicas: int
) -> Division:
    """Divide global batches among ranks before their rows are prepared.

    Args:
        batches: `tf.data.Dataset` of global batches.
        ranks: List of ints, consecutive.
        num_replicas: Int, on all workers.
    """
    if _compat.is_unordered(batches):
        return Division(obstacle=obstacle_of_order(batches))
    after: list[Stage] = []
    stage = batches
    while _compat.kind_of_part(stage) not in BATCHES:
        if is_of_arrays(stage):
            return Division(_divided_arrays(stage, after, ranks, num_replicas))
        again = stage_of_batches(stage)
        if again is None:
            return Division(obstacle=obstacle_of(stage))
        after.insert(0, again)
        (stage,) = _compat.dataset_sources(stage)
    if any(name == "GeneratorDataset" for name, _ in _compat.operations_in(stage)):
        return Division(obstacle=obstacle_of_generator(stage))
    own, static, obstacle = _own_batches(stage, ranks, num_replicas)
    if own is None:
        return Division(obstacle=obstacle)
    for each in after:
        own = each(own)
    # `batch` has made their memory.
    own = divide_rows(own, ranks, num_replicas, static, is_shared=False)
    length = int(batches.cardinality())
    if length != tf.data.UNKNOWN_CARDINALITY:
        own = own.apply(tf.data.experimental.assert_cardinality(length))
    return Division(own.with_options(batches.options()), obstacle)


def is_of_arrays(stage: tf.data.Dataset) -> bool:
    """Return whether a stage is Keras's `map` that gathers rows of arrays."""
    is_map = _compat.kind_of_part(stage) in MAPS
    return is_map and _compat.name_of_map(stage).startswith(_OF_ARRAYS)


def _divided_arrays(
    stage: tf.data.Dataset, after: list[Stage], ranks: list[int], num_replicas: int
) -> tf.data.Dataset:
    """Gather the rows of these ranks only of the arrays that `fit` was given."""
    gather = _compat.python_function_of_map(stage)

    @no_autograph
    def divide(indices: tf.Tensor, arrays: Any) -> Any:
        own = [rows_of_rank(indices, rank, num_replicas) for rank in ranks]
        parts = tuple(gather((rows, arrays)) for rows in own)
        return parts, tf.raw_ops.DeepCopy(x=num_rows(indices))

    (source,) = _compat.dataset_sources(stage)
    divided = source.map(divide, num_parallel_calls=_compat.parallelism_of(stage))
    for each in after:
        divided = _of_each_part(each)(divided)
    return divided.with_options(stage.options())


def _of_each_part(stage: Stage) -> Stage:
    """A stage that treats the rows of each replica, if it looks into batches."""
    call = stage.call
    if call is None:
        return stage
    return Stage(stage.apply, lambda parts: tuple(map(call, parts)))


def _own_batches(
    stage: tf.data.Dataset, ranks: list[int], num_replicas: int
) -> tuple[tf.data.Dataset | None, int | None, str]:
    """Prepare this worker's rows only of the batches of a `batch`.

    Returns:
        `tf.data.Dataset` of pairs, this worker's rows of a batch and the number of all,
        or `None` if nothing is gained; the rows of each batch if they are known; and
        what makes each worker prepare all rows, if anything does.
    """
    elements = elements_of(*_compat.dataset_sources(stage))
    size = _compat.size_of_batch_stage(stage)
    if size is None or not elements.stages or _holds_none(elements.raw):
        return None, None, elements.obstacle
    drops = _compat.drops_remainder(stage)
    own = _own_elements(elements.raw, size, ranks, num_replicas, drops=drops)
    for each in elements.stages:
        own = each(own)
    begin, end = bounds_of_ranks(size, ranks, num_replicas)
    own = own.batch(
        int(end - begin),
        drop_remainder=drops,
        num_parallel_calls=_compat.parallelism_of(stage),
    )
    own = own.map(no_autograph(lambda rows, totals: (rows, totals[0])))
    return own, size if drops else None, elements.obstacle


def _holds_none(dataset: tf.data.Dataset) -> bool:
    """Return whether elements hold a `None`, of which there are no windows."""
    specs = tf.nest.flatten(dataset.element_spec)
    return any(isinstance(spec, _compat.NoneTensorSpec) for spec in specs)


def _own_elements(
    raw: tf.data.Dataset,
    size: int,
    ranks: list[int],
    num_replicas: int,
    *,
    drops: bool,
) -> tf.data.Dataset:
    """Take this worker's elements of each global batch.

    Returns:
        `tf.data.Dataset` of pairs: an element, and the number of rows of its batch. Of
        a batch in which this worker has no row it has one all the same, so that it
        has as many batches as the others.
    """
    is_tuple = type(raw.element_spec) is tuple

    @no_autograph
    def take(*windows: Any) -> tf.data.Dataset:
        window = windows if is_tuple else windows[0]
        total = tf.nest.flatten(window)[0].cardinality()
        begin, end = bounds_of_ranks(total, ranks, num_replicas)
        begin, size = tf.minimum(begin, total - 1), tf.maximum(end - begin, 1)
        own = tf.nest.map_structure(lambda part: part.skip(begin).take(size), window)
        totals = tf.data.Dataset.from_tensors(total).repeat()
        return tf.data.Dataset.zip((tf.data.Dataset.zip(own), totals))

    return raw.window(size, drop_remainder=drops).flat_map(take)


def divide_rows(
    batches: tf.data.Dataset,
    ranks: list[int],
    num_replicas: int,
    static: int | None = None,
    *,
    is_shared: bool = True,
) -> tf.data.Dataset:
    """Divide this worker's rows of each batch among its replicas.

    Args:
        batches: `tf.data.Dataset` of pairs: a nest of this worker's rows, of which
            there is one even where it has none, and the number of all, int64.
        ranks: List of ints, consecutive.
        num_replicas: Int, on all workers.
        static: Int, the number of all rows if each batch has as many, or `None`.
            Defaults to `None`.
        is_shared: Bool, see `Part`. Defaults to `True`.

    Returns:
        `tf.data.Dataset` as `rows.divide_batches` returns it.
    """

    @no_autograph
    def divide(rows: Any, total: tf.Tensor) -> Any:
        part = Part(total, static, ranks[0], is_shared)
        parts = tuple(rows_of_rank(rows, rank, num_replicas, part) for rank in ranks)
        # As in `divide_batches`.
        return parts, tf.raw_ops.DeepCopy(x=tf.cast(total, tf.float32))

    return batches.map(divide)


def stage_of_batches(dataset: tf.data.Dataset) -> Stage | None:
    """A stage after `batch` that does not look into batches, or only row by row."""
    kind = _compat.kind_of_part(dataset)
    if kind in (*PASS_ON, *CHOOSE):
        return stage_again(dataset)
    if kind in MAPS and _compat.name_of_map(dataset).startswith(ROW_BY_ROW):
        # The function as it was traced may be for batches of a fixed size.
        return map_again(dataset, _compat.python_function_of_map(dataset))
    return None
