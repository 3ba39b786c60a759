"""Distribution of a dataset: every replica gets its rows of every global batch.

Stock tf.distribute shards a dataset by file or by element and then divides batches.
This requires enough files, gives the last partial batch to the first replicas, and
synchronizes all workers at every step to find out whether any has data left. Here every
worker reads the same global batches, in the same order, and takes the rows of its
replicas: the row counts of any two replicas differ by at most one, and all workers
reach the end of the data at the same step.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import tensorflow as tf

from tfdp.communication.coordination.facts import compare
from tfdp.ground import user_code
from tfdp.ground._compat import keras_data, tf_data
from tfdp.ground.base import loops
from tfdp.ground.base.feature import JobPart, job_part
from tfdp.training.data.batch_sizes import batch_size_of, sizes_of_batches
from tfdp.training.data.early_rows import Division, batch_local_rows, divide_early
from tfdp.training.data.file_shards import FileShard
from tfdp.training.data.fingerprints import ArrayValues
from tfdp.training.data.other_rows import indices_of_other_rows
from tfdp.training.data.per_replica_dataset import (
    PREFETCHED_STEPS,
    PerReplicaDataset,
    ReadOptions,
    distribute_divided,
    divide_and_prefetch,
    is_read_on_cpus,
)
from tfdp.training.data.rows import divide_batches, flatten_local_replicas, has_rows
from tfdp.training.data.same_datasets import (
    ENDLESS,
    Length,
    compare_datasets,
    elements_fact,
    list_by_worker,
    values_of_sources,
    warn_of_shards,
)
from tfdp.training.data.stages import BATCHES, MAPS, PASS_THROUGH, SELECTIONS
from tfdp.training.data.value_differences import values_fact

REBALANCE_REASON = (
    "with `--rebalance` it changes which rows these are, while they are read ahead"
)
# The order of a `shuffle` that reshuffles in each iteration depends on earlier reads,
# which workers that join later have not made. So the dataset of such a `shuffle` is
# kept with the generation of the cluster that it was first distributed for, and is
# refused in any other.
_generations: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_POLICY = tf.data.experimental.AutoShardPolicy
# To check that there are enough files, one record is read from the pipeline without
# these stages. They read no files, but `map` would prepare elements, and `shuffle`
# would fill its buffer.
_STAGES_AFTER_READING = {
    *(
        *BATCHES,
        *MAPS,
        *PASS_THROUGH,
        *SELECTIONS,
        "PaddedBatchDataset",
        "ShuffleDataset",
    ),
    *("AssertCardinalityDataset", "CacheDataset", "FilterDataset"),
}


def distribute(strategy: Any, dataset: Any, options: Any, stock: Any) -> Any:
    """Distribute the global batches of a dataset.

    Args:
        strategy: A tfdp strategy.
        dataset: `tf.data.Dataset`, batched by the global batch size.
        options: `tf.distribute.InputOptions` or `None`.
        stock: `super()` of the strategy, TensorFlow's own implementation, which
            distributes datasets without rows and those sharded by file.

    Returns:
        A `tf.distribute.DistributedDataset`.

    Raises:
        ValueError: If a batch has fewer rows than replicas exist, or if workers would
            shuffle differently.
    """
    if loops.current() is None and strategy.extended.continues_after_loss:
        _check_order(strategy, dataset)
    if not _has_rows(dataset):
        return stock.experimental_distribute_dataset(dataset, options)
    if (part := part_in_training()) is not None:
        dataset = rows_of_part(dataset, part)
    batch_size = batch_size_of(dataset)
    check_batch_size(strategy, batch_size, "The dataset's batch size")
    extended = strategy.extended
    policy = dataset.options().experimental_distribute.auto_shard_policy
    has_one_worker = extended.worker_group.num_workers == 1
    if (shard := FileShard.of_divided_files(dataset)) is not None:
        return _distribute_local_files(strategy, dataset, shard, options)
    if not has_one_worker and policy in (_POLICY.FILE, _POLICY.OFF):
        return _distribute_by_policy(strategy, dataset, options, policy, stock)
    loops.record_batch_rows(batch_size or (sizes_of_batches(dataset) or {}).get("size"))
    return _distribute_rows(
        strategy, dataset, options, compare_datasets(strategy, dataset)
    )


def _check_order(strategy: Any, dataset: Any) -> None:
    """Raise if a shuffle would continue an order from before the workers changed.

    Each `shuffle` with a new order in each iteration is recorded with the cluster for
    which it is first distributed.

    Args:
        strategy: A tfdp strategy, whose workers may have changed.
        dataset: `tf.data.Dataset`.

    Raises:
        ValueError: If a `shuffle` with a new order in each iteration was distributed
            before the change.
    """
    generation = strategy.extended.generation
    for part in tf_data.dataset_inputs(dataset):
        if not tf_data.reshuffles_itself(part):
            continue
        if _generations.setdefault(part, generation) != generation:
            raise ValueError(
                "A `shuffle` that is another in each iteration continues its order "
                "from before the workers changed. Create the dataset anew after "
                "`tfdp.WorkersChanged`, or shuffle with "
                "`reshuffle_each_iteration=False`."
            )


def _distribute_rows(
    strategy: Any, dataset: Any, options: Any, read_options: ReadOptions
) -> Any:
    """Distribute a dataset that is the same on all workers: each takes its rows.

    Args:
        strategy: A tfdp strategy.
        dataset: `tf.data.Dataset` of global batches.
        options: The user's `tf.distribute.InputOptions`, or `None`.
        read_options: `ReadOptions`, the result of `compare_datasets`.

    Returns:
        A distributed dataset.
    """
    ranks, num_replicas = strategy.extended.local_ranks, strategy.num_replicas_in_sync
    divided = _divide_early(strategy, dataset, ranks)
    is_on_cpus = is_read_on_cpus(strategy, options)
    if divided is None:
        is_in_loop = loops.current() is not None and strategy.extended.balance is None
        finds_others = is_in_loop and num_replicas > 1
        others = indices_of_other_rows(dataset) if finds_others else ()
        divide = divide_and_prefetch if is_on_cpus else divide_batches
        divided = divide(dataset, ranks, num_replicas, others=others)
    elif is_on_cpus:
        divided = divided.prefetch(PREFETCHED_STEPS)
    return distribute_divided(strategy, divided, options, read_options, dataset)


def _distribute_by_policy(
    strategy: Any, dataset: Any, options: Any, policy: Any, stock: Any
) -> Any:
    """Distribute a dataset with the auto-shard policy `FILE` or `OFF`.

    With `FILE` stock tf.distribute shards the files; if they are fewer than workers,
    the user is warned, and the dataset is divided by rows. With `OFF` each worker reads
    its own data in global batches. A step takes one worker's share of rows from such a
    batch, so a batch supplies as many steps as the job has workers, as TensorFlow
    defines it.

    Args:
        strategy: A tfdp strategy.
        dataset: `tf.data.Dataset` of global batches.
        options: `tf.distribute.InputOptions` or `None`.
        policy: `AutoShardPolicy.FILE` or `AutoShardPolicy.OFF`.
        stock: `super()` of the strategy, see `distribute`.

    Returns:
        A distributed dataset.
    """
    worker_group = strategy.extended.worker_group
    is_by_file = policy == _POLICY.FILE
    values = values_of_sources(dataset) if is_by_file else ArrayValues({})
    topic = "a dataset's shards"
    facts = [elements_fact(dataset), values_fact(worker_group, topic, values)]
    shards = compare(worker_group, topic, facts, tf_data.shards_of(dataset))
    if policy == _POLICY.OFF:
        return _distribute_local_batches(strategy, dataset, options)
    warn_of_shards(shards)
    # Records may have different shapes, which a batch of several would reject. So each
    # batch has one record.
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


def _distribute_local_files(
    strategy: Any, dataset: Any, shard: FileShard, options: Any
) -> Any:
    """Distribute a dataset of the files that only this worker reads.

    Args:
        strategy: A tfdp strategy.
        dataset: `tf.data.Dataset` in batches of the global size.
        shard: `FileShard` that the dataset reads. All workers raise unless they read
            different shards of the same files.
        options: `tf.distribute.InputOptions` or `None`.

    Returns:
        A distributed dataset. Its steps take this worker's rows, rebatched to its share
        of a global batch. If a worker cannot rebatch, all have the steps of
        `_distribute_local_batches`.
    """
    local_batches = _batch_local_rows(strategy, dataset)
    lengths = _check_shards(strategy, shard, dataset, local_batches)
    # All workers must run steps of the same kind, since steps contain collectives. If
    # one worker cannot rebatch its rows, none does.
    if local_batches is None or None in lengths:
        return _distribute_local_batches(strategy, dataset, options)
    syncs_end_of_data = (
        len(set(lengths)) > 1 or lengths[0] == tf.data.UNKNOWN_CARDINALITY
    )
    local = list(range(strategy.extended.num_local))
    is_on_cpus = is_read_on_cpus(strategy, options)
    divide = divide_and_prefetch if is_on_cpus else divide_batches
    read_options = ReadOptions(syncs_end_of_data, same_rows=False)
    divided = divide(local_batches, local, len(local))
    return distribute_divided(strategy, divided, options, read_options)


def _batch_local_rows(strategy: Any, dataset: Any) -> tf.data.Dataset | None:
    """Batch the rows of this worker's files by its share of a global batch.

    Args:
        strategy: A tfdp strategy.
        dataset: `tf.data.Dataset` in batches of the global size.

    Returns:
        `tf.data.Dataset`, or `None` if the pipeline does not end in `batch`.
    """
    return batch_local_rows(
        dataset, strategy.extended.local_ranks, strategy.num_replicas_in_sync
    )


def _check_shards(
    strategy: Any, shard: FileShard, dataset: Any, local_batches: tf.data.Dataset | None
) -> list[int | None]:
    """Raise on all workers unless each has its own part of the same files.

    Args:
        strategy: A tfdp strategy.
        shard: `FileShard` that this worker reads.
        dataset: `tf.data.Dataset` of the user, in batches of the global size.
        local_batches: `tf.data.Dataset` in batches of this worker's share, or `None` if
            the pipeline cannot be rebatched.

    Returns:
        List with an item for each worker: the cardinality of its `local_batches`, or
        `None` if it has none.
    """
    group = strategy.extended.worker_group
    policy = dataset.options().experimental_distribute.auto_shard_policy
    # Policies other than `AUTO` and `OFF` are errors: they would divide this worker's
    # files among the workers again.
    conflicting_policy = "" if policy in (_POLICY.AUTO, _POLICY.OFF) else str(policy)
    length = None if local_batches is None else int(local_batches.cardinality())
    extra = [shard.name, conflicting_policy, length]
    gathered = compare(group, "own files", [elements_fact(dataset)], extra)
    names, policies, lengths = zip(*gathered, strict=True)
    if any(policies):
        raise ValueError(
            "`shard_files` has divided the files among workers, and a policy would "
            "divide them again. Remove `auto_shard_policy`. Received: "
            f"{next(filter(None, policies))}",
        )
    expected = [
        FileShard(group.num_workers, rank, shard.digest).name
        for rank in range(group.num_workers)
    ]
    if list(names) != expected:
        raise ValueError(
            "The datasets of the workers are not the parts of one set of files. Call "
            "`shard_files` with the same arguments on every worker, for the strategy "
            f"that trains. Received: {list_by_worker(names)}",
        )
    return list(lengths)


def _distribute_local_batches(strategy: Any, dataset: Any, options: Any) -> Any:
    """Distribute data that each worker reads alone, in global batches.

    A step takes one part of a batch for each local replica: the rows that one replica
    has of a global batch. So a batch supplies as many steps as the job has workers.

    Args:
        strategy: A tfdp strategy.
        dataset: `tf.data.Dataset` of this worker, in batches of the global size.
        options: The user's `tf.distribute.InputOptions`, or `None`.

    Returns:
        A distributed dataset.
    """
    num_replicas = strategy.num_replicas_in_sync
    divided = divide_batches(dataset, list(range(num_replicas)), num_replicas)
    local = flatten_local_replicas(divided)
    return strategy.distribute_datasets_from_function(lambda _: local, options)


def _records_of(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return the part of a pipeline that reads files, without the stages after it."""
    while tf_data.kind_of_stage(dataset) in _STAGES_AFTER_READING:
        (dataset,) = tf_data.dataset_sources(dataset)
    return dataset


def _can_read(distributed: Any) -> bool:
    """Return whether a distributed dataset yields an element without an error.

    TensorFlow raises one if there are fewer files than workers.
    """
    try:
        for _ in tf_data.local_dataset(distributed).take(1):
            pass
    except tf.errors.OpError:
        return False
    return True


def _divide_early(
    strategy: Any, dataset: tf.data.Dataset, ranks: list[int]
) -> tf.data.Dataset | None:
    """Divide a dataset before `map` prepares its rows, if there are several workers.

    The user is warned if all workers prepare all rows.

    Args:
        strategy: A tfdp strategy.
        dataset: `tf.data.Dataset` of global batches.
        ranks: List of consecutive ints, the ranks of this worker's replicas.

    Returns:
        `tf.data.Dataset` of pairs: a tuple with the rows of each rank, and the number
        of rows of the global batch. `None` if the division is impossible or saves
        nothing.
    """
    extended = strategy.extended
    if extended.worker_group.num_workers == 1:
        return None
    division = divide_early(dataset, ranks, strategy.num_replicas_in_sync)
    if division.dataset is not None and extended.balance is not None:
        division = Division(obstacle=REBALANCE_REASON)
    warn_not_split_early(strategy, division.obstacle)
    return division.dataset


def warn_not_split_early(strategy: Any, obstacle: str) -> None:
    """Warn why each worker prepares all rows, once, on the first worker.

    Args:
        strategy: A tfdp strategy.
        obstacle: String, the reason and the remedy; empty for no warning.
    """
    extended = strategy.extended
    num_workers = extended.worker_group.num_workers
    # All workers read the same data, so mostly the same obstacle keeps each of them
    # from preparing only its own rows. One warning, by the first worker, is enough.
    if obstacle and extended.worker_group.is_chief:
        user_code.warn(
            f"Each of the {num_workers} workers prepares all rows of this dataset, and "
            f"not only its own: {obstacle}.",
            once_for=extended,
        )


def part_in_training() -> JobPart | None:
    """Return the `JobPart` of this process while `fit` prepares its training data.

    A `JobPart` is a part of a job, such as a DiLoCo island, that trains on its rows of
    each batch. The result is `None` in a job without such parts, and at other times.
    """
    return None if loops.awaiting_training_data() is None else job_part()


def rows_of_part(dataset: tf.data.Dataset, part: JobPart) -> tf.data.Dataset:
    """Take the rows of each batch on which one separately trained job part trains.

    A batch with fewer rows than parts exist is left out by all parts, so that they run
    the same number of steps.

    Args:
        dataset: `tf.data.Dataset` of batches.
        part: `JobPart`.

    Returns:
        `tf.data.Dataset` of smaller batches.
    """
    ranks = [part.index]
    divided = divide_early(dataset, ranks, part.count).dataset
    if divided is None:
        divided = divide_batches(dataset, ranks, part.count)
    enough = divided.filter(lambda rows, total: total >= float(part.count))
    return flatten_local_replicas(enough).with_options(dataset.options())


def check_batch_size(strategy: Any, batch_size: int | None, what: str) -> None:
    """Raise if a batch has fewer rows than replicas exist.

    Args:
        strategy: A tfdp strategy.
        batch_size: Int, rows of a global batch, or `None` if unknown.
        what: String, the subject of the message, such as "The dataset's batch size".

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
    """Return whether data is a `tf.data.Dataset` whose elements have rows."""
    return isinstance(dataset, tf.data.Dataset) and any(
        map(has_rows, tf.nest.flatten(dataset.element_spec))
    )


def length_of(strategy: Any, adapter: Any) -> Length:
    """Return the number of steps for which this worker has data, as a `Length`.

    With `AutoShardPolicy.OFF` a batch supplies several steps. With a dataset from the
    user's `distribute_datasets_from_function` a step takes a batch for each replica.

    Args:
        strategy: A tfdp strategy.
        adapter: Data adapter of Keras.
    """
    source = keras_data.source_of(adapter)
    steps, steps_per_batch, local_batches = adapter.num_batches, 1.0, None
    if isinstance(source, tf.data.Dataset):
        shard = FileShard.of_divided_files(source)
        local_batches = _batch_local_rows(strategy, source) if shard else None
        policy = source.options().experimental_distribute.auto_shard_policy
        if local_batches is None and (shard or policy == _POLICY.OFF):
            steps_per_batch = strategy.extended.worker_group.num_workers
    elif isinstance(source, tf_data.DistributedDatasetsFromFunction):
        is_read_on_cpus = isinstance(source, PerReplicaDataset)
        steps_per_batch = 1 if is_read_on_cpus else 1 / strategy.extended.num_local
    if local_batches is not None:
        num_batches = int(local_batches.cardinality())
        steps = num_batches if num_batches >= 0 else None
    elif steps is not None:
        steps = math.ceil(steps * steps_per_batch)
    if steps is None and is_endless(source):
        steps = ENDLESS
    if not keras_data.holds_arrays(adapter):
        return Length(steps, steps_per_batch)
    rows = int(adapter.batch_size), int(adapter.partial_batch_size or 0)
    return Length(steps, steps_per_batch, *rows)


def is_endless(source: Any) -> bool:
    """Return whether data is a `tf.data.Dataset` that repeats indefinitely."""
    cardinality = getattr(source, "cardinality", None)
    if callable(cardinality):
        cardinality = cardinality()
    return cardinality is not None and int(cardinality) == tf.data.INFINITE_CARDINALITY
