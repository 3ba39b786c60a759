"""What of the sizes of batches is known before data is read, and what is not."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfdp.training.data.batch_sizes import (
    batch_size_of,
    describe_sizes,
    sizes_of_batches,
)

rows = tf.data.Dataset.range
KNOWN = tf.data.experimental.assert_cardinality
WHOLE, PARTIAL = {"size": 8}, {"size": 8, "last": 5}


def some(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """As many elements as nobody knows."""
    return dataset.filter(lambda *_: True)


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (rows(24).batch(8), WHOLE),
        (rows(21).batch(8), PARTIAL),
        (rows(21).batch(8, drop_remainder=True), WHOLE),
        (rows(21).batch(8, num_parallel_calls=2), PARTIAL),
        (rows(21).map(lambda n: [n]).padded_batch(8), PARTIAL),
        (rows(21).map(tf.range).ragged_batch(8), PARTIAL),
        (rows(21).batch(8).map(lambda n: n + 1).cache().prefetch(2), PARTIAL),
        (rows(21).repeat().batch(8), WHOLE),
        (rows(37).batch(8).take(3), WHOLE),
        (rows(48).batch(8).shuffle(4).repeat(), WHOLE),
        (some(rows(21)).apply(KNOWN(21)).batch(8), PARTIAL),
        # All that is known of these is that nobody knows.
        (some(rows(21)).batch(8), None),
        (some(rows(21)).batch(8).apply(KNOWN(3)), None),
        (some(rows(21)).batch(8).repeat(), None),
        (some(rows(21).batch(8)).repeat(), None),
        (rows(3).map(tf.range), None),
        (rows(24).batch(8).rebatch(5), None),
    ],
)
def test_sizes_are_known_by_shapes_or_by_the_rows_before_batch(dataset, expected):
    assert sizes_of_batches(dataset) == expected


@pytest.mark.parametrize(
    ("dataset", "other"),
    [
        # As many batches, and rows in the last one of the part that has a smaller one.
        (rows(13).batch(8).repeat(3), rows(21).batch(8).repeat(2)),
        (rows(37).batch(8).shuffle(4).take(3), rows(21).batch(8).shuffle(4).take(3)),
        (
            rows(16).batch(8).concatenate(rows(12).batch(4)),
            rows(24).batch(8).concatenate(rows(8).batch(4)),
        ),
    ],
)
def test_batches_in_another_order_are_not_taken_for_the_same(dataset, other):
    assert dataset.cardinality() == other.cardinality()
    sizes, others = sizes_of_batches(dataset), sizes_of_batches(other)
    assert None not in (sizes, others)
    assert sizes != others
    assert describe_sizes(sizes) != describe_sizes(others)


def test_the_batch_size_shows_in_the_shapes_or_in_the_stages():
    sizes = [batch_size_of(rows(9).batch(4, drop_remainder=d)) for d in (True, False)]
    assert sizes == [4, 4]
    assert batch_size_of(rows(3).map(tf.range)) is None
