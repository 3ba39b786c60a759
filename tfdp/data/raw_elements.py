"""Raw elements of a pipeline of tf.data, and the stages that treat each by itself."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp import _compat
from tfdp.data.determinism import RANDOM_OPS

MAPS = ("MapDataset", "ParallelMapDataset")
# Stages that pass elements on as they are; and that choose some, whatever they hold.
# Not `cache`: what the user's keeps lasts for all calls of `fit`, that of a copy not.
PASS_ON = ("PrefetchDataset", "OptionsDataset")
CHOOSE = ("TakeDataset", "SkipDataset", "RepeatDataset")
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
class Stage:
    """A stage that treats each element by itself, or only passes it on.

    Args:
        apply: Function from a dataset of elements to another one; of a `map` it takes
            the function, too.
        call: Function of an element, of a `map`; otherwise `None`.
    """

    apply: Callable[..., tf.data.Dataset]
    call: Callable[[Any], Any] | None = None

    def __call__(self, pairs: tf.data.Dataset) -> tf.data.Dataset:
        """Apply it to elements, each with the number of rows of its global batch."""
        if self.call is None:
            return self.apply(pairs)
        call = self.call
        return self.apply(pairs, no_autograph(lambda own, total: (call(own), total)))


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


def elements_of(dataset: tf.data.Dataset) -> Elements:
    """Find the raw elements of a pipeline, and the stages that treat each by itself."""
    kind = _compat.kind_of_part(dataset)
    if kind == "ZipDataset":
        return _elements_of_zip(dataset)
    if kind in MAPS and not _compat.stateful_operation(dataset):
        elements = elements_of(*_compat.dataset_sources(dataset))
        call = _compat.function_of_map(dataset)
        elements.stages.append(map_again(dataset, call))
        return elements
    if kind not in (*PASS_ON, *CHOOSE):
        return Elements(dataset, obstacle=obstacle_of(dataset))
    elements = elements_of(*_compat.dataset_sources(dataset))
    if not elements.stages:
        return Elements(dataset, obstacle=elements.obstacle)
    again = stage_again(dataset)
    if kind == "RepeatDataset":
        # TensorFlow makes one stage of `shuffle` and `repeat` with nothing between, by
        # which the second pass over the dataset has another order.
        elements.raw = again(elements.raw.filter(no_autograph(lambda *_: True)))
    elif kind in CHOOSE:
        elements.raw = again(elements.raw)
    else:
        elements.stages.append(again)
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
    return Elements(zipped, [Stage(first.apply, call)], obstacle=obstacle)


def _composed(stages: list[Stage]) -> Callable[[Any], Any]:
    def call(element: Any) -> Any:
        for stage in stages:
            element = stage.call(element)  # type: ignore[misc]
        return element

    return call


def map_again(dataset: tf.data.Dataset, call: Callable[[Any], Any]) -> Stage:
    """The stage of a `map`, with its parallelism and the given function."""
    parallel = _compat.parallelism_of(dataset)

    def apply(pairs: tf.data.Dataset, call: Callable) -> tf.data.Dataset:
        return pairs.map(call, num_parallel_calls=parallel)

    return Stage(apply, call)


def stage_again(dataset: tf.data.Dataset) -> Stage:
    """A stage that passes elements on or chooses some, to be built on others."""
    kind = _compat.kind_of_part(dataset)
    if kind == "OptionsDataset":  # those of the whole pipeline are set at its end
        return Stage(lambda pairs: pairs)
    method, argument = {
        "PrefetchDataset": ("prefetch", _compat.buffer_size_of),
        "TakeDataset": ("take", _compat.count_of_stage),
        "SkipDataset": ("skip", _compat.count_of_stage),
        "RepeatDataset": ("repeat", _compat.count_of_stage),
    }[kind]
    value = argument(dataset)
    return Stage(lambda pairs: getattr(pairs, method)(value))


def obstacle_of(dataset: tf.data.Dataset) -> str:
    """Say why all workers run a `map` that is in a dataset, if there is one."""
    if not _has_map(dataset):
        return ""
    if not _has_map(dataset, in_each_pass=True):
        return _OF_CACHE
    kind = _compat.kind_of_part(dataset)
    if kind in MAPS and (operation := _compat.stateful_operation(dataset)):
        return f"its `map` has `{operation}`; {_ADVICE.get(operation, _PURE)}"
    if kind in MAPS:
        return f"there is a `map` after `batch`; {_BEFORE_BATCH}"
    name = _CAPITAL.sub("_", kind.removesuffix("Dataset").removeprefix("Parallel"))
    return f"there is `{name.lower()}` after `map`; {_AFTER}"


def obstacle_of_order(dataset: tf.data.Dataset) -> str:
    """Say so if elements may come in any order."""
    return _OF_ORDER if _has_map(dataset, in_each_pass=True) else obstacle_of(dataset)


def obstacle_of_generator(dataset: tf.data.Dataset) -> str:
    """Say so if a `map` follows a Python generator."""
    return (
        _OF_GENERATOR if _has_map(dataset, in_each_pass=True) else obstacle_of(dataset)
    )


def _has_map(dataset: tf.data.Dataset, *, in_each_pass: bool = False) -> bool:
    """Return whether a user's `map` runs at all, or in each pass: without a `cache`."""
    kind = _compat.kind_of_part(dataset)
    if kind == "CacheDataset" and in_each_pass:
        return False
    if kind in MAPS and not _compat.name_of_map(dataset).startswith("keras.src."):
        return True
    sources = _compat.dataset_sources(dataset)
    return any(_has_map(source, in_each_pass=in_each_pass) for source in sources)


def no_autograph(function: Callable) -> Callable:
    """Keep AutoGraph, which would take a second to find nothing, from a function."""
    return tf.autograph.experimental.do_not_convert(function)
