"""Distribution of a dataset: every replica gets its rows of every global batch.

Stock tf.distribute shards a dataset by file or by element and then divides
batches, which needs files enough, gives the last partial batch to the first
replicas, and asks all workers at every step whether any has data left.
Here every worker reads the same global batches, in the same order, and takes
the rows of its replicas: rank r of R has rows that differ in number by one at
most, and all workers see the end of the data at the same step.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import tensorflow as tf

from tfdp import _compat, user_code
from tfdp.data.batch_sizes import batch_size_of
from tfdp.data.early_rows import BATCHES, Division, divide_early
from tfdp.data.element_specs import describe_spec
from tfdp.data.file_shards import FileShard
from tfdp.data.own_batches import own_batches
from tfdp.data.per_replica_dataset import (
    PREFETCHED_STEPS,
    PerReplicaDataset,
    ReadOptions,
    divide_and_prefetch,
)
from tfdp.data.raw_elements import CHOOSE, MAPS, PASS_ON
from tfdp.data.rows import divide_batches, in_turn, rows_of_ranks
from tfdp.data.same_datasets import (
    check_not_sharded,
    check_same_elements,
    compare,
)

OF_BALANCE = (
    "with `--rebalance` it changes which rows these are, while they are read ahead"
)
_POLICY = tf.data.experimental.AutoShardPolicy
# Stages that read no files themselves. With them an element would be read and prepared
# twice, to fill the buffer of a shuffle as many as that holds.
_AFTER_READING = {
    *(*BATCHES, *MAPS, *PASS_ON, *CHOOSE, "PaddedBatchDataset", "ShuffleDataset"),
    *("AssertCardinalityDataset", "CacheDataset", "FilterDataset"),
}


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
    check_batch_size(strategy, batch_size_of(dataset), "The dataset's batch size")
    extended = strategy.extended
    policy = dataset.options().experimental_distribute.auto_shard_policy
    is_alone = extended.worker_group.num_workers == 1
    shard = FileShard.of_dataset(dataset)
    if shard is not None and shard.num_workers > 1:
        return _distribute_own_files(strategy, dataset, shard, options)
    if not is_alone and policy in (_POLICY.FILE, _POLICY.OFF):
        return _distribute_by_policy(strategy, dataset, options, policy, stock)
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
    if _reads_on_cpus(strategy) and options is None:
        if divided is None:
            divided = divide_and_prefetch(dataset, ranks, num_replicas)
        else:
            divided = divided.prefetch(PREFETCHED_STEPS)
    elif divided is None:
        divided = divide_batches(dataset, ranks, num_replicas)
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
    return _is_on_cpus(strategy) or strategy.extended.balance is not None


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
    is_first = extended.worker_group.rank == 0  # the others have the same
    if obstacle and is_first and obstacle not in extended.told:
        extended.told.add(obstacle)
        user_code.warn(
            f"Each of the {num_workers} workers prepares all rows of this dataset, and "
            f"not only its own: {obstacle}."
        )


def _is_on_cpus(strategy: Any) -> bool:
    return strategy.extended.group.backend != "nccl" and not _has_gpus(strategy)


def _has_gpus(strategy: Any) -> bool:
    devices = strategy.extended.worker_devices
    return any(_compat.device_type(device) == "GPU" for device in devices)


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


def _distribute_by_policy(
    strategy: Any, dataset: Any, options: Any, policy: Any, stock: Any
) -> Any:
    """Shard as in stock, where the user chose a policy.

    With OFF each worker reads data of its own in global batches. A step takes as
    many rows of one as a worker has of a global batch, so that a batch lasts for as
    many steps as there are workers, as TensorFlow defines it.
    """
    worker_group = strategy.extended.worker_group
    own = [_compat.shards_of(dataset), describe_spec(dataset.element_spec)]
    texts = worker_group.all_gather("a dataset's shards", json.dumps(own))
    shards, specs = zip(*map(json.loads, texts), strict=True)
    check_same_elements(worker_group, specs)
    if policy == _POLICY.OFF:
        return _of_own_batches(strategy, dataset, options)
    check_not_sharded(shards)
    # One record in a batch: any two may have different shapes.
    records = _records_of(dataset).batch(1)
    probe = stock.experimental_distribute_dataset(records, options)
    if not worker_group.any("sharding by file", not _can_read(probe)):
        return stock.experimental_distribute_dataset(dataset, options)
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


def _distribute_own_files(
    strategy: Any, dataset: Any, shard: FileShard, options: Any
) -> Any:
    """Return the distributed dataset of the files that are this worker's alone."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy not in (_POLICY.AUTO, _POLICY.OFF):
        raise ValueError(
            "`shard_files` has divided the files among workers, and a policy would "
            "divide them again. Leave `auto_shard_policy` out. "
            f"Received: {policy}"
        )
    own = _own_batches(strategy, dataset)
    asks_workers = _check_shards(strategy, shard, own)
    if own is None:
        return _of_own_batches(strategy, dataset, options)
    local = list(range(strategy.extended.num_local))
    if _is_on_cpus(strategy) and options is None:
        divided = divide_and_prefetch(own, local, len(local))
        read_options = ReadOptions(asks_workers, same_rows=False)
        return PerReplicaDataset(divided, strategy, read_options)
    rows = rows_of_ranks(own, local, len(local))
    distributed = strategy.distribute_datasets_from_function(lambda _: rows, options)
    if asks_workers:
        return distributed
    return _compat.without_partial_batches(distributed)


def _own_batches(strategy: Any, dataset: Any) -> tf.data.Dataset | None:
    """Return this worker's part of global batches of its own files."""
    first, num_local = strategy.extended.first_rank, strategy.extended.num_local
    ranks = list(range(first, first + num_local))
    return own_batches(dataset, ranks, strategy.num_replicas_in_sync)


def _check_shards(strategy: Any, shard: FileShard, own: tf.data.Dataset | None) -> bool:
    """Raise on all workers unless each has its own part of the same files.

    Returns:
        Bool, whether some workers may run out of data before others.
    """
    group = strategy.extended.worker_group
    length = tf.data.UNKNOWN_CARDINALITY if own is None else int(own.cardinality())
    texts = group.all_gather("own files", json.dumps([shard.name, length]))
    names, lengths = zip(*map(json.loads, texts), strict=True)
    expected = [
        FileShard(group.num_workers, rank, shard.digest).name
        for rank in range(group.num_workers)
    ]
    if list(names) != expected:
        group.leave()
        raise ValueError(
            "These are not the parts of one set of files. Call `shard_files` alike on "
            "every worker, for the strategy that trains. Received: "
            + ", ".join(f"{name} on worker {r}" for r, name in enumerate(names))
        )
    return len(set(lengths)) > 1 or lengths[0] == tf.data.UNKNOWN_CARDINALITY


def num_own_steps(strategy: Any, source: Any) -> int | None:
    """Return the number of steps for which a worker's own files last.

    Returns:
        Int as `tf.data.Dataset.cardinality` gives it, or `None` for other data.
    """
    if not isinstance(source, tf.data.Dataset):
        return None
    shard = FileShard.of_dataset(source)
    if shard is None or shard.num_workers == 1:
        return None
    own = _own_batches(strategy, source)
    return None if own is None else int(own.cardinality())


def _of_own_batches(strategy: Any, dataset: Any, options: Any) -> Any:
    """Divide the batches that a worker reads among as many steps as workers."""
    num_replicas = strategy.num_replicas_in_sync
    local = rows_of_ranks(dataset, list(range(num_replicas)), num_replicas)
    return strategy.distribute_datasets_from_function(lambda _: local, options)


def _records_of(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return the part of a pipeline that reads files, without what is made of them."""
    while _compat.kind_of_part(dataset) in _AFTER_READING:
        (dataset,) = _compat.dataset_sources(dataset)
    return dataset


def _can_read(distributed: Any) -> bool:
    """Read an element, upon which TensorFlow raises if there are too few files."""
    try:
        for _ in _compat.local_dataset(distributed).take(1):
            pass
    except tf.errors.OpError:
        return False
    return True
