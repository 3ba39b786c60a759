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

from tfdp.communication.cluster.islands import Island
from tfdp.ground import _compat, user_code
from tfdp.ground.base import loops
from tfdp.training.data.batch_sizes import batch_size_of, sizes_of_batches
from tfdp.training.data.early_rows import Division, divide_early
from tfdp.training.data.file_shards import FileShard
from tfdp.training.data.other_rows import places_of_others
from tfdp.training.data.own_data import distribute_by_policy, distribute_own_files
from tfdp.training.data.per_replica_dataset import (
    PREFETCHED_STEPS,
    PerReplicaDataset,
    ReadOptions,
    distribute_divided,
    divide_and_prefetch,
    is_read_on_cpus,
)
from tfdp.training.data.rows import divide_batches, flatten_local_replicas, has_rows
from tfdp.training.data.same_datasets import compare

REBALANCE_REASON = (
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
    if not _has_rows(dataset):
        return stock.experimental_distribute_dataset(dataset, options)
    if (island := island_in_training()) is not None:
        dataset = rows_of_island(dataset, island)
    batch_size = batch_size_of(dataset)
    check_batch_size(strategy, batch_size, "The dataset's batch size")
    extended = strategy.extended
    policy = dataset.options().experimental_distribute.auto_shard_policy
    is_alone = extended.worker_group.num_workers == 1
    if (shard := FileShard.of_several(dataset)) is not None:
        return distribute_own_files(strategy, dataset, shard, options)
    if not is_alone and policy in (_POLICY.FILE, _POLICY.OFF):
        return distribute_by_policy(strategy, dataset, options, policy, stock)
    loops.note_batch_rows(batch_size or (sizes_of_batches(dataset) or {}).get("size"))
    return _distribute_rows(strategy, dataset, options, compare(strategy, dataset))


def _distribute_rows(
    strategy: Any, dataset: Any, options: Any, read_options: ReadOptions
) -> Any:
    """Return the distributed dataset of the local replicas' rows."""
    ranks, num_replicas = strategy.extended.local_ranks, strategy.num_replicas_in_sync
    divided = _divide_early(strategy, dataset, ranks)
    is_on_cpus = is_read_on_cpus(strategy, options)
    if divided is None:
        is_in_loop = loops.current() is not None and strategy.extended.balance is None
        finds_others = is_in_loop and num_replicas > 1
        others = places_of_others(dataset) if finds_others else ()
        divide = divide_and_prefetch if is_on_cpus else divide_batches
        divided = divide(dataset, ranks, num_replicas, others=others)
    elif is_on_cpus:
        divided = divided.prefetch(PREFETCHED_STEPS)
    return distribute_divided(strategy, divided, options, read_options, dataset)


def _divide_early(
    strategy: Any, dataset: tf.data.Dataset, ranks: list[int]
) -> tf.data.Dataset | None:
    """Divide a dataset before its rows are prepared, where other workers have some."""
    extended = strategy.extended
    if extended.worker_group.num_workers == 1:
        return None
    division = divide_early(dataset, ranks, strategy.num_replicas_in_sync)
    if division.dataset is not None and extended.balance is not None:
        division = Division(obstacle=REBALANCE_REASON)
    warn_not_split_early(strategy, division.obstacle)
    return division.dataset


def warn_not_split_early(strategy: Any, obstacle: str) -> None:
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


def island_in_training() -> Island | None:
    """Return the island whose `fit` is given its training data, or `None`."""
    is_for_training = loops.awaiting_training_data() is not None
    return Island.from_environment() if is_for_training else None


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
    return flatten_local_replicas(enough).with_options(dataset.options())


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


def _has_rows(dataset: Any) -> bool:
    return isinstance(dataset, tf.data.Dataset) and any(
        map(has_rows, tf.nest.flatten(dataset.element_spec))
    )


def steps_per_batch(strategy: Any, source: Any) -> float:
    """Return the number of steps for which one batch of a dataset lasts.

    With `AutoShardPolicy.OFF` more than one. Of a dataset that a user distributed by
    a function each replica is given a batch.
    """
    if isinstance(source, tf.data.Dataset):
        policy = source.options().experimental_distribute.auto_shard_policy
        has_own = policy == _POLICY.OFF or FileShard.of_several(source) is not None
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
