"""Selection of a worker's rows before they are prepared.

Every worker reads the same elements, and takes its rows of each global batch. Where
`map` prepares each element by itself, the rows are taken from the raw elements: of N
workers each prepares an N-th of them, and not all.

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

from tfdp.ground import _compat
from tfdp.training.data.determinism import RANDOM_OPS
from tfdp.training.data.rows import (
    Part,
    bounds_of_ranks,
    num_rows,
    rows_of_rank,
    rows_of_worker,
)
from tfdp.training.data.stages import (
    BATCHES,
    CHOOSE,
    MAPS,
    PASS_ON,
    Stage,
    is_of_arrays,
    no_autograph,
    of_element,
    rebuild_batch,
    rebuild_map,
    rebuild_stage,
    stages_after_batch,
)

_RANDOM = "`tf.random.stateless_uniform` and its like, seeded by the element's index"
# By the operation that stands in the way: what can be done.
_ADVICE = {
    "PyFunc": "give `tf.numpy_function` `stateful=False` if its function is pure",
    "EagerPyFunc": "use `tf.numpy_function` with `stateful=False` if it is pure",
    **dict.fromkeys(RANDOM_OPS, f"use {_RANDOM}"),
}
_PURE = "it has to give for an element the same wherever it is called"
_BEFORE_BATCH = "put it before `batch` if it treats each element by itself"
_AFTER = "put `map` after it, if that gives the same elements"
_OF_ORDER = "with `deterministic=False` its elements come in any order; leave that out"
_OF_GENERATOR = (
    "it draws from a Python generator; make a dataset of indices or names instead, and "
    "load in a `map`"
)
_OF_CACHE = (
    "its `map` stands before `cache`, which keeps all of them; put `cache` before "
    "`map`, or leave it out, if preparing own rows in each pass costs less"
)
_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")


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


@dataclasses.dataclass
class Elements:
    """Elements of a pipeline: raw ones, and the stages that treat each by itself.

    Args:
        raw: `tf.data.Dataset`.
        stages: List of `Stage`.
        obstacle: String, what makes a `map` a part of `raw`; empty if none is.
    """

    raw: tf.data.Dataset
    stages: list[Stage] = dataclasses.field(default_factory=list)
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
        return Division(obstacle=why_not_split_early(batches, _OF_ORDER))
    stage, after = stages_after_batch(batches)
    if is_of_arrays(stage):
        return Division(_divided_arrays(stage, after, ranks, num_replicas))
    if _compat.kind_of_part(stage) not in BATCHES:
        return Division(obstacle=why_not_split_early(stage))
    if _compat.has_generator(stage):
        return Division(obstacle=why_not_split_early(stage, _OF_GENERATOR))
    own, static, obstacle = _own_batches(stage, ranks, num_replicas)
    if own is None:
        return Division(obstacle=obstacle)
    for each in after:
        own = each.on_pairs(own)
    # `batch` has made their memory.
    own = divide_rows(own, ranks, num_replicas, static, is_shared=False)
    length = int(batches.cardinality())
    if length != tf.data.UNKNOWN_CARDINALITY:
        own = own.apply(tf.data.experimental.assert_cardinality(length))
    return Division(own.with_options(batches.options()), obstacle)


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
        divided = each.on_parts(divided)
    return divided.with_options(stage.options())


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
        own = each.on_pairs(own)
    own = rebuild_batch(stage, own, len(rows_of_worker(size, ranks, num_replicas)))
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

    def take(window: Any) -> tf.data.Dataset:
        total = tf.nest.flatten(window)[0].cardinality()
        begin, end = bounds_of_ranks(total, ranks, num_replicas)
        begin, size = tf.minimum(begin, total - 1), tf.maximum(end - begin, 1)
        own = tf.nest.map_structure(lambda part: part.skip(begin).take(size), window)
        totals = tf.data.Dataset.from_tensors(total).repeat()
        return tf.data.Dataset.zip((tf.data.Dataset.zip(own), totals))

    windows = raw.window(size, drop_remainder=drops)
    return windows.flat_map(of_element(raw, take))


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
    stage, after = stages_after_batch(batches)
    size = _compat.size_of_batch_stage(stage)
    if _compat.kind_of_part(stage) not in BATCHES or size is None:
        return None
    (rows,) = _compat.dataset_sources(stage)
    own = rebuild_batch(stage, rows, len(rows_of_worker(size, ranks, num_replicas)))
    for each in after:
        own = each.on(own)
    return own.with_options(batches.options())


def elements_of(dataset: tf.data.Dataset) -> Elements:
    """Find the raw elements of a pipeline, and the stages that treat each by itself."""
    kind = _compat.kind_of_part(dataset)
    if kind == "ZipDataset":
        return _elements_of_zip(dataset)
    is_pure_map = kind in MAPS and not _compat.stateful_operation(dataset)
    if not is_pure_map and kind not in (*PASS_ON, *CHOOSE):
        return Elements(dataset, obstacle=why_not_split_early(dataset))
    elements = elements_of(*_compat.dataset_sources(dataset))
    if is_pure_map:
        call = _compat.function_of_map(dataset)
        elements.stages.append(rebuild_map(dataset, call))
    elif not elements.stages:
        elements.raw = dataset
    elif kind in PASS_ON:
        elements.stages.append(rebuild_stage(dataset))
    else:
        raw = elements.raw
        if kind == "RepeatDataset":
            # TensorFlow makes one stage of `shuffle` and `repeat` with nothing between,
            # by which the second pass over the dataset has another order.
            raw = raw.filter(no_autograph(lambda *_: True))
        elements.raw = rebuild_stage(dataset).on(raw)
    return elements


def _elements_of_zip(dataset: tf.data.Dataset) -> Elements:
    """Zip raw elements; one stage treats the parts of an element."""
    nest = _compat.zipped(dataset)
    parts = [elements_of(part) for part in tf.nest.flatten(nest)]
    obstacle = next((part.obstacle for part in parts if part.obstacle), "")
    maps = [[each for each in part.stages if each.call] for part in parts]
    if not any(maps):
        return Elements(dataset, obstacle=obstacle)
    calls = tf.nest.pack_sequence_as(nest, [_composed(each) for each in maps])

    def call(element: Any) -> Any:
        return keras.tree.map_structure_up_to(
            calls, lambda one, part: one(part), calls, element
        )

    raw = tf.nest.pack_sequence_as(nest, [part.raw for part in parts])
    first = next(each[0] for each in maps if each)
    zipped = tf.data.Dataset.zip(raw)
    return Elements(zipped, [Stage(first.build, call)], obstacle=obstacle)


def _composed(stages: list[Stage]) -> Callable[[Any], Any]:
    def call(element: Any) -> Any:
        for stage in stages:
            element = stage.call(element)
        return element

    return call


def why_not_split_early(dataset: tf.data.Dataset, reason: str = "") -> str:
    """Say why all workers run a `map` that is in a dataset, if there is one.

    Args:
        dataset: `tf.data.Dataset`.
        reason: String, a reason known already, or by default an empty one: it is the
            last stage.
    """
    if not _has_map(dataset):
        return ""
    if not _has_map(dataset, in_each_pass=True):
        return _OF_CACHE
    if reason:
        return reason
    kind = _compat.kind_of_part(dataset)
    if kind in MAPS and (operation := _compat.stateful_operation(dataset)):
        return f"its `map` has `{operation}`; {_ADVICE.get(operation, _PURE)}"
    if kind in MAPS:
        return f"there is a `map` after `batch`; {_BEFORE_BATCH}"
    name = _CAPITAL.sub("_", kind.removesuffix("Dataset").removeprefix("Parallel"))
    return f"there is `{name.lower()}` after `map`; {_AFTER}"


def _has_map(dataset: tf.data.Dataset, *, in_each_pass: bool = False) -> bool:
    """Return whether a user's `map` runs at all, or in each pass: without a `cache`."""
    kind = _compat.kind_of_part(dataset)
    if kind == "CacheDataset" and in_each_pass:
        return False
    if kind in MAPS and not _compat.name_of_map(dataset).startswith("keras.src."):
        return True
    sources = _compat.dataset_sources(dataset)
    return any(_has_map(source, in_each_pass=in_each_pass) for source in sources)
