"""Every replica gets its rows of every global batch.

Stock tf.distribute shards a dataset by file or by element and then divides
batches, which needs files enough, gives the last partial batch to the first
replicas, and asks all workers at every step whether anybody has data left.
Here every worker reads the same global batches, in the same order, and takes
the rows of its replicas: rank r of R has rows that differ in number by one at
most, and all workers see the end of the data at the same step.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import tensorflow as tf

from tfdp import _compat
from tfdp.base import loops
from tfdp.data.rows import rows_of_ranks
from tfdp.data.share_dataset import Reading, ShareDataset, shares_read_ahead

_POLICY = tf.data.experimental.AutoShardPolicy


def distribute(strategy: Any, dataset: Any, options: Any, stock: Any) -> Any:
    """Distributes the global batches of a dataset.

    Args:
        strategy: A tfdp strategy.
        dataset: `tf.data.Dataset`, batched by the global batch size.
        options: `tf.distribute.InputOptions` or `None`.
        stock: The strategy's parent, for datasets that keep to stock rules.

    Returns:
        A `tf.distribute.DistributedDataset`.

    Raises:
        ValueError: If a batch has fewer rows than there are replicas, or
            workers would shuffle differently.
    """
    if not isinstance(dataset, tf.data.Dataset) or not _has_rows(dataset):
        return stock.experimental_distribute_dataset(dataset, options)
    check_batch_size(strategy, _static_batch_size(dataset), "The dataset's batch size")
    extended = strategy.extended
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if extended.worker_group.num_workers > 1:
        if policy in (_POLICY.FILE, _POLICY.OFF):
            return _distribute_own_shards(strategy, dataset, options, policy, stock)
        _check_workers_read_alike(extended.worker_group, dataset)
    first = extended.first_rank
    ranks = list(range(first, first + extended.num_local))
    asks = _lengths_differ(strategy, dataset)
    return _of_shares(strategy, dataset, ranks, options, asks=asks)


def _of_shares(
    strategy: Any, dataset: Any, ranks: list[int], options: Any, *, asks: bool
) -> Any:
    """The distributed dataset of the local replicas' shares."""
    num_replicas = strategy.num_replicas_in_sync
    extended = strategy.extended
    on_cpus = extended.group.backend != "nccl" and not _has_gpus(strategy)
    if (on_cpus or extended.balance is not None) and options is None:
        shares = shares_read_ahead(dataset, ranks, num_replicas)
        return ShareDataset(shares, strategy, Reading(asks), batches=dataset)
    local = rows_of_ranks(dataset, ranks, num_replicas)
    distributed = strategy.distribute_datasets_from_function(lambda _: local, options)
    return distributed if asks else _compat.without_partial_batches(distributed)


def _has_gpus(strategy: Any) -> bool:
    devices = strategy.extended.worker_devices
    return any(_compat.device_type(device) == "GPU" for device in devices)


def check_batch_size(strategy: Any, batch_size: int | None, what: str) -> None:
    """Raises if a batch cannot give every replica a row.

    Raises:
        ValueError: If `batch_size` is known and smaller than the number of
            replicas.
    """
    num_replicas = strategy.num_replicas_in_sync
    if batch_size is not None and 0 < batch_size < num_replicas:
        raise ValueError(
            f"{what} is global, as in Keras, and must be at least the number of "
            f"replicas, {num_replicas}, so that each has a row. "
            f"Received: batch_size={batch_size}"
        )


def _has_rows(dataset: tf.data.Dataset) -> bool:
    specs = tf.nest.flatten(dataset.element_spec)
    ranks = [
        spec.shape.rank
        for spec in specs
        if hasattr(spec, "shape") and spec.shape.rank is not None
    ]
    return any(rank > 0 for rank in ranks) or any(
        hasattr(spec, "shape") and spec.shape.rank is None for spec in specs
    )


def _static_batch_size(dataset: tf.data.Dataset) -> int | None:
    specs = tf.nest.flatten(dataset.element_spec)
    sizes = {
        spec.shape[0]
        for spec in specs
        if isinstance(spec, tf.TensorSpec) and spec.shape.rank
    }
    known = sizes - {None}
    if len(known) == 1:
        return known.pop()
    found = _compat.dataset_batch_size(dataset)
    return found if found > 0 else None


def _check_workers_read_alike(worker_group: Any, dataset: tf.data.Dataset) -> None:
    """Every worker must see the same batches in the same order."""
    seeds = _compat.shuffle_seeds(dataset)
    texts = worker_group.all_gather("a dataset's shuffle order", json.dumps(seeds))
    unseeded = any((0, 0) in map(tuple, json.loads(text)) for text in texts)
    if unseeded or len(set(texts)) > 1:
        raise ValueError(
            "Workers would shuffle this dataset differently, so that samples are "
            "read twice or not at all. Give `shuffle` the same `seed` on every "
            "worker, or make the dataset after the strategy, which agrees on "
            f"one. Received: the seeds {texts[0]} on worker 0, {texts[-1]} on "
            f"worker {len(texts) - 1}"
        )


def ends_with_the_first(strategy: Any) -> bool:
    """Whether the data that is asked for ends for all when one worker's does.

    Only that which a `fit` trains on: all other samples count, each by itself.
    """
    loop = loops.current()
    is_for_training = loop is not None and loop.awaits_training_data
    return is_for_training and strategy.extended.options.uneven == "stop"


def _lengths_differ(strategy: Any, dataset: Any) -> bool:
    """Whether some workers may run out of data before others."""
    worker_group = strategy.extended.worker_group
    if worker_group.num_workers == 1:
        return False
    length = int(dataset.cardinality().numpy())
    same, texts = worker_group.same("a dataset's length", str(length))
    # What is left out when all end together is said where it is known.
    if not same and not ends_with_the_first(strategy):
        lengths = ", ".join(f"{text} on worker {r}" for r, text in enumerate(texts))
        warnings.warn(
            "Workers have datasets of different length; each should read the same "
            "global batches. All go on until the longest ends, those without data "
            f"with empty shares. Received: {lengths} batches",
            stacklevel=2,
        )
    return not same or length == tf.data.UNKNOWN_CARDINALITY


def steps_per_batch(strategy: Any, source: Any) -> float:
    """Steps for which one batch lasts of what several workers read.

    With `AutoShardPolicy.OFF` more than one. Of what a user distributed by a function
    each replica is given a batch.
    """
    if isinstance(source, tf.data.Dataset):
        policy = source.options().experimental_distribute.auto_shard_policy
        num_workers = strategy.extended.worker_group.num_workers
        return num_workers if policy == _POLICY.OFF else 1
    by_replica = isinstance(source, _compat.DistributedDatasetsFromFunction)
    if by_replica and not isinstance(source, ShareDataset):
        return 1 / strategy.extended.num_local
    return 1


def is_endless(source: Any) -> bool:
    """Whether what Keras reads is a dataset that never ends."""
    cardinality = getattr(source, "cardinality", None)
    if callable(cardinality):
        cardinality = cardinality()
    return cardinality is not None and int(cardinality) == tf.data.INFINITE_CARDINALITY


def _distribute_own_shards(
    strategy: Any, dataset: Any, options: Any, policy: Any, stock: Any
) -> Any:
    """Stock sharding, where the user asked for it.

    With OFF each worker reads data of its own in global batches. A step takes
    the worker's share of one, so that a batch lasts for as many steps as there
    are workers, as TensorFlow defines it.
    """
    if policy == _POLICY.OFF:
        return _of_own_batches(strategy, dataset, options)
    by_file = stock.experimental_distribute_dataset(dataset, options)
    if not strategy.extended.worker_group.any(
        "sharding by file", not _can_read(by_file)
    ):
        return by_file
    warnings.warn(
        "This dataset cannot be sharded by file: it needs at least one file for "
        "each worker. It is sharded by rows.",
        stacklevel=2,
    )
    changed = tf.data.Options()
    changed.experimental_distribute.auto_shard_policy = _POLICY.DATA
    return strategy.experimental_distribute_dataset(
        dataset.with_options(changed), options
    )


def _of_own_batches(strategy: Any, dataset: Any, options: Any) -> Any:
    """One batch of a worker lasts for as many steps as there are workers."""
    num_replicas = strategy.num_replicas_in_sync
    local = rows_of_ranks(dataset, list(range(num_replicas)), num_replicas)
    return strategy.distribute_datasets_from_function(lambda _: local, options)


def _can_read(distributed: Any) -> bool:
    """TensorFlow finds out that files are too few when it reads the first."""
    try:
        for _ in _compat.local_dataset(distributed).take(1):
            pass
    except tf.errors.OpError:
        return False
    return True
