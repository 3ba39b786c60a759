"""Selection of a worker's rows before they are prepared.

Every worker reads the same elements, and takes its rows of each global batch. If `map`
prepares elements one by one, the rows are taken from the raw elements, so that each of
N workers prepares an N-th of the elements, and not all.

    raw elements -> windows of a global batch -> this worker's elements of each
      -> the pipeline's `map` and `prefetch` -> batches of this worker's rows
      -> the rows of each replica, and the number of rows of the global batch

Rows, order and number of steps are those of `tfdp.training.data.rows.divide_batches`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp.ground._compat import pipelines, tf_data
from tfdp.training.data.determinism import RANDOM_OPS
from tfdp.training.data.rows import (
    LocalRowRange,
    bounds_of_ranks,
    num_rows,
    rows_of_rank,
    rows_of_worker,
)
from tfdp.training.data.stages import (
    BATCHES,
    MAPS,
    PASS_THROUGH,
    SELECTIONS,
    Stage,
    as_map_function,
    gathers_array_rows,
    no_autograph,
    rebuild_batch,
    rebuild_map,
    rebuild_stage,
    stages_after_batch,
)

_STATELESS_RANDOM = (
    "`tf.random.stateless_uniform` and its like, seeded by the element's index"
)
# A `map` with a stateful operation cannot run for a worker's own rows only, because its
# results may depend on earlier rows. A warning names the remedy for each operation.
_ADVICE = {
    "PyFunc": "give `tf.numpy_function` `stateful=False` if its function is pure",
    "EagerPyFunc": "use `tf.numpy_function` with `stateful=False` if it is pure",
    **dict.fromkeys(RANDOM_OPS, f"use {_STATELESS_RANDOM}"),
}
_PURE_ADVICE = "it must return the same result for an element on every worker"
_BEFORE_BATCH_ADVICE = "put it before `batch` if it treats each element by itself"
_AFTER_ADVICE = "put `map` after it, if that gives the same elements"
_UNORDERED_REASON = (
    "with `deterministic=False` its elements come in any order; remove that"
)
_GENERATOR_REASON = (
    "it draws from a Python generator; make a dataset of indices or names instead, and "
    "load in a `map`"
)
_CACHE_REASON = (
    "its `map` is before `cache`, which keeps all rows; put `cache` before `map`, or "
    "remove it, if preparing only the worker's own rows in each pass costs less"
)
# Warnings name a stage as users call it: an underscore at each inner capital letter
# turns the class name `GroupByWindow` into `group_by_window`.
_INNER_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")


@dataclasses.dataclass
class Division:
    """Result of dividing a dataset before `map` prepares its rows.

    Args:
        dataset: `tf.data.Dataset` of pairs: a tuple with the rows of each rank, and the
            number of rows of the global batch. `None`, the default, if the division is
            impossible or saves nothing.
        obstacle: String, why each worker prepares all rows, and the remedy; empty if
            it does not. Defaults to `""`.
    """

    dataset: tf.data.Dataset | None = None
    obstacle: str = ""


@dataclasses.dataclass
class Elements:
    """A pipeline before `batch`: raw elements, and stages that treat them one by one.

    Args:
        raw: `tf.data.Dataset` of the raw elements.
        stages: List of `Stage`, to append to `raw`. Defaults to an empty list.
        obstacle: String, why a `map` is part of `raw`; empty if none is. Defaults to
            `""`.
    """

    raw: tf.data.Dataset
    stages: list[Stage] = dataclasses.field(default_factory=list)
    obstacle: str = ""


def divide_early(
    batches: tf.data.Dataset, ranks: list[int], num_replicas: int
) -> Division:
    """Divide global batches among ranks before `map` prepares their rows.

    Args:
        batches: `tf.data.Dataset` of global batches.
        ranks: List of consecutive ints, the replicas whose rows the result has.
        num_replicas: Int, number of replicas on all workers.

    Returns:
        `Division`: its `dataset` has the rows of `ranks`; its `obstacle` says why each
        worker prepares all rows, if it does.
    """
    if tf_data.is_unordered(batches):
        return Division(obstacle=why_not_split_early(batches, _UNORDERED_REASON))
    stage, after = stages_after_batch(batches)
    if gathers_array_rows(stage):
        return Division(_divide_arrays(stage, after, ranks, num_replicas))
    if tf_data.kind_of_stage(stage) not in BATCHES:
        return Division(obstacle=why_not_split_early(stage))
    if tf_data.has_generator(stage):
        return Division(obstacle=why_not_split_early(stage, _GENERATOR_REASON))
    local_rows, static, obstacle = _batch_local_rows(stage, ranks, num_replicas)
    if local_rows is None:
        return Division(obstacle=obstacle)
    for each in after:
        local_rows = each.append_to_pairs(local_rows)
    # `batch` has allocated the rows, so they share no memory with the user's arrays and
    # need no copy.
    local_rows = divide_local_rows(
        local_rows, ranks, num_replicas, static, is_shared=False
    )
    length = int(batches.cardinality())
    if length != tf.data.UNKNOWN_CARDINALITY:
        local_rows = local_rows.apply(tf.data.experimental.assert_cardinality(length))
    return Division(local_rows.with_options(batches.options()), obstacle)


def _divide_arrays(
    stage: tf.data.Dataset, after: list[Stage], ranks: list[int], num_replicas: int
) -> tf.data.Dataset:
    """Gather only the rows of these ranks from the arrays passed to `fit`.

    Args:
        stage: `tf.data.Dataset` that ends in Keras's gathering of array rows.
        after: List of `Stage`, those of the pipeline after `stage`, which are appended
            to the result again.
        ranks: List of consecutive ints, the ranks of this worker's replicas.
        num_replicas: Int, number of replicas on all workers.

    Returns:
        `tf.data.Dataset` of pairs: a tuple with the rows of each rank, and the number
        of rows of the global batch.
    """
    gather = pipelines.python_function_of_map(stage)

    @no_autograph
    def divide(indices: tf.Tensor, arrays: Any) -> Any:
        """Return a tuple of each rank's rows of a batch, and the batch's row count.

        `indices` are the numbers of the batch's rows in `arrays`.
        """
        indices_by_rank = [rows_of_rank(indices, rank, num_replicas) for rank in ranks]
        parts = tuple(gather((rows, arrays)) for rows in indices_by_rank)
        return parts, tf.raw_ops.DeepCopy(x=num_rows(indices))

    (source,) = tf_data.dataset_sources(stage)
    divided = source.map(divide, num_parallel_calls=pipelines.parallelism_of(stage))
    for each in after:
        divided = each.append_to_parts(divided)
    return divided.with_options(stage.options())


def _batch_local_rows(
    stage: tf.data.Dataset, ranks: list[int], num_replicas: int
) -> tuple[tf.data.Dataset | None, int | None, str]:
    """Rebuild a pipeline that ends in `batch`, to prepare a worker's rows only.

    Args:
        stage: `tf.data.Dataset` that ends in `batch`.
        ranks: List of consecutive ints, the ranks of this worker's replicas.
        num_replicas: Int, number of replicas on all workers.

    Returns:
        Tuple of three items: a `tf.data.Dataset` of pairs, this worker's rows of a
        batch and the number of all its rows, or `None` if no stage before `batch` can
        be limited to this worker's rows; the number of rows of every global batch, or
        `None` if the last one may be smaller; and a string, why each worker prepares
        all rows, or `""`.
    """
    elements = elements_of(*tf_data.dataset_sources(stage))
    size = tf_data.size_of_batch_stage(stage)
    if size is None or not elements.stages or _contains_none(elements.raw):
        return None, None, elements.obstacle
    drops = pipelines.drops_remainder(stage)
    local_rows = _local_elements(elements.raw, size, ranks, num_replicas, drops=drops)
    for each in elements.stages:
        local_rows = each.append_to_pairs(local_rows)
    local_rows = rebuild_batch(
        stage, local_rows, len(rows_of_worker(size, ranks, num_replicas))
    )
    local_rows = local_rows.map(no_autograph(lambda rows, totals: (rows, totals[0])))
    return local_rows, size if drops else None, elements.obstacle


def _contains_none(dataset: tf.data.Dataset) -> bool:
    """Return whether an element's spec contains a `None`, which `window` rejects."""
    specs = tf.nest.flatten(dataset.element_spec)
    return any(isinstance(spec, tf_data.NoneTensorSpec) for spec in specs)


def _local_elements(
    raw: tf.data.Dataset,
    size: int,
    ranks: list[int],
    num_replicas: int,
    *,
    drops: bool,
) -> tf.data.Dataset:
    """Take this worker's elements of each global batch.

    Args:
        raw: `tf.data.Dataset` of single elements.
        size: Int, number of rows of a global batch.
        ranks: List of consecutive ints, the ranks of this worker's replicas.
        num_replicas: Int, number of replicas on all workers.
        drops: Bool, whether a smaller last batch is dropped.

    Returns:
        `tf.data.Dataset` of pairs: an element, and the number of rows of its batch. A
        worker without rows in a batch takes one element, so that all workers have the
        same number of batches.
    """

    def take(window: Any) -> tf.data.Dataset:
        """Return this worker's elements of a global batch, each with the batch's size.

        `window` is a nest of datasets, which hold the parts of the batch's elements.
        """
        total = tf.nest.flatten(window)[0].cardinality()
        begin, end = bounds_of_ranks(total, ranks, num_replicas)
        begin, size = tf.minimum(begin, total - 1), tf.maximum(end - begin, 1)
        own = tf.nest.map_structure(lambda part: part.skip(begin).take(size), window)
        totals = tf.data.Dataset.from_tensors(total).repeat()
        return tf.data.Dataset.zip((tf.data.Dataset.zip(own), totals))

    windows = raw.window(size, drop_remainder=drops)
    return windows.flat_map(as_map_function(raw, take))


def divide_local_rows(
    batches: tf.data.Dataset,
    ranks: list[int],
    num_replicas: int,
    static: int | None = None,
    *,
    is_shared: bool = True,
) -> tf.data.Dataset:
    """Divide this worker's rows of each batch among its replicas.

    Args:
        batches: `tf.data.Dataset` of pairs: a nest of this worker's rows, or one row if
            it has none; and the number of rows of the global batch, int64.
        ranks: List of consecutive ints, the ranks of the replicas.
        num_replicas: Int, number of replicas on all workers.
        static: Int, number of rows of every global batch, or `None` if it varies.
            Defaults to `None`.
        is_shared: Bool, whether the rows are copied, because they may share memory with
            a user's array. Defaults to `True`.

    Returns:
        `tf.data.Dataset` of pairs: a tuple with the rows of each rank, and the number
        of rows of the global batch, a float32 scalar. A rank without rows receives
        tensors with 0 rows.
    """

    @no_autograph
    def divide(rows: Any, total: tf.Tensor) -> Any:
        """Return a tuple of each rank's rows, and the batch's row count as float32."""
        part = LocalRowRange(total, static, ranks[0], is_shared)
        parts = tuple(rows_of_rank(rows, rank, num_replicas, part) for rank in ranks)
        # `DeepCopy` is stateful, which keeps TensorFlow from making the `map` parallel.
        # Parallel calls would read ahead from a Python generator, and batches that are
        # read ahead, but not used, would be lost.
        return parts, tf.raw_ops.DeepCopy(x=tf.cast(total, tf.float32))

    return batches.map(divide)


def batch_local_rows(
    batches: tf.data.Dataset, ranks: list[int], num_replicas: int
) -> tf.data.Dataset | None:
    """Rebatch the rows that a worker reads alone by its share of a global batch.

    The workers' batches of a step then form one batch of the user's size, and a worker
    holds no more rows than it needs.

    Args:
        batches: `tf.data.Dataset` of this worker's rows, in batches of the global size.
        ranks: List of consecutive ints, the ranks of this worker's replicas.
        num_replicas: Int, number of replicas on all workers.

    Returns:
        `tf.data.Dataset`, or `None` if the pipeline does not end in `batch`, possibly
        followed by stages that treat rows separately or read no values.

    Example:

    >>> batches = tf.data.Dataset.range(5).batch(4).take(2)
    >>> batches = batch_local_rows(batches, [0, 1], 4)
    >>> [rows.tolist() for rows in batches.as_numpy_iterator()]
    [[0, 1], [2, 3]]
    """
    stage, after = stages_after_batch(batches)
    size = tf_data.size_of_batch_stage(stage)
    if tf_data.kind_of_stage(stage) not in BATCHES or size is None:
        return None
    (rows,) = tf_data.dataset_sources(stage)
    local_batches = rebuild_batch(
        stage, rows, len(rows_of_worker(size, ranks, num_replicas))
    )
    for each in after:
        local_batches = each.append_to(local_batches)
    return local_batches.with_options(batches.options())


def elements_of(dataset: tf.data.Dataset) -> Elements:
    """Split a pipeline into its raw elements and the last maps of single elements.

    A stage after the maps that selects or repeats elements is moved before them.

    Args:
        dataset: `tf.data.Dataset`, the input of `batch`.

    Returns:
        `Elements`. Its `raw` is the pipeline up to the last stage of another kind, such
        as a shuffle or a map with state, and includes all maps before that stage. Its
        `stages` are the maps after it, with the prefetches and options that follow.
    """
    kind = tf_data.kind_of_stage(dataset)
    if kind == "ZipDataset":
        return _elements_of_zip(dataset)
    is_pure_map = kind in MAPS and not pipelines.stateful_operation(dataset)
    if not is_pure_map and kind not in (*PASS_THROUGH, *SELECTIONS):
        return Elements(dataset, obstacle=why_not_split_early(dataset))
    elements = elements_of(*tf_data.dataset_sources(dataset))
    if is_pure_map:
        call = pipelines.function_of_map(dataset)
        elements.stages.append(rebuild_map(dataset, call))
    elif not elements.stages:
        elements.raw = dataset
    elif kind in PASS_THROUGH:
        elements.stages.append(rebuild_stage(dataset))
    else:
        raw = elements.raw
        if kind == "RepeatDataset":
            # A filter that keeps every element stops TensorFlow from fusing adjacent
            # `shuffle` and `repeat` stages, which would reorder the second pass.
            raw = raw.filter(no_autograph(lambda *_: True))
        elements.raw = rebuild_stage(dataset).append_to(raw)
    return elements


def _elements_of_zip(dataset: tf.data.Dataset) -> Elements:
    """Split a `zip` into the raw elements of its inputs, zipped, and one joint map.

    Args:
        dataset: `tf.data.Dataset` that ends in `zip`.

    Returns:
        `Elements`. The elements of an input without maps of single elements are not
        mapped; if no input has such maps, the whole `zip` is raw. `obstacle` is that of
        the first input that has one.
    """
    nest = pipelines.zipped(dataset)
    parts = [elements_of(part) for part in tf.nest.flatten(nest)]
    obstacle = next((part.obstacle for part in parts if part.obstacle), "")
    maps = [[each for each in part.stages if each.call] for part in parts]
    if not any(maps):
        return Elements(dataset, obstacle=obstacle)
    calls = tf.nest.pack_sequence_as(nest, [_compose(each) for each in maps])

    def call(element: Any) -> Any:
        """Return a zipped element, each part mapped by the maps of its own dataset."""
        return keras.tree.map_structure_up_to(
            calls, lambda one, part: one(part), calls, element
        )

    raw = tf.nest.pack_sequence_as(nest, [part.raw for part in parts])
    first = next(each[0] for each in maps if each)
    zipped = tf.data.Dataset.zip(raw)
    return Elements(zipped, [Stage(first.build, call)], obstacle=obstacle)


def _compose(stages: list[Stage]) -> Callable[[Any], Any]:
    """Return a function that calls the functions of `map` stages one after another."""

    def call(element: Any) -> Any:
        """Return an element after the functions of all stages, called in order."""
        for stage in stages:
            element = stage.call(element)
        return element

    return call


def why_not_split_early(dataset: tf.data.Dataset, reason: str = "") -> str:
    """Describe why all workers run a user's `map` for all rows, and the remedy.

    Args:
        dataset: `tf.data.Dataset`.
        reason: String, the reason if it is known. Defaults to `""`: the last stage of
            the dataset is the reason.

    Returns:
        String, or an empty one if no user's `map` runs.
    """
    if not _has_map(dataset):
        return ""
    if not _has_map(dataset, in_each_pass=True):
        return _CACHE_REASON
    if reason:
        return reason
    kind = tf_data.kind_of_stage(dataset)
    if kind in MAPS and (operation := pipelines.stateful_operation(dataset)):
        return f"its `map` has `{operation}`; {_ADVICE.get(operation, _PURE_ADVICE)}"
    if kind in MAPS:
        return f"there is a `map` after `batch`; {_BEFORE_BATCH_ADVICE}"
    name = _INNER_CAPITAL.sub(
        "_", kind.removesuffix("Dataset").removeprefix("Parallel")
    )
    return f"there is `{name.lower()}` after `map`; {_AFTER_ADVICE}"


def _has_map(dataset: tf.data.Dataset, *, in_each_pass: bool = False) -> bool:
    """Return whether a dataset has a `map` of the user.

    With `in_each_pass`, a `map` before `cache` does not count, because it runs only in
    the first pass over the data.
    """
    kind = tf_data.kind_of_stage(dataset)
    if kind == "CacheDataset" and in_each_pass:
        return False
    if kind in MAPS and not pipelines.is_map_of_keras(dataset):
        return True
    sources = tf_data.dataset_sources(dataset)
    return any(_has_map(source, in_each_pass=in_each_pass) for source in sources)
