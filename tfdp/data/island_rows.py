"""Rows of an island: its part of each batch that all islands train on."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.base import loops
from tfdp.cluster.islands import Island
from tfdp.data.early_rows import divide_early
from tfdp.data.rows import divide_batches, first_tensor, in_turn, num_rows


def island_in_training() -> Island | None:
    """Return the island whose `fit` is given its training data, or `None`."""
    loop = loops.current()
    if loop is None or not loop.awaits_training_data:
        return None
    return Island.from_environment()


def rows_of_island(dataset: tf.data.Dataset, island: Island) -> tf.data.Dataset:
    """Take an island's rows of each batch, and leave out batches of which it has none.

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
    own = in_turn(divided).filter(_has_rows)
    return own.with_options(dataset.options())


def _has_rows(*batch: Any) -> tf.Tensor:
    return num_rows(first_tensor(batch)) > 0
