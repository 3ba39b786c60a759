"""Rows that are taken before they are prepared: those of the whole pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

from tests.harness.tiers import full
from tfdp.ground._compat import pipelines
from tfdp.training.data.early_rows import divide_early
from tfdp.training.data.rows import divide_batches

AUTO = tf.data.AUTOTUNE
NUM_ROWS = 21
# Of a last batch of 21 - 2 * 8 = 5 rows each of four replicas has one or two.
WORKERS = {"two of two": ([1], 2), "four, on two workers": ([2, 3], 4)}


def rows(count: int = NUM_ROWS) -> tf.data.Dataset:
    return tf.data.Dataset.range(count)


def prepare(x: tf.Tensor) -> tuple:
    return tf.cast(x, tf.float32) * 2, {"y": tf.cast(x % 3, tf.int32)}


def double(x: tf.Tensor) -> tf.Tensor:
    return x * 2


def as_ragged(x: tf.Tensor) -> tf.RaggedTensor:
    return tf.RaggedTensor.from_row_lengths(tf.range(x % 4), [x % 4])


def as_sparse(x: tf.Tensor) -> tf.SparseTensor:
    return tf.sparse.from_dense([x, 0])


def by_python(x: tf.Tensor, *, is_pure: bool = True) -> tf.Tensor:
    found = tf.numpy_function(lambda v: v * 2, [x], tf.int64, stateful=not is_pure)
    return tf.ensure_shape(found, [])


def plus_one(y: tf.Tensor, labels: dict) -> tuple:
    return y + 1, labels


def zipped() -> tf.data.Dataset:
    return tf.data.Dataset.zip((rows().map(prepare), rows().map(double)))


def of_dicts() -> tf.data.Dataset:
    texts = tf.data.Dataset.from_tensor_slices({"a": [str(i) for i in range(NUM_ROWS)]})
    return texts.map(lambda element: tf.strings.length(element["a"]))


def weighted_by_class() -> tf.data.Dataset:
    data = rows().map(lambda x: (tf.cast(x, tf.float32), x % 3))
    adapter = TFDatasetAdapter(
        data.batch(8, drop_remainder=True), class_weight={0: 1.0, 1: 2.0, 2: 0.5}
    )
    return adapter.get_tf_dataset()


def in_sum(element: dict) -> tuple:
    x = tf.cast(element["x"], tf.float32)
    return {"a": {"b": x}, "c": (x + 1, x)}, x * 2, tf.abs(x - 9)


def with_threads(dataset: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    options.threading.private_threadpool_size = 2
    return dataset.with_options(options)


EARLY: dict[str, Callable[[], tf.data.Dataset]] = {
    "a map": lambda: rows().map(prepare).batch(8),
    "parallel, prefetched": lambda: (
        rows().map(prepare, num_parallel_calls=AUTO).batch(8).prefetch(AUTO)
    ),
    "whole batches": lambda: rows().map(prepare).batch(8, drop_remainder=True),
    "shuffled": lambda: rows().shuffle(16, seed=3).map(prepare).batch(8),
    "repeated": lambda: rows().map(prepare).repeat(2).batch(8),
    "shuffled, then prepared and repeated": lambda: (
        rows().shuffle(16, seed=3).map(prepare).repeat(2).batch(8)
    ),
    "shuffled, repeated": lambda: (
        rows().shuffle(16, seed=3).repeat(3).map(prepare).batch(8)
    ),
    "some": lambda: rows().map(prepare).take(13).skip(2).batch(8),
    "some batches": lambda: rows().map(prepare).batch(8).skip(1).take(2).repeat(2),
    "zipped": lambda: zipped().batch(5),
    "numbered": lambda: (
        rows().map(prepare).enumerate().map(lambda i, x: (x, i)).batch(5)
    ),
    "two maps": lambda: (
        rows().map(prepare).map(plus_one, num_parallel_calls=2).batch(7)
    ),
    "kept before": lambda: rows().cache().map(prepare).batch(8),
    "kept, shuffled before": lambda: (
        rows().cache().shuffle(9, seed=1).map(prepare).batch(8).repeat(2)
    ),
    "with options": lambda: (
        with_threads(rows().map(prepare)).map(plus_one).prefetch(2).batch(8)
    ),
    "whole batches, repeated": lambda: (
        rows().map(prepare).batch(8, drop_remainder=True).repeat(2)
    ),
    "whole batches of repeated": lambda: (
        rows().shuffle(9, seed=1).map(double).repeat(2).batch(8, drop_remainder=True)
    ),
    "weighted rows in dicts": lambda: (
        tf.data.Dataset.from_tensor_slices({"x": np.arange(NUM_ROWS)})
        .map(in_sum)
        .batch(8)
    ),
    "numbered, repeated": lambda: (
        rows().repeat(2).enumerate().map(lambda i, x: (x, i)).batch(8).prefetch(1)
    ),
    "zipped after": lambda: (
        tf.data.Dataset.zip((rows().shuffle(9, seed=2), rows()))
        .map(lambda x, y: (x * 2, {"y": y}, tf.cast(x, tf.float32)))
        .batch(8)
        .take(2)
    ),
    "ragged": lambda: rows().map(as_ragged).batch(8),
    "sparse": lambda: rows().map(as_sparse).batch(8),
    "of dicts": lambda: of_dicts().batch(8),
    "of unknown length": lambda: (
        rows().filter(lambda x: x % 5 != 1).map(prepare).batch(8)
    ),
    "fewer rows than replicas at the end": lambda: rows(17).map(double).batch(8),
    "one batch": lambda: rows(3).map(double).batch(8),
    "of classes with weights": weighted_by_class,
    "pure Python": lambda: rows().map(by_python).batch(8),
}
QUICK = (
    "parallel, prefetched",
    "shuffled, then prepared and repeated",
    "kept before",
    "weighted rows in dicts",
    "zipped",
)


def flat(element: Any) -> list[np.ndarray]:
    leaves = tf.nest.flatten(element, expand_composites=True)
    return [leaf.numpy() for leaf in leaves]


@pytest.mark.parametrize("workers", [full("two of two"), "four, on two workers"])
@pytest.mark.parametrize(
    "name", [name if name in QUICK else full(name) for name in EARLY]
)
def test_early_rows_are_those_of_the_whole_pipeline(name: str, workers: str):
    ranks, num_replicas = WORKERS[workers]
    early = divide_early(EARLY[name](), ranks, num_replicas)
    late = divide_batches(EARLY[name](), ranks, num_replicas)
    assert early.obstacle == ""
    assert early.dataset.cardinality() == late.cardinality()
    if name != "ragged":  # of which tf.data forgets whether rows are uniform
        assert early.dataset.element_spec == late.element_spec
    for _ in range(3):  # each pass has another order
        expected = [flat(element) for element in late]
        for found, wanted in zip(early.dataset, expected, strict=True):
            for own, other in zip(flat(found), wanted, strict=True):
                np.testing.assert_array_equal(own, other)
                assert own.shape == other.shape


def in_any_order(dataset: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = False
    return dataset.with_options(options)


BEFORE_CACHE = "`map` is before `cache`"
LATE = {
    "shuffled": (lambda: rows().map(double).shuffle(9).batch(8), "`shuffle` after"),
    "chosen": (
        lambda: rows().map(double).filter(lambda x: x > 3).batch(8),
        "`filter` after `map`",
    ),
    "after batch": (lambda: rows().batch(8).map(double), "a `map` after `batch`"),
    "random": (
        lambda: rows().map(lambda _: tf.random.uniform([], seed=1)).batch(8),
        "`RandomUniform`; use `tf.random.stateless_uniform`",
    ),
    "Python": (
        lambda: rows().map(lambda x: by_python(x, is_pure=False)).batch(8),
        "`PyFunc`; give `tf.numpy_function` `stateful=False`",
    ),
    "in any order": (
        lambda: rows().map(double, num_parallel_calls=2, deterministic=False).batch(8),
        "deterministic=False",
    ),
    "interleaved": (
        lambda: rows().map(double).interleave(tf.data.Dataset.from_tensors).batch(8),
        "`interleave` after",
    ),
    "flattened": (
        lambda: rows().map(double).flat_map(tf.data.Dataset.from_tensors).batch(8),
        "`flat_map` after `map`",
    ),
    "padded": (
        lambda: rows().map(lambda x: tf.range(x % 4)).padded_batch(8),
        "`padded_batch` after",
    ),
    "generated": (
        lambda: (
            tf.data.Dataset.from_generator(
                lambda: iter(range(9)), output_signature=tf.TensorSpec([], tf.int64)
            )
            .map(double)
            .batch(8)
        ),
        "Python generator",
    ),
    "nothing to prepare": (lambda: rows().batch(8), ""),
    "in any order by its options": (
        lambda: in_any_order(rows().map(double, num_parallel_calls=2).batch(8)),
        "`deterministic=False`",
    ),
    "kept": (lambda: rows().map(double).cache().batch(8), BEFORE_CACHE),
    "kept batches": (lambda: rows().map(double).batch(8).cache(), BEFORE_CACHE),
    "kept, shuffled": (
        lambda: rows().map(double).cache().shuffle(9).batch(8),
        BEFORE_CACHE,
    ),
    "kept, in any order": (
        lambda: in_any_order(rows().map(double).cache().batch(8)),
        BEFORE_CACHE,
    ),
    "kept, nothing prepared": (lambda: rows().cache().batch(8).cache(), ""),
}


@pytest.mark.parametrize("name", LATE)
def test_what_keeps_rows_from_being_taken_early_is_named(name: str):
    make, obstacle = LATE[name]
    division = divide_early(make(), [0], 2)
    assert division.dataset is None
    assert obstacle in division.obstacle
    assert bool(obstacle) == bool(division.obstacle)


@pytest.mark.parametrize("num_workers", [2, full(4)])
def test_all_workers_together_prepare_each_element_once(num_workers: int):
    calls = []

    def prepared() -> tf.data.Dataset:
        def record(x: np.ndarray) -> np.ndarray:
            calls.append(int(x))
            return x

        def call(x: tf.Tensor) -> tf.Tensor:
            return tf.numpy_function(record, [x], tf.int64, stateful=False)

        return rows(512).map(call).batch(32)

    for rank in range(num_workers):
        for _ in divide_early(prepared(), [rank], num_workers).dataset:
            pass
    assert sorted(calls) == list(range(512))


def of_arrays(num_rows: int, shuffle: bool | str) -> tf.data.Dataset:
    tf.random.set_seed(5)
    x = np.arange(6 * num_rows, dtype="float32").reshape(num_rows, 6)
    adapter = ArrayDataAdapter(x, {"y": x[:, 0]}, batch_size=8, shuffle=shuffle)
    return adapter.get_tf_dataset()


@pytest.mark.parametrize("workers", [full("two of two"), "four, on two workers"])
@pytest.mark.parametrize("num_rows", [16, 21, 17])
@pytest.mark.parametrize("shuffle", [False, True, "batch"])
def test_of_arrays_a_workers_rows_are_gathered_only(num_rows, shuffle, workers):
    ranks, num_replicas = WORKERS[workers]
    early = divide_early(of_arrays(num_rows, shuffle), ranks, num_replicas)
    late = divide_batches(of_arrays(num_rows, shuffle), ranks, num_replicas)
    assert early.dataset.element_spec == late.element_spec
    for found, wanted in zip(early.dataset, late, strict=True):
        for own, other in zip(flat(found), flat(wanted), strict=True):
            np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("num_workers", [2, full(4)])
def test_all_workers_together_gather_each_row_of_arrays_once(num_workers: int):
    gathered: list[int] = []

    def record(indices: np.ndarray) -> np.ndarray:
        gathered.extend(indices)
        return indices

    original = pipelines.python_function_of_map

    def recorded(stage: tf.data.Dataset) -> Callable:
        gather = original(stage)

        def call(pair: tuple) -> Any:
            indices, arrays = pair
            seen = tf.numpy_function(record, [indices], indices.dtype)
            return gather((tf.ensure_shape(seen, indices.shape), arrays))

        return call

    with mock.patch.object(pipelines, "python_function_of_map", recorded):
        for rank in range(num_workers):
            own = divide_early(of_arrays(21, shuffle=True), [rank], num_workers)
            for _ in own.dataset:
                pass
    assert sorted(gathered) == list(range(21))
