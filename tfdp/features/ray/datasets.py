"""A worker's shard of a Ray dataset, as data of Keras's loops."""

from __future__ import annotations

from collections.abc import Sequence

import ray.train
import tensorflow as tf


def dataset_shard(
    name: str = "train",
    *,
    features: str | Sequence[str],
    labels: str | Sequence[str],
    batch_size: int,
) -> tf.data.Dataset:
    """This worker's shard of a dataset that `KerasTrainer` was given.

    Ray gives each worker other rows. Each counts once an epoch; which ones meet in a
    batch is not as on one device.

    Args:
        name: String, the key of `KerasTrainer`'s `datasets`. Defaults to `"train"`.
        features: String or sequence of strings, columns.
        labels: String or sequence of strings, columns.
        batch_size: Int, of the global batch: rows of all workers together.

    Returns:
        `tf.data.Dataset` for `fit`, `evaluate` or `predict`.

    Example:

    >>> def train(config):
    ...     rows = dataset_shard("train", features="x", labels="y", batch_size=256)

    Source: https://docs.ray.io/en/latest/train/user-guides/data-loading-preprocessing.html
    """
    shard = ray.train.get_dataset_shard(name)
    options = tf.data.Options()
    # What a worker reads is its own.
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    rows = shard.to_tf(features, labels, batch_size=batch_size)
    return rows.with_options(options)
