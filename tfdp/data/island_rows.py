"""Rows of an island: its part of each batch that all islands train on."""

from __future__ import annotations

import tensorflow as tf

from tfdp.base import loops
from tfdp.cluster.islands import Island
from tfdp.data.early_rows import divide_early
from tfdp.data.rows import divide_batches, in_turn


def island_in_training() -> Island | None:
    """Return the island whose `fit` is given its training data, or `None`."""
    loop = loops.current()
    if loop is None or not loop.awaits_training_data:
        return None
    return Island.from_environment()


def rows_of_island(dataset: tf.data.Dataset, island: Island) -> tf.data.Dataset:
    """Take an island's rows of each batch that has a row for each island.

    A last batch of fewer is left out by all: islands make as many steps.

    Args:
        dataset: `tf.data.Dataset` of batches.
        island: `Island`.

    Returns:
        `tf.data.Dataset` of smaller batches.
    """
    ranks = [island.index]
    divided = divide_early(dataset, ranks, island.count).dataset
    if divided is None:
        divided = divide_batches(dataset, ranks, island.count)
    enough = divided.filter(lambda parts, total: total >= float(island.count))
    return in_turn(enough).with_options(dataset.options())
