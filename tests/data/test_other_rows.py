"""Which parts of a batch have other numbers of rows, by stages and by a first batch."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdp.training.data.other_rows import indices_of_other_rows

Dataset = tf.data.Dataset


def of(num_rows: int) -> tf.data.Dataset:
    return Dataset.range(num_rows)


def pairs(num_rows: int) -> tf.data.Dataset:
    return Dataset.zip((of(num_rows), of(num_rows)))


def thinned(x: tf.Tensor, y: tf.Tensor) -> tuple:
    return x[::2], y


def thinned_by_python(x: tf.Tensor, y: tf.Tensor) -> tuple:
    thin = tf.py_function(lambda rows: rows[::2], [x], tf.int64)
    return tf.ensure_shape(thin, [None]), y


def drawn(x: tf.Tensor) -> tf.Tensor:
    return x + tf.random.uniform([], 0, 9, tf.int64)


DATASETS = {
    "one batch": (lambda: pairs(9).batch(4), set()),
    "zipped alike": (lambda: Dataset.zip((of(9).batch(4), of(9).batch(4))), set()),
    "zipped": (lambda: Dataset.zip((of(9).batch(4), of(9).batch(3))), {1}),
    "other last batches": (lambda: Dataset.zip((of(9).batch(4), of(19).batch(4))), {1}),
    "last batches anywhere": (
        lambda: Dataset.zip((of(9).batch(4).shuffle(3), of(9).batch(4).shuffle(3))),
        {1},
    ),
    "of unknown length": (
        lambda: Dataset.zip((of(9).filter(lambda x: x > 2).batch(4), of(9).batch(3))),
        {1},
    ),
    "nested": (
        lambda: Dataset.zip(
            (
                Dataset.zip((pairs(9).batch(4), of(9).batch(4))),
                Dataset.zip((of(30).batch(6), of(30).batch(6))),
            )
        ).prefetch(1),
        {3, 4},
    ),
    "shapes": (lambda: Dataset.from_tensors((tf.zeros([5]), tf.zeros([3]))), {1}),
    "mapped alike": (lambda: pairs(9).batch(4).map(lambda x, y: (x * 2, y)), set()),
    "mapped": (lambda: pairs(9).shuffle(9).batch(4).map(thinned).repeat(2), {1}),
    "zipped and mapped": (
        lambda: Dataset.zip((of(9).batch(4), of(9).batch(4).map(lambda x: x * 2))),
        set(),
    ),
    "zipped and drawn": (
        lambda: Dataset.zip((of(9).batch(4), of(9).batch(3).map(drawn))),
        {1},
    ),
    "mapped by Python": (lambda: pairs(9).batch(4).map(thinned_by_python), set()),
    "scalars": (lambda: pairs(9).batch(4).map(lambda x, y: (x, y, 1.0)), set()),
}


@pytest.mark.parametrize("name", DATASETS)
def test_parts_with_other_rows_are_found(name: str):
    make, expected = DATASETS[name]
    assert indices_of_other_rows(make()) == expected


def test_the_order_of_a_dataset_stays():
    def orders(*, looks: bool) -> np.ndarray:
        dataset = pairs(12).shuffle(12, seed=1).batch(12).map(lambda x, y: (x, y[::2]))
        if looks:
            assert indices_of_other_rows(dataset) == {1}
        return np.array([x.numpy() for _ in range(2) for x, _ in dataset])

    np.testing.assert_array_equal(orders(looks=True), orders(looks=False))
