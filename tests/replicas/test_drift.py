"""Checksums find every changed bit, and the replica that has it is named."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness.pool import ClusterPool
from tests.harness.registry import Case
from tests.harness.tiers import full
from tfdp.training.replicas.checksum import MODULUS, checksums, combine_checksums
from tfdp.training.replicas.drift import describe_drift, outliers

CASE_MODULES = ("replicas.cases_drift",)
DTYPES = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"] + [
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
]


@pytest.mark.processes
def test_consistency_check(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)


def checksum(values: np.ndarray, dtype: str | None = None) -> int:
    tensor = tf.constant(values)
    if dtype is not None:
        tensor = tf.bitcast(tensor, dtype)
    return int(checksums([tensor])[0])


# One of each size, and of the complex numbers.
QUICK_DTYPES = ("bfloat16", "float32", "complex64", "uint8")


@pytest.mark.parametrize(
    "dtype", [name if name in QUICK_DTYPES else full(name) for name in DTYPES]
)
def test_each_flipped_bit_is_another_checksum(dtype: str):
    size = tf.as_dtype(dtype).size
    raw = np.random.default_rng(0).integers(0, 256, (2, size), "uint8")
    # A bitcast from bytes joins those of the last axis.
    source = raw if size > 1 else raw[:, 0]
    found = {checksum(source, dtype)}
    for bit in range(raw.size * 8):
        other = source.copy()
        other.flat[bit // 8] ^= 1 << bit % 8
        found.add(checksum(other, dtype))
    assert len(found) == raw.size * 8 + 1


def test_bools_have_checksums():
    found = {checksum(np.arange(9) == index) for index in range(-1, 9)}
    assert len(found) == 10


@pytest.mark.parametrize(
    "count", [1, 4095, 4096, 4097, full(3 * 4096 + 5), 2**22 + 4097]
)
def test_the_first_and_the_last_element_count_whatever_the_length(count: int):
    values = np.random.default_rng(count).normal(size=count).astype("float32")
    found = {checksum(values)}
    for position in {0, count // 2, count - 1}:
        other = values.copy()
        other[position] = np.nextafter(other[position], np.float32(9))
        found.add(checksum(other))
    assert len(found) == 1 + len({0, count // 2, count - 1})
    assert all(0 <= number < MODULUS for number in found)


def test_elements_that_change_places_are_another_checksum():
    values = np.random.default_rng(1).normal(size=20000).astype("float32")
    for first, second in [(0, 1), (1, 4097), (4095, 4096), (3, 19999)]:
        other = values.copy()
        other[[first, second]] = other[[second, first]]
        assert checksum(other) != checksum(values)


def test_signs_that_flip_in_pairs_are_another_checksum():
    values = np.ones(100, "float32")
    other = values.copy()
    other[[3, 50]] *= -1
    assert checksum(other) != checksum(values)


def test_a_checksum_is_the_same_in_a_graph_and_of_a_view():
    values = tf.constant(np.random.default_rng(2).normal(size=(70, 90)), tf.float32)
    traced = tf.function(lambda: checksums([values, values]))()
    assert len(set(traced.numpy().tolist())) == 1
    assert int(traced[0]) == checksum(values.numpy().ravel())


def test_weights_that_change_places_are_another_sum():
    sums = checksums([tf.constant([1.0]), tf.constant([2.0]), tf.constant([3.0])])
    found = {
        int(combine_checksums(tf.gather(sums, order)))
        for order in ([0, 1, 2], [1, 0, 2])
    }
    assert len(found) == 2
    assert int(combine_checksums(checksums([]))) == 0
    many = tf.range(10**4, dtype=tf.int64)
    assert int(combine_checksums(many)) != int(combine_checksums(many[::-1]))


def test_nothing_is_a_checksum_too():
    assert checksum(np.zeros([0, 3], "float32")) == 0


def test_the_minority_is_named_and_of_two_both():
    assert outliers([4, 4, 9, 4]) == [2]
    assert outliers([9, 4, 4, 9, 4, 5]) == [0, 3, 5]
    assert outliers([9, 4]) == [0, 1]
    assert outliers([9, 9, 4, 4]) == [0, 1, 2, 3]


def test_of_many_replicas_some_are_named_and_the_rest_counted():
    names = [f"replica {rank}" for rank in range(40)]
    tables = [[rank if rank < 11 else 77] for rank in range(40)]
    text = describe_drift([0] * 40, tables, ["w"], names)
    assert text.startswith("replica 0, replica 1, ")
    assert "replica 7 and 3 more differ from the other 29 in 'w'" in text


def test_replicas_that_are_alike_again_are_named_all_the_same():
    names = ["replica 0", "replica 1", "replica 2"]
    text = describe_drift([5.0, 5.0, 6.0], [[1], [1], [1]], ["w"], names)
    expected = (
        "replica 2 differs from the other 2 in a variable whose values are equal again"
    )
    assert text == expected


@pytest.mark.parametrize("every", [0, -1, 2.5, True, "10", None])
def test_a_wrong_interval_is_named(every: object):
    with pytest.raises(ValueError, match="must be an integer of at least 1") as error:
        tfdp.callbacks.ConsistencyCheck(every=every)
    assert str(error.value).endswith(f"Received: every={every!r}")


def model_of(strategy: tf.distribute.Strategy) -> keras.Model:
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def test_a_stock_strategy_is_refused():
    model = model_of(tf.distribute.MirroredStrategy(["CPU:0"]))
    check = tfdp.callbacks.ConsistencyCheck(every=1)
    # As `fit` calls it. `fit` itself, under a stock strategy, may crash the process
    # where it raises: TensorFlow deletes an iterator that still prefetches.
    with pytest.raises(ValueError, match="need a strategy of tfdp"):
        check.set_model(model)


def test_one_replica_is_compared_with_nobody_and_nothing_is_said(capsys):
    x, y = np.ones((8, 2)), np.ones((8, 1))
    for strategy in (tf.distribute.get_strategy(), tfdp.MirroredStrategy(["CPU:0"])):
        check = tfdp.callbacks.ConsistencyCheck(every=1)
        model_of(strategy).fit(x, y, batch_size=4, verbose=0, callbacks=[check])
    assert capsys.readouterr().out == ""
