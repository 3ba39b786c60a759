"""Distributed dataset on CPUs: one element holds the rows of all local replicas.

TensorFlow's multi-device iterator traces functions for each device when an epoch
begins, and waits for its threads when an epoch ends. On CPUs this takes longer than a
small epoch. GPUs keep that iterator, because it copies batches ahead of the step.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp.ground._compat import runtime, tf_data, tf_distribute
from tfdp.ground.base import loops
from tfdp.training.data.batch_weights import CountedBatch
from tfdp.training.data.element_specs import element_spec_of, empty_of
from tfdp.training.data.load_balancer import rows_of_ranks_by_weight
from tfdp.training.data.rows import divide_batches, flatten_local_replicas
from tfdp.training.data.stages import MAPS
from tfdp.training.data.uneven_inputs import (
    ComponentsSpec,
    CountedRead,
    StepIterator,
    has_next_step,
)

# The rows of this many steps are prepared ahead, so that a step need not wait for them.
# Fewer are read from a Python generator, whose batches cannot be read again.
PREFETCHED_STEPS = 2
# TensorFlow's autotuning can speed up only these stages. For a pipeline without any of
# them it may be turned off, which shortens the deletion of an iterator.
_AUTOTUNED_STAGES = (
    *(*MAPS, "ParallelBatchDataset"),
    *("InterleaveDataset", "ParallelInterleaveDataset"),
)

# A type spec holds the `id` of a strategy instead of the strategy, because TensorFlow
# compares type specs by plain values. This dict finds the strategy by its `id`.
_strategies: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


class ReadOptions(NamedTuple):
    """Read options of a `PerReplicaDataset`, the same on all workers.

    Args:
        syncs_end_of_data: Bool, whether each step begins with an all-reduce that shows
            which workers have data, because they may run out of it at different steps.
        counts_rows: Bool, whether an element is a `CountedBatch`, with the row count of
            the global batch. Only Keras's loops can use it, because they pass a batch
            to `strategy.run` unchanged. Defaults to `False`.
        stops_at_shortest: Bool, whether the data ends with the worker that has the
            least, and not with the one that has the most. Defaults to `False`.
        by_weight: Bool, whether elements are global batches, which each step divides by
            the strategy's current weights. The pipeline cannot divide them: workers
            read ahead by different amounts, and would use different weights for one
            batch. Defaults to `False`.
        same_rows: Bool, whether batch i is known to have the same number of rows on all
            workers. Then each worker counts the rows of its own copy, without an
            all-reduce. Defaults to `True`.
    """

    syncs_end_of_data: bool
    counts_rows: bool = False
    stops_at_shortest: bool = False
    by_weight: bool = False
    same_rows: bool = True


def divide_and_prefetch(
    batches: tf.data.Dataset,
    ranks: list[int],
    num_replicas: int,
    *,
    checks: bool | None = None,
    others: Collection[int] = (),
) -> tf.data.Dataset:
    """Divide global batches into the rows of each rank, and prefetch the result.

    A batch of a Python generator cannot be read again. So all workers draw as many
    batches from a generator as one device would: one batch ahead if Keras or the user
    prefetches, otherwise none.

    Args:
        batches: `tf.data.Dataset` of global batches.
        ranks: List of ints, the replicas whose rows the result has.
        num_replicas: Int, number of replicas on all workers.
        checks: Bool, whether different numbers of rows of a batch's parts are an error.
            Defaults to `None`: only if there are several replicas.
        others: Collection of ints, indices of the flattened parts that are divided by
            their own number of rows. Defaults to none.

    Returns:
        `tf.data.Dataset` of pairs, as `divide_batches` returns it.
    """
    num_ahead, is_tuned = PREFETCHED_STEPS, True
    if tf_data.has_generator(batches):
        batches, is_ahead = tf_data.without_automatic_prefetch(batches)
        num_ahead = int(is_ahead)
        is_tuned = any(
            kind in _AUTOTUNED_STAGES for kind in tf_data.kinds_of_stages(batches)
        )
    divided = divide_batches(batches, ranks, num_replicas, checks=checks, others=others)
    if num_ahead:
        divided = divided.prefetch(num_ahead)
    if not is_tuned:
        # Deletion of an iterator waits for autotuning, see `delete_in_background`. So
        # autotuning is turned off if no stage gains from it.
        options = tf.data.Options()
        options.autotune.enabled = False
        divided = divided.with_options(options)
    return divided


class PerReplicaDataset(tf_data.DistributedDatasetsFromFunction):
    """Distributed dataset of `strategy.experimental_distribute_dataset` on CPUs.

    It inherits nothing but the type of the stock class, which Keras checks.

    Args:
        dataset: `tf.data.Dataset` of pairs: a tuple of the local replicas' rows, and
            the number of rows of their global batch.
        strategy: A tfdp strategy.
        read_options: `ReadOptions`.
        batches: `tf.data.Dataset` of the undivided global batches, which replace
            `dataset` when rows are divided by weight; or `None` if that is impossible.
            Defaults to `None`.
        generation: Int, which cluster of the job the rows are divided for, numbered
            from 0; a new one begins when workers are lost or join. Reads in another
            cluster raise a `ValueError`. Defaults to `None`, the present one.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        strategy: Any,
        read_options: ReadOptions,
        batches: tf.data.Dataset | None = None,
        generation: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.strategy = strategy
        self.read_options = read_options
        self.batches = batches
        self.generation = _generation_of(strategy, generation)

    def __iter__(self) -> PerReplicaIterator:
        """Return an iterator; raise a `ValueError` if the workers have changed."""
        _check_generation(self)
        local_iterator = iter(self.dataset)
        iterator = PerReplicaIterator(local_iterator, self.strategy, self.read_options)
        if self._is_deleted_in_background:
            iterator.delete_in_background()
        return iterator

    @functools.cached_property
    def _is_deleted_in_background(self) -> bool:
        """Bool, whether another thread deletes the iterators of this dataset.

        It is false for a pipeline that calls Python or writes files: there users can
        observe when deletion runs the `finally` of a generator, or closes a file.
        """
        dataset = self.dataset
        return not (tf_data.calls_python(dataset) or tf_data.writes_while_read(dataset))

    def with_read_options(self, read_options: ReadOptions) -> PerReplicaDataset:
        """Return a dataset of the same batches with other options.

        Args:
            read_options: `ReadOptions`. With `by_weight` the elements are the undivided
                global batches, which this dataset needs to have as `batches`.
        """
        dataset = self.dataset
        if read_options.by_weight:
            dataset = divide_and_prefetch(self.batches, [0], 1, checks=True)
        return PerReplicaDataset(
            dataset, self.strategy, read_options, self.batches, self.generation
        )

    @property
    def element_spec(self) -> Any:
        """Spec of an element, per replica if there are several local replicas."""
        return element_spec_of(self, self.dataset)

    @property
    def cardinality(self) -> Any:
        """Scalar int64 tensor, number of steps as in `tf.data.Dataset.cardinality`."""
        return self.dataset.cardinality()

    @property
    def components(self) -> Any:
        """The `tf.data.Dataset` of this worker, which a `tf.function` receives."""
        return self.dataset

    @property
    def _type_spec(self) -> tf.TypeSpec:
        """Type spec by which `tf.function` takes the dataset as an argument."""
        return _spec_of(self)


class PerReplicaIterator(StepIterator):
    """Iterator over a `PerReplicaDataset`, also inside `tf.function`.

    Args:
        iterator: `tf.data.Iterator` over elements of a `PerReplicaDataset`.
        strategy: A tfdp strategy.
        read_options: `ReadOptions`.
        generation: Int or `None`, as for `PerReplicaDataset`.
    """

    def __init__(
        self,
        iterator: Any,
        strategy: Any,
        read_options: ReadOptions,
        generation: int | None = None,
    ) -> None:
        super().__init__(iterator, strategy)
        self.read_options = read_options
        self.generation = _generation_of(strategy, generation)

    @property
    def element_spec(self) -> Any:
        """Spec of an element, per replica if there are several local replicas."""
        return element_spec_of(self, self._iterator)

    def get_next(self) -> Any:
        """Return the next batch; raise `tf.errors.OutOfRangeError` at the end."""
        _check_generation(self)
        if self.read_options.syncs_end_of_data:
            return super().get_next()
        with CountedRead() as read:
            element = self._iterator.get_next()
        read.count_received(element)
        return self._batch(*element)

    def _next_step(self) -> tuple[tf.Tensor, Callable[[], Any]]:
        """Return whether a next batch exists, and a function that returns it.

        It implements `StepIterator._next_step`.
        """
        _check_generation(self)
        with CountedRead() as read:
            optional = self._iterator.get_next_as_optional()
        has_data = optional.has_value()
        read.count_received(has_data)
        if not self.read_options.syncs_end_of_data:
            return has_data, lambda: self._batch(*optional.get_value())
        stops = self.read_options.stops_at_shortest
        has_next = has_next_step(self.strategy, has_data, stops=stops)

        def read_rows() -> Any:
            """Return the rows of the local replicas, empty on a worker without data."""
            # The batch is not a `CountedBatch`: a worker without data does not know the
            # number of rows of the global batch.
            parts, _ = tf.cond(has_data, optional.get_value, self._empty_element)
            return self._per_replica(parts)

        return has_next, read_rows

    @property
    def _next_spec(self) -> Any:
        """Spec of the next batch, that of a `CountedBatch` if rows are counted."""
        if not self._counts_rows:
            return self.element_spec
        return CountedBatch(self.element_spec, self._iterator.element_spec[1])

    @property
    def _counts_rows(self) -> bool:
        """Bool, whether batches are `CountedBatch`es, with their number of rows."""
        return self.read_options.counts_rows and not self.read_options.syncs_end_of_data

    def _batch(self, parts: tuple, num_rows: tf.Tensor) -> Any:
        """Convert the two parts of a pipeline's element to the batch of a step.

        Args:
            parts: Tuple of nests, the rows of each local replica.
            num_rows: Scalar float32 tensor, number of rows of the global batch.

        Returns:
            Per-replica value, the rows of each local replica; or a `CountedBatch` of it
            and `num_rows`, if the `ReadOptions` have `counts_rows`.
        """
        batch = self._per_replica(parts)
        return CountedBatch(batch, num_rows) if self._counts_rows else batch

    def _per_replica(self, parts: tuple) -> Any:
        """Return a per-replica value with the rows of each local replica.

        Args:
            parts: Tuple of nests, the rows of each local replica. If the `ReadOptions`
                have `by_weight`, one nest, the whole global batch, which is divided
                here by the replicas' current weights in the load balancer.
        """
        if self.read_options.by_weight:
            extended = self.strategy.extended
            weights = extended.balance.weights.read_value()
            parts = rows_of_ranks_by_weight(parts[0], extended.local_ranks, weights)
        return tf_distribute.per_replica(list(parts))

    def _empty_element(self) -> Any:
        """Return a nest of tensors without rows, for a worker that is out of data."""
        return tf.nest.map_structure(empty_of, self._iterator.element_spec)

    @property
    def _type_spec(self) -> tf.TypeSpec:
        """Type spec by which `tf.function` takes the iterator as an argument."""
        return _spec_of(self)


class PerReplicaSpec(ComponentsSpec):
    """Type spec of a `PerReplicaDataset` or a `PerReplicaIterator`."""

    __slots__ = ()

    def _from_components(self, components: Any) -> Any:
        """Rebuild a dataset or iterator inside a `tf.function` from its component."""
        strategy_id, read_options, generation = self._settings
        return self.value_type(
            components,
            _strategies[strategy_id],
            ReadOptions(*read_options),
            generation=generation,
        )


def _spec_of(value: Any) -> PerReplicaSpec:
    """Return the type spec of a dataset or iterator; store its strategy by `id`."""
    # TensorFlow compares type specs by plain values. So a spec holds the `id` of its
    # strategy, by which `_strategies` finds the strategy.
    _strategies[id(value.strategy)] = value.strategy
    return PerReplicaSpec.of(
        value, id(value.strategy), tuple(value.read_options), value.generation
    )


def _generation_of(strategy: Any, generation: int | None) -> int:
    """Return `generation`, or the number of the present cluster if it is `None`."""
    return strategy.extended.generation if generation is None else generation


def _check_generation(data: PerReplicaDataset | PerReplicaIterator) -> None:
    """Raise a `ValueError` if data was divided among workers that have changed since.

    A read in a custom loop also sets the strategy's `read_generation`.
    """
    extended = data.strategy.extended
    if loops.current() is None and isinstance(data, PerReplicaIterator):
        extended.read_generation = data.generation
    if data.generation != extended.generation:
        raise ValueError(
            "This dataset was distributed among the workers from before they changed. "
            "Call `strategy.experimental_distribute_dataset` again after "
            "`tfdp.WorkersChanged`, and create the iterator anew."
        )


def distribute_divided(
    strategy: Any,
    divided: tf.data.Dataset,
    options: Any,
    read_options: ReadOptions,
    batches: tf.data.Dataset | None = None,
) -> Any:
    """Wrap a dataset of the local replicas' rows as a distributed dataset.

    Args:
        strategy: A tfdp strategy.
        divided: `tf.data.Dataset` as `divide_batches` returns it.
        options: `tf.distribute.InputOptions` or `None`.
        read_options: `ReadOptions`.
        batches: `tf.data.Dataset` of the global batches, or `None`, see
            `PerReplicaDataset`. Defaults to `None`.
    """
    if is_read_on_cpus(strategy, options):
        return PerReplicaDataset(divided, strategy, read_options, batches=batches)
    local = flatten_local_replicas(divided)
    distributed = strategy.distribute_datasets_from_function(lambda _: local, options)
    if read_options.syncs_end_of_data:
        return distributed
    return tf_data.disable_end_of_data_sync(distributed)


def is_read_on_cpus(strategy: Any, options: Any) -> bool:
    """Return whether steps read rows from a `PerReplicaDataset` in host memory.

    They do on CPUs, or with a load balancer. Options of the user need TensorFlow's own
    distributed dataset, but a job that continues after losing workers ignores them.

    Args:
        strategy: A tfdp strategy.
        options: The user's `tf.distribute.InputOptions`, or `None`.
    """
    extended = strategy.extended
    devices = map(runtime.device_type, extended.worker_devices)
    has_gpus = extended.group.backend == "nccl" or "GPU" in devices
    # In a job that continues after a loss, the user's options are ignored, because
    # stock distributed data does not notice that the workers have changed.
    is_ours = options is None or extended.continues_after_loss
    return is_ours and (not has_gpus or extended.balance is not None)
