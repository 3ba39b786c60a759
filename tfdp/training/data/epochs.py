"""Epochs: the number of steps and the shuffle order, the same on all workers."""

from __future__ import annotations

import hashlib
import random
import types
import weakref
from collections.abc import Callable
from typing import Any

import keras

from tfdp.communication.coordination.data_wait import data_wait
from tfdp.communication.coordination.facts import compare
from tfdp.communication.coordination.progress import progress
from tfdp.ground import user_code
from tfdp.ground._compat import keras_data, random_seeds, tf_data
from tfdp.ground.base import loops
from tfdp.ground.base.context import is_tfdp
from tfdp.ground.base.feature import JobPart
from tfdp.training.data import position as data_position
from tfdp.training.data.batch_labels import class_labels
from tfdp.training.data.checks import source_name
from tfdp.training.data.determinism import SeededShuffle, broadcast_seed, new_seed
from tfdp.training.data.distribute import (
    REBALANCE_REASON,
    is_endless,
    length_of,
    part_in_training,
    rows_of_part,
    warn_not_split_early,
)
from tfdp.training.data.fingerprints import ArrayValues
from tfdp.training.data.loader_rows import rows_of_loader
from tfdp.training.data.own_rows import (
    StoredArraysAdapter,
    has_stored_arrays,
    new_label_record,
    rows_of_py_dataset,
    supports_row_reads,
)
from tfdp.training.data.per_replica_dataset import PerReplicaDataset
from tfdp.training.data.position import DataPosition
from tfdp.training.data.same_datasets import (
    Length,
    agreed_steps,
    dropped_batches,
    list_by_worker,
    stops_at_shortest,
)
from tfdp.training.data.uneven_inputs import (
    CountedIterator,
    ShortestIterator,
    StockDataset,
    is_counting,
)
from tfdp.training.data.value_differences import values_fact
from tfdp.training.replicas.random_seed import stand_in_seed

# Messages of the watchdog name the data that a loop reads. When an epoch begins, only
# Keras's iterator is known, so the name of its data is kept here for each iterator.
_source_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def make_iterator(original: Callable, iterator: Any, *args: Any, **kwargs: Any) -> None:
    """Initialize an epoch iterator, with the same steps and order on all workers.

    Args:
        original: Keras's `__init__` of the iterator, which this function replaces.
        iterator: Epoch iterator of Keras to initialize.
        *args: Positional arguments of `original`.
        **kwargs: Keyword arguments of `original`.
    """
    strategy: Any = kwargs.get("distribute_strategy", args[0] if args else None)
    has_workers = is_tfdp(strategy) and strategy.extended.worker_group.num_workers > 1
    if is_tfdp(strategy):
        _source_names[iterator] = source_name(kwargs.get("x"))
        progress.set_source(_source_names[iterator])
    if has_workers:
        _seed_py_dataset_order(strategy, kwargs)
        kwargs = _with_local_rows(strategy, kwargs)
    # Keras's `__init__` reads a generator's first batch, which counts as a data wait.
    with data_wait.reading():
        original(iterator, *args, **kwargs)
    if has_workers:
        _agree_on_end(
            strategy,
            iterator,
            stops=stops_at_shortest(strategy),
            by_weight=_is_divided_by_weight(strategy, iterator),
        )
    if is_tfdp(strategy):
        _warn_of_no_end(strategy, iterator)
        _count_reads(strategy, iterator)
    part = part_in_training() if is_tfdp(strategy) else None
    loops.record_data_read()
    if keras_data.holds_arrays(iterator.data_adapter):
        loops.record_batch_rows(iterator.data_adapter.batch_size)

    def of_epoch() -> Any:
        """Distribute the dataset of the adapter for the next epoch, and return it."""
        return _distribute_adapter(strategy, iterator, part)

    is_shuffled = keras_data.shuffles_arrays(iterator.data_adapter)
    has_seed = random_seeds.global_seed() not in (None, stand_in_seed())
    if part is not None and is_shuffled and not has_seed:
        # Separately trained parts of a job need the same order, because each takes its
        # rows of every batch.
        keras_data.set_dataset_of_epoch(iterator, SeededShuffle(part.seed, of_epoch))
    if (position := data_position.current()) is not None:
        _track_position(position, strategy, iterator, of_epoch)


def _track_position(
    position: DataPosition, strategy: Any, iterator: Any, of_epoch: Callable
) -> None:
    """Let a `DataPosition` record what one epoch iterator of its `fit` reads.

    The first iterator of a `fit` is that of the training data. If it would shuffle
    arrays without a seed, it gets a `SeededShuffle`, whose order a rerun can repeat.
    Every later iterator is one of the validation data.

    Args:
        position: `DataPosition` of that `fit`.
        strategy: Strategy of the model.
        iterator: Epoch iterator of Keras.
        of_epoch: Callable that returns the dataset of the next epoch.
    """
    if position.iterator is not None:
        position.attach_validation(iterator)
        return
    if keras_data.shuffles_arrays(iterator.data_adapter) and not _has_order(iterator):
        shuffle = SeededShuffle(new_seed(), of_epoch)
        keras_data.set_dataset_of_epoch(iterator, shuffle)
    worker_group = getattr(strategy.extended, "worker_group", None)
    position.attach(iterator, stand_in_seed(), worker_group)


def _count_reads(strategy: Any, iterator: Any) -> None:
    """Replace TensorFlow's own distributed dataset by one that counts its reads.

    It is replaced only if `count_reads` was called in this process, and if its reads do
    not wait for other workers.

    Args:
        strategy: A tfdp strategy.
        iterator: Epoch iterator of Keras.
    """
    dataset = keras_data.distributed_dataset(iterator)
    is_stock = isinstance(dataset, tf_data.DistributedDatasetsFromFunction)
    if not is_counting() or not is_stock or isinstance(dataset, PerReplicaDataset):
        return
    has_one_worker = strategy.extended.worker_group.num_workers == 1
    # A read that synchronizes the end of the data also waits for other workers, which
    # must not count as waiting for data.
    if has_one_worker or not tf_data.syncs_end_of_data(dataset):
        keras_data.set_distributed_dataset(
            iterator, StockDataset(dataset, CountedIterator)
        )


def _is_divided_by_weight(strategy: Any, iterator: Any) -> bool:
    """Return whether the load balancer divides batches; warn if it cannot.

    It is `True` only for training data, in global batches that tfdp divides.
    """
    is_for_training = loops.awaiting_training_data() is not None
    if strategy.extended.balance is None or not is_for_training:
        return False
    dataset = keras_data.distributed_dataset(iterator)
    if isinstance(dataset, PerReplicaDataset) and dataset.batches is not None:
        return True
    user_code.warn(
        "`--rebalance` has no effect on this data: it is divided among workers by the "
        "dataset's own sharding, and not by tfdp. Only global batches, with "
        "`AutoShardPolicy.AUTO` or `DATA`, can be rebalanced."
    )
    return False


def _agree_on_end(
    strategy: Any, iterator: Any, *, stops: bool, by_weight: bool
) -> None:
    """Give an iterator's epochs the same last step on all workers.

    Arrays that Keras shuffles also get the same order on all workers. The user is
    warned of batches that are dropped.

    Args:
        strategy: A tfdp strategy of several workers.
        iterator: Epoch iterator of Keras.
        stops: Bool, whether an epoch ends when the first worker runs out of data, and
            not the last.
        by_weight: Bool, whether each step divides its batch by the weights of the load
            balancer.
    """
    lengths = _gather_lengths(strategy, iterator.data_adapter)
    if stops:
        _warn_of_dropped_batches(strategy.extended, lengths)
    _agree_on_steps(iterator, agreed_steps(lengths, stops=stops))

    def with_common_end(dataset: Any) -> Any:
        """Return a distributed dataset that ends for all workers at the agreed step."""
        return _with_common_end(dataset, lengths, stops=stops, by_weight=by_weight)

    keras_data.set_distributed_dataset(
        iterator, with_common_end(keras_data.distributed_dataset(iterator))
    )
    _seed_array_order(strategy, iterator, with_common_end)


def begin_epoch(original: Callable, iterator: Any) -> Any:
    """Record for the watchdog that a loop begins an epoch, and the name of its data.

    The name is the one that `source_name` gave the data when the iterator was created.

    Args:
        original: Callable, Keras's method that begins the epoch.
        iterator: Epoch iterator of Keras, the argument of `original`.

    Returns:
        The result of `original`.
    """
    progress.epoch_begins()
    progress.set_source(_source_names.get(iterator, ""))
    return original(iterator)


def next_step(original: Callable, iterator: Any) -> Any:
    """Read the data of a loop's next step, and record the step for the watchdog.

    Args:
        original: Callable, Keras's `__next__` of the iterator.
        iterator: Epoch iterator of Keras, the argument of `original`.

    Returns:
        The result of `original`: the step's first and last batch numbers, and its data.
    """
    step = original(iterator)
    progress.step_begins(step[0])
    return step


def _seed_array_order(strategy: Any, iterator: Any, with_common_end: Callable) -> None:
    """Shuffle the user's arrays alike on all workers.

    If the user has seeded all workers alike, nothing changes. Otherwise the first
    worker draws a seed for all, and each epoch has another seed: TensorFlow repeats the
    permutation of a seeded dataset, and without a seed users expect a new order in each
    epoch.

    Args:
        strategy: A tfdp strategy of several workers.
        iterator: Epoch iterator of Keras.
        with_common_end: Callable that takes a distributed dataset and returns one that
            ends for all workers at the same step.
    """
    if not keras_data.shuffles_arrays(iterator.data_adapter):
        return
    extended = strategy.extended
    are_seeded_alike = extended.worker_group.all_equal(
        "shuffling", random_seeds.random_state()
    )
    if are_seeded_alike and random_seeds.global_seed() != stand_in_seed():
        # The user has seeded all workers alike, so their shuffles agree already.
        return
    if not are_seeded_alike:
        _warn_of_seeds()
    first_seed = broadcast_seed(extended.worker_group)

    def of_epoch() -> Any:
        """Distribute the dataset of the next epoch, with the agreed end; return it."""
        return with_common_end(_distribute_adapter(strategy, iterator))

    keras_data.set_dataset_of_epoch(iterator, SeededShuffle(first_seed, of_epoch))


def _seed_py_dataset_order(strategy: Any, arguments: dict[str, Any]) -> None:
    """Have Keras shuffle the batches of a `PyDataset` alike on all workers.

    Keras draws the order from Python's generator. The strategy has seeded it, but one
    worker may have drawn more numbers than another since.

    Args:
        strategy: A tfdp strategy of several workers.
        arguments: Dict, keyword arguments of Keras's epoch iterator. Data other than a
            shuffled `PyDataset` is ignored.
    """
    is_py_dataset = isinstance(arguments.get("x"), keras.utils.PyDataset)
    if not is_py_dataset or not arguments.get("shuffle"):
        return
    worker_group = strategy.extended.worker_group
    state = hashlib.sha256(repr(random.getstate()).encode()).hexdigest()
    if not worker_group.all_equal("Python's random state", state):
        _warn_of_seeds()
        random.seed(broadcast_seed(worker_group))


def _warn_of_seeds() -> None:
    """Warn of different random seeds: workers shuffle in the first worker's order."""
    user_code.warn(
        "Workers have different random seeds. They shuffle in the first "
        "worker's order; call `keras.utils.set_random_seed` with one seed on "
        "all of them."
    )


def _has_order(iterator: Any) -> bool:
    """Return whether a rerun can repeat the order in which arrays are shuffled.

    It can if a seed is set: globally, or by tfdp in a `SeededShuffle` of the iterator.

    Args:
        iterator: Epoch iterator of Keras.
    """
    is_seeded = isinstance(keras_data.dataset_maker(iterator), SeededShuffle)
    return is_seeded or random_seeds.global_seed() is not None


def _distribute_adapter(
    strategy: Any, iterator: Any, part: JobPart | None = None
) -> Any:
    """Distribute the dataset of an iterator's data adapter.

    Args:
        strategy: A tfdp strategy.
        iterator: Epoch iterator of Keras.
        part: `JobPart` whose rows are distributed, if parts of a job train separately;
            or `None`, the default, for all rows.

    Returns:
        A distributed dataset. The iterator and its adapter are not changed.
    """
    dataset = iterator.data_adapter.get_tf_dataset()
    if part is not None:
        dataset = rows_of_part(dataset, part)
    return strategy.experimental_distribute_dataset(dataset)


def _gather_lengths(strategy: Any, adapter: Any) -> list[Length]:
    """Gather the length of each worker's data, and compare the first batches.

    Args:
        strategy: A tfdp strategy.
        adapter: Keras's data adapter of this worker's data.

    Returns:
        List of the `Length` of each worker, its number of steps, by rank.

    Raises:
        ValueError: If the class labels of the first batches differ between workers.
    """
    length = length_of(strategy, adapter)
    values = ArrayValues(class_labels(keras_data.first_batch_of(adapter)))
    worker_group, topic = strategy.extended.worker_group, "the number of batches"
    facts = [values_fact(worker_group, topic, values)]
    return [Length(*each) for each in compare(worker_group, topic, facts, length)]


def _warn_of_dropped_batches(extended: Any, lengths: list[Length]) -> None:
    """Warn once of batches beyond the shortest worker's, which are dropped."""
    dropped = dropped_batches(lengths)
    if not dropped:
        return
    user_code.warn(
        f"Workers have different numbers of batches: {list_by_worker(lengths)}. With "
        '`uneven="stop"` each pass of `fit` over the data ends for all workers with '
        f"the shortest data. Dropped batches: {dropped}.",
        once_for=extended,
    )


def _warn_of_no_end(strategy: Any, iterator: Any) -> None:
    """Warn on the first worker if this pass over the data never ends."""
    has_end = iterator.steps_per_epoch or iterator.num_batches
    if has_end or not is_endless(keras_data.source_of(iterator.data_adapter)):
        return
    if strategy.extended.worker_group.is_chief:
        user_code.warn(
            "The dataset never ends, and this pass over it has no number of steps: it "
            "runs until a callback stops it. Give `steps_per_epoch` to `fit`, `steps` "
            "to `evaluate` and `predict`, or remove `repeat()`."
        )


def _agree_on_steps(iterator: Any, steps: int | None) -> None:
    """Set the number of steps of an epoch, on which all workers have agreed before.

    Args:
        iterator: Epoch iterator of Keras. If its adapter has another number of batches,
            the adapter is replaced by one with `steps`, and the iterator is reset.
        steps: Int, or `None` for an unknown number.
    """
    adapter = iterator.data_adapter
    if adapter.num_batches != steps:
        iterator.data_adapter = _AdapterWithLength(adapter, steps)
        iterator.reset()


def _with_common_end(
    dataset: Any, lengths: list[Length], *, stops: bool, by_weight: bool
) -> Any:
    """Return a distributed dataset that ends for all workers at the same step.

    Args:
        dataset: A distributed dataset.
        lengths: List of `Length`, one for each worker.
        stops: Bool, whether it ends when the first worker runs out of data, and not
            the last.
        by_weight: Bool, whether each step divides its batch by the weights of the load
            balancer.

    Returns:
        A distributed dataset.
    """
    # Only lengths of arrays have `batch_rows`. If they are equal on all workers, each
    # batch has the same number of rows everywhere, and no step has to agree on the end.
    is_settled = len(set(lengths)) == 1 and lengths[0].batch_rows is not None
    if isinstance(dataset, PerReplicaDataset):
        before = dataset.read_options
        return dataset.with_read_options(
            before._replace(
                syncs_end_of_data=before.syncs_end_of_data and not is_settled,
                counts_rows=before.same_rows or is_settled,
                stops_at_shortest=stops,
                by_weight=by_weight,
            )
        )
    num_endless = sum(length.is_endless for length in lengths)
    if 0 < num_endless < len(lengths):
        dataset = tf_data.with_end_of_data_sync(dataset)
    if stops and not is_settled and tf_data.syncs_end_of_data(dataset):
        return StockDataset(dataset, ShortestIterator)
    return dataset


class _AdapterWithLength:
    """Wrapper of a Keras data adapter that replaces its number of batches.

    Args:
        adapter: Data adapter of Keras.
        num_batches: Int, or `None` if the number is unknown.
    """

    def __init__(self, adapter: Any, num_batches: int | None) -> None:
        self._adapter = adapter
        self.num_batches = num_batches

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped adapter."""
        return getattr(self._adapter, name)


def _with_local_rows(strategy: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Replace the data of an epoch iterator by an adapter for several workers.

    Where the data allows it, the adapter reads only this worker's rows. For generators,
    and for `PyDataset`s that yield only whole batches, it records the class labels of
    batches, which workers compare.

    Args:
        strategy: A tfdp strategy of several workers.
        arguments: Dict, keyword arguments of Keras's epoch iterator.

    Returns:
        The same dict, or a copy with an adapter or generator as `x`.
    """
    source = arguments.get("x")
    if has_stored_arrays(arguments):
        return arguments | {"x": StoredArraysAdapter(arguments)}
    if keras_data.is_torch_dataloader(source):
        return arguments | {"x": rows_of_loader(strategy, source)}
    if isinstance(source, types.GeneratorType):
        return arguments | {"x": new_label_record(restarts=False).watch(source)}
    if not isinstance(source, keras.utils.PyDataset):
        return arguments
    if arguments.get("y") is not None or arguments.get("sample_weight") is not None:
        # A `PyDataset` itself yields targets and weights, so Keras rejects `y` and
        # `sample_weight`. An adapter in its place would hide Keras's error.
        return arguments
    reads_rows = supports_row_reads(source)
    if reads_rows and strategy.extended.balance is not None:
        warn_not_split_early(strategy, REBALANCE_REASON)
    elif reads_rows:
        return arguments | {"x": rows_of_py_dataset(strategy, source, arguments)}
    record = new_label_record(restarts=arguments.get("steps_per_epoch") is None)
    names = ("x", "class_weight", "shuffle")
    settings = {name: arguments[name] for name in names if name in arguments}
    adapter = keras_data.adapter_of_py_dataset(record.watch, **settings)
    return arguments | {"x": adapter}
