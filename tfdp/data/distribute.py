"""Distribution of a dataset: every replica gets its rows of every global batch.

Stock tf.distribute shards a dataset by file or by element and then divides
batches, which needs files enough, gives the last partial batch to the first
replicas, and asks all workers at every step whether any has data left.
Here every worker reads the same global batches, in the same order, and takes
the rows of its replicas: rank r of R has rows that differ in number by one at
most, and all workers see the end of the data at the same step.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp import _compat, user_code
from tfdp.base import loops
from tfdp.data.batch_sizes import batch_size_of, sizes_of_batches
from tfdp.data.early_rows import Division, divide_early
from tfdp.data.file_shards import FileShard
from tfdp.data.island_rows import island_in_training, rows_of_island
from tfdp.data.other_rows import places_of_others
from tfdp.data.own_data import distribute_by_policy, distribute_own_files
from tfdp.data.per_replica_dataset import (
    PREFETCHED_STEPS,
    PerReplicaDataset,
    ReadOptions,
    divide_and_prefetch,
    is_on_cpus,
)
from tfdp.data.rows import divide_batches, in_turn
from tfdp.data.same_datasets import compare

OF_BALANCE = (
    "with `--rebalance` it changes which rows these are, while they are read ahead"
)
_POLICY = tf.data.experimental.AutoShardPolicy


def distribute(strategy: Any, dataset: Any, options: Any, stock: Any) -> Any:
    """Distribute the global batches of a dataset.

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
    if (island := island_in_training()) is not None:
        dataset = rows_of_island(dataset, island)
    check_batch_size(strategy, batch_size_of(dataset), "The dataset's batch size")
    extended = strategy.extended
    policy = dataset.options().experimental_distribute.auto_shard_policy
    is_alone = extended.worker_group.num_workers == 1
    shard = FileShard.of_dataset(dataset)
    if shard is not None and shard.num_workers > 1:
        return distribute_own_files(strategy, dataset, shard, options)
    if not is_alone and policy in (_POLICY.FILE, _POLICY.OFF):
        return distribute_by_policy(strategy, dataset, options, policy, stock)
    known = batch_size_of(dataset) or (sizes_of_batches(dataset) or {}).get("size")
    loops.note_batch_rows(known)
    first = extended.first_rank
    ranks = list(range(first, first + extended.num_local))
    read_options = compare(strategy, dataset)
    return _distribute_rows(strategy, dataset, ranks, options, read_options)


def _distribute_rows(
    strategy: Any,
    dataset: Any,
    ranks: list[int],
    options: Any,
    read_options: ReadOptions,
) -> Any:
    """Return the distributed dataset of the local replicas' rows."""
    num_replicas = strategy.num_replicas_in_sync
    divided = _divide_early(strategy, dataset, ranks)
    others: frozenset[int] = frozenset()
    is_in_loop = loops.current() is not None and strategy.extended.balance is None
    if divided is None and is_in_loop and num_replicas > 1:
        others = places_of_others(dataset)
    if _reads_on_cpus(strategy) and options is None:
        if divided is None:
            divided = divide_and_prefetch(dataset, ranks, num_replicas, others=others)
        else:
            divided = divided.prefetch(PREFETCHED_STEPS)
    elif divided is None:
        divided = divide_batches(dataset, ranks, num_replicas, others=others)
    return distribute_divided(strategy, divided, options, read_options, dataset)


def distribute_divided(
    strategy: Any,
    divided: tf.data.Dataset,
    options: Any,
    read_options: ReadOptions,
    batches: tf.data.Dataset | None = None,
) -> Any:
    """Return the distributed dataset of rows that are divided among local replicas.

    Args:
        strategy: A tfdp strategy.
        divided: `tf.data.Dataset` as `divide_batches` returns it.
        options: `tf.distribute.InputOptions` or `None`.
        read_options: `ReadOptions`.
        batches: `tf.data.Dataset` of the global batches, or `None`, see
            `PerReplicaDataset`. Defaults to `None`.
    """
    if _reads_on_cpus(strategy) and options is None:
        return PerReplicaDataset(divided, strategy, read_options, batches=batches)
    local = in_turn(divided)
    distributed = strategy.distribute_datasets_from_function(lambda _: local, options)
    if read_options.asks_workers:
        return distributed
    return _compat.without_partial_batches(distributed)


def _reads_on_cpus(strategy: Any) -> bool:
    """Return whether a step takes its rows from host memory, or from a GPU's."""
    return is_on_cpus(strategy) or strategy.extended.balance is not None


def _divide_early(
    strategy: Any, dataset: tf.data.Dataset, ranks: list[int]
) -> tf.data.Dataset | None:
    """Divide a dataset before its rows are prepared, where other workers have some."""
    extended = strategy.extended
    if extended.worker_group.num_workers == 1:
        return None
    division = divide_early(dataset, ranks, strategy.num_replicas_in_sync)
    if division.dataset is not None and extended.balance is not None:
        division = Division(obstacle=OF_BALANCE)
    tell_of_obstacle(strategy, division.obstacle)
    return division.dataset


def tell_of_obstacle(strategy: Any, obstacle: str) -> None:
    """Warn of what makes each worker prepare all rows, once, on the first worker.

    Args:
        strategy: A tfdp strategy.
        obstacle: String, or an empty one if there is none.
    """
    extended = strategy.extended
    num_workers = extended.worker_group.num_workers
    if obstacle and extended.worker_group.is_chief:  # the others have the same
        user_code.warn(
            f"Each of the {num_workers} workers prepares all rows of this dataset, and "
            f"not only its own: {obstacle}.",
            once_for=extended,
        )


def check_batch_size(strategy: Any, batch_size: int | None, what: str) -> None:
    """Raise if a batch has fewer rows than there are replicas.

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


def steps_per_batch(strategy: Any, source: Any) -> float:
    """Return the number of steps for which one batch of a dataset lasts.

    With `AutoShardPolicy.OFF` more than one. Of a dataset that a user distributed by
    a function each replica is given a batch.
    """
    if isinstance(source, tf.data.Dataset):
        policy = source.options().experimental_distribute.auto_shard_policy
        shard = FileShard.of_dataset(source)
        has_own = policy == _POLICY.OFF or (shard and shard.num_workers > 1)
        return strategy.extended.worker_group.num_workers if has_own else 1
    by_replica = isinstance(source, _compat.DistributedDatasetsFromFunction)
    if by_replica and not isinstance(source, PerReplicaDataset):
        return 1 / strategy.extended.num_local
    return 1


def is_endless(source: Any) -> bool:
    """Return whether the data is a dataset that never ends."""
    cardinality = getattr(source, "cardinality", None)
    if callable(cardinality):
        cardinality = cardinality()
    return cardinality is not None and int(cardinality) == tf.data.INFINITE_CARDINALITY
