"""The rows of a batch are divided at no cost at the start of training."""

from __future__ import annotations

import sys

import tensorflow as tf

from tfdp.training.data.rows import divide_batches


def test_autograph_has_nothing_to_convert_where_rows_are_divided():
    def generated() -> set[str]:
        return {name for name in sys.modules if "autograph_generated" in name}

    before = generated()
    dataset = tf.data.Dataset.range(5).batch(5)
    (parts, total) = next(iter(divide_batches(dataset, [0, 1], 2)))
    assert [part.numpy().tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert float(total) == 5.0
    assert generated() == before
