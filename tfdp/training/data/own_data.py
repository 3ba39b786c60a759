"""Data that a worker has for itself: by a policy of tf.data, or by files of its own."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.ground import _compat, user_code
from tfdp.training.data.element_specs import describe_spec
from tfdp.training.data.file_shards import FileShard
from tfdp.training.data.per_replica_dataset import (
    ReadOptions,
    distribute_divided,
    divide_and_prefetch,
    is_read_on_cpus,
)
from tfdp.training.data.rows import (
    divide_batches,
    flatten_local_replicas,
    rows_of_worker,
)
from tfdp.training.data.same_datasets import (
    check_not_sharded,
    check_same_elements,
    check_same_values,
    values_of_sources,
)
from tfdp.training.data.stages import (
    BATCHES,
    CHOOSE,
    MAPS,
    PASS_ON,
    rebuild_batch,
    stages_after_batch,
)

_POLICY = tf.data.experimental.AutoShardPolicy
# Stages that read no files themselves. With them an element would be read and prepared
# twice, to fill the buffer of a shuffle as many as that holds.
_AFTER_READING = {
    *(*BATCHES, *MAPS, *PASS_ON, *CHOOSE, "PaddedBatchDataset", "ShuffleDataset"),
    *("AssertCardinalityDataset", "CacheDataset", "FilterDataset"),
}


def distribute_by_policy(
    strategy: Any, dataset: Any, options: Any, policy: Any, stock: Any
) -> Any:
    """Shard as in stock, where the user chose a policy.

    With OFF each worker reads data of its own in global batches. A step takes as
    many rows of one as a worker has of a global batch, so that a batch lasts for as
    many steps as there are workers, as TensorFlow defines it.
    """
    worker_group = strategy.extended.worker_group
    values = values_of_sources(dataset)
    own = [
        _compat.shards_of(dataset),
        describe_spec(dataset.element_spec),
        values.fingerprints() if policy == _POLICY.FILE else {},
    ]
    topic = "a dataset's shards"
    told = worker_group.all_gather_values(topic, own)
    shards, specs, sources = zip(*told, strict=True)
    check_same_elements(worker_group, specs)
    if policy == _POLICY.OFF:
        return _of_own_batches(strategy, dataset, options)
    check_not_sharded(shards)
    check_same_values(worker_group, topic, sources, values)
    # One record in a batch: any two may have different shapes.
    records = _records_of(dataset).batch(1)
    probe = stock.experimental_distribute_dataset(records, options)
    if not worker_group.any("sharding by file", not _can_read(probe)):
        return stock.experimental_distribute_dataset(dataset, options)
    user_code.warn(
        "This dataset cannot be sharded by file: it needs at least one file for "
        "each worker. It is sharded by rows."
    )
    changed = tf.data.Options()
    changed.experimental_distribute.auto_shard_policy = _POLICY.DATA
    return strategy.experimental_distribute_dataset(
        dataset.with_options(changed), options
    )


def distribute_own_files(
    strategy: Any, dataset: Any, shard: FileShard, options: Any
) -> Any:
    """Return the distributed dataset of the files that are this worker's alone."""
    own = _own_batches(strategy, dataset)
    lengths = _check_shards(strategy, shard, dataset, own)
    if own is None or None in lengths:  # all alike: their steps have collectives
        return _of_own_batches(strategy, dataset, options)
    asks_workers = len(set(lengths)) > 1 or lengths[0] == tf.data.UNKNOWN_CARDINALITY
    local = list(range(strategy.extended.num_local))
    is_on_cpus = is_read_on_cpus(strategy, options)
    divide = divide_and_prefetch if is_on_cpus else divide_batches
    read_options = ReadOptions(asks_workers, same_rows=False)
    divided = divide(own, local, len(local))
    return distribute_divided(strategy, divided, options, read_options)


def _own_batches(strategy: Any, dataset: Any) -> tf.data.Dataset | None:
    """Return this worker's part of global batches of its own files."""
    return own_batches(
        dataset, strategy.extended.local_ranks, strategy.num_replicas_in_sync
    )


def own_batches(
    batches: tf.data.Dataset, ranks: list[int], num_replicas: int
) -> tf.data.Dataset | None:
    """Batch a worker's own rows by its part of a global batch, and not by all of it.

    So the workers' batches of a step are together one of the size that the user gave,
    and a worker holds no more rows than it needs.

    Args:
        batches: `tf.data.Dataset` of this worker's own rows, in global batches.
        ranks: List of ints, consecutive, those of this worker.
        num_replicas: Int, on all workers.

    Returns:
        `tf.data.Dataset`, or `None` where the pipeline does not end in `batch`, or in
        stages after it that do not look into batches.

    Example:

    >>> rows = tf.data.Dataset.range(5).batch(4).take(2)
    >>> [rows.tolist() for rows in own_batches(rows, [0, 1], 4).as_numpy_iterator()]
    [[0, 1], [2, 3]]
    """
    stage, after = stages_after_batch(batches)
    size = _compat.size_of_batch_stage(stage)
    if _compat.kind_of_part(stage) not in BATCHES or size is None:
        return None
    (rows,) = _compat.dataset_sources(stage)
    own = rebuild_batch(stage, rows, len(rows_of_worker(size, ranks, num_replicas)))
    for each in after:
        own = each.on(own)
    return own.with_options(batches.options())


def _check_shards(
    strategy: Any, shard: FileShard, dataset: Any, own: tf.data.Dataset | None
) -> list[int | None]:
    """Raise on all workers unless each has its own part of the same files.

    Returns:
        List of the batches of each worker, as `tf.data.Dataset.cardinality` gives them,
        or `None` where there are none of its own.
    """
    group = strategy.extended.worker_group
    policy = dataset.options().experimental_distribute.auto_shard_policy
    # What divides the files again.
    wrong = "" if policy in (_POLICY.AUTO, _POLICY.OFF) else str(policy)
    length = None if own is None else int(own.cardinality())
    facts = [shard.name, wrong, describe_spec(dataset.element_spec), length]
    told = group.all_gather_values("own files", facts)
    names, policies, specs, lengths = zip(*told, strict=True)
    if any(policies):
        group.leave()
        raise ValueError(
            "`shard_files` has divided the files among workers, and a policy would "
            "divide them again. Leave `auto_shard_policy` out. "
            f"Received: {next(filter(None, policies))}"
        )
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
    check_same_elements(group, specs)
    return list(lengths)


def num_own_steps(strategy: Any, source: Any) -> int | None:
    """Return the number of steps for which a worker's own files last.

    Returns:
        Int as `tf.data.Dataset.cardinality` gives it, or `None` for other data.
    """
    if not isinstance(source, tf.data.Dataset) or not FileShard.of_several(source):
        return None
    own = _own_batches(strategy, source)
    return None if own is None else int(own.cardinality())


def _of_own_batches(strategy: Any, dataset: Any, options: Any) -> Any:
    """Divide the batches that a worker reads among as many steps as workers."""
    num_replicas = strategy.num_replicas_in_sync
    divided = divide_batches(dataset, list(range(num_replicas)), num_replicas)
    local = flatten_local_replicas(divided)
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
