"""Distributed dataset on CPUs: one element holds the rows of all local replicas.

TensorFlow's own iterator for several devices traces functions of its own for
each device whenever an epoch begins, and waits for its threads whenever one
ends, which on CPUs takes longer than a small epoch. GPUs keep it, since it
copies ahead of the step.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp.ground import _compat
from tfdp.training.data.batch_weights import CountedBatch
from tfdp.training.data.element_specs import element_spec_of, empty_of
from tfdp.training.data.load_balancer import rows_of_ranks_by_weight
from tfdp.training.data.read_counts import Read
from tfdp.training.data.rows import divide_batches, flatten_local_replicas
from tfdp.training.data.stages import MAPS
from tfdp.training.data.uneven_inputs import (
    ComponentsSpec,
    StepIterator,
    has_next_step,
    raise_out_of_range,
)

PREFETCHED_STEPS = 2
# What autotuning makes faster.
_TUNED = (
    *(*MAPS, "ParallelBatchDataset"),
    *("InterleaveDataset", "ParallelInterleaveDataset"),
)

_strategies: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


class ReadOptions(NamedTuple):
    """Options of reading a `PerReplicaDataset`, the same on all workers.

    Args:
        asks_workers: Bool, whether workers may run out of data at different steps, so
            that they have to ask each other at each.
        counts_rows: Bool, whether an element is a `CountedBatch`: for Keras's loops,
            which pass a batch to `strategy.run` as it is. Defaults to `False`.
        stops_at_shortest: Bool, whether the end of one worker's data is that of all,
            and not the end of the longest. Defaults to `False`.
        by_weight: Bool, whether elements are whole batches, which each step divides
            by the weights that the strategy has at that moment. A pipeline reads
            ahead, on each worker as far as it happens to: workers would divide one
            batch by different weights. Defaults to `False`.
        same_rows: Bool, whether batches are known to have equally many rows on all
            workers, so that each may count those of its own. Defaults to `True`.
    """

    asks_workers: bool
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
    """Divide batches as `divide_batches` does, and prefetch the result.

    A batch of a Python generator cannot be read again. Of a generator no more is drawn
    than on one device, and as much by all workers: one batch ahead where Keras or the
    user prefetches, none where neither does.

    Args:
        batches: `tf.data.Dataset` of global batches.
        ranks: List of ints.
        num_replicas: Int, on all workers.
        checks: Bool or `None`, see `divide_batches`. Defaults to `None`.
        others: Collection of ints, see `divide_batches`. Defaults to none.
    """
    num_ahead, is_tuned = PREFETCHED_STEPS, True
    if _compat.has_generator(batches):
        batches, is_ahead = _compat.without_automatic_prefetch(batches)
        num_ahead = int(is_ahead)
        is_tuned = any(kind in _TUNED for kind in _compat.kinds_of_parts(batches))
    divided = divide_batches(batches, ranks, num_replicas, checks=checks, others=others)
    if num_ahead:
        divided = divided.prefetch(num_ahead)
    if not is_tuned:
        # An iterator that is deleted waits for it, see `delete_in_background`.
        options = tf.data.Options()
        options.autotune.enabled = False
        divided = divided.with_options(options)
    return divided


class PerReplicaDataset(_compat.DistributedDatasetsFromFunction):
    """Distributed dataset of `strategy.experimental_distribute_dataset` on CPUs.

    A subclass of the stock class by name only: Keras checks the name.

    Args:
        dataset: `tf.data.Dataset`, each element a tuple of the local replicas' rows,
            and the number of rows of their global batch.
        strategy: A tfdp strategy.
        read_options: `ReadOptions`.
        batches: `tf.data.Dataset` of the global batches themselves, or `None`.
            Defaults to `None`.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        strategy: Any,
        read_options: ReadOptions,
        batches: tf.data.Dataset | None = None,
    ) -> None:
        self.dataset = dataset
        self.strategy = strategy
        self.read_options = read_options
        self.batches = batches

    def __iter__(self) -> PerReplicaIterator:
        own = iter(self.dataset)
        iterator = PerReplicaIterator(own, self.strategy, self.read_options)
        if self._is_deleted_in_background:
            iterator.delete_in_background()
        return iterator

    @functools.cached_property
    def _is_deleted_in_background(self) -> bool:
        """Bool, false where a user sees when an iterator is deleted.

        A generator runs its `finally` then, and a file that is written is closed.
        """
        dataset = self.dataset
        return not (_compat.calls_python(dataset) or _compat.writes_while_read(dataset))

    def read(self, read_options: ReadOptions) -> PerReplicaDataset:
        """Return a dataset of the same batches with other options.

        Args:
            read_options: `ReadOptions`; by weight only where there are `batches`.
        """
        dataset = self.dataset
        if read_options.by_weight:
            dataset = divide_and_prefetch(self.batches, [0], 1, checks=True)
        return PerReplicaDataset(dataset, self.strategy, read_options, self.batches)

    @property
    def element_spec(self) -> Any:
        """Spec of an element, per replica where there are several."""
        return element_spec_of(self, self.dataset)

    @property
    def cardinality(self) -> Any:
        """Number of steps, as `tf.data.Dataset.cardinality` gives it."""
        return self.dataset.cardinality()

    @property
    def components(self) -> Any:
        """The dataset of this worker, a composite tensor."""
        return self.dataset

    @property
    def _type_spec(self) -> tf.TypeSpec:
        return _spec_of(PerReplicaDatasetSpec, self)


class PerReplicaIterator(StepIterator):
    """Iterator over a `PerReplicaDataset`, also inside `tf.function`.

    Args:
        iterator: `tf.data.Iterator` over elements of a `PerReplicaDataset`.
        strategy: A tfdp strategy.
        read_options: `ReadOptions`.
    """

    def __init__(self, iterator: Any, strategy: Any, read_options: ReadOptions) -> None:
        super().__init__(iterator, strategy)
        self.read_options = read_options

    @property
    def element_spec(self) -> Any:
        """Spec of an element, per replica where there are several."""
        return element_spec_of(self, self._iterator)

    def get_next(self) -> Any:
        """Return the next batch; raise `tf.errors.OutOfRangeError` at the end."""
        if not self.read_options.asks_workers:
            with Read() as read:
                element = self._iterator.get_next()
            read.given(element)
            return self._batch(*element)
        optional = self._read_optional()
        parts = tf.cond(
            self._has_next_step(optional),
            lambda: self._value_or_empty(optional),
            self._end,
        )
        return self._per_replica(parts)

    def get_next_as_optional(self) -> Any:
        """Return the next batch, or an empty optional at the end."""
        optional = self._read_optional()
        asks_workers = self.read_options.asks_workers
        has_value = (
            self._has_next_step(optional) if asks_workers else optional.has_value()
        )

        def value() -> Any:
            if not asks_workers:
                batch = self._batch(*optional.get_value())
            else:
                batch = self._per_replica(self._value_or_empty(optional))
            return tf.experimental.Optional.from_value(batch)

        def nothing() -> Any:
            spec = self.element_spec
            if self.read_options.counts_rows and not asks_workers:
                spec = CountedBatch(spec, self._iterator.element_spec[1])
            return tf.experimental.Optional.empty(spec)

        return tf.cond(has_value, value, nothing)

    def _read_optional(self) -> Any:
        with Read() as read:
            optional = self._iterator.get_next_as_optional()
        read.given(optional.has_value())
        return optional

    def _value_or_empty(self, optional: Any) -> tuple:
        """Return local rows, none where this worker has run out of data.

        Such workers know the rows of no common batch.
        """
        parts, _ = tf.cond(optional.has_value(), optional.get_value, self._empty)
        return parts

    def _batch(self, parts: tuple, num_rows: tf.Tensor) -> Any:
        """Return the batch of a step that needs not ask the other workers."""
        batch = self._per_replica(parts)
        return CountedBatch(batch, num_rows) if self.read_options.counts_rows else batch

    def _per_replica(self, parts: tuple) -> Any:
        """Return a per-replica value of the local rows, or of one global batch."""
        if self.read_options.by_weight:
            extended = self.strategy.extended
            weights = extended.balance.weights.read_value()
            parts = rows_of_ranks_by_weight(parts[0], extended.local_ranks, weights)
        return _compat.per_replica(list(parts))

    def _has_next_step(self, optional: Any) -> tf.Tensor:
        return has_next_step(
            self.strategy,
            optional.has_value(),
            stops=self.read_options.stops_at_shortest,
        )

    def _end(self) -> Any:
        with tf.control_dependencies([raise_out_of_range(self.strategy)]):
            parts, _ = self._empty()
            return parts

    def _empty(self) -> Any:
        return tf.nest.map_structure(empty_of, self._iterator.element_spec)

    @property
    def _type_spec(self) -> tf.TypeSpec:
        return _spec_of(PerReplicaIteratorSpec, self)


class _PerReplicaTypeSpec(ComponentsSpec):
    """Type spec of a dataset or its iterator, as an argument of `tf.function`."""

    __slots__ = ("_read_options", "_strategy_id")

    def __init__(self, inner: Any, strategy_id: int, read_options: tuple) -> None:
        super().__init__(inner)
        self._strategy_id = strategy_id
        self._read_options = tuple(read_options)

    def _serialize(self) -> tuple:
        return (self._inner, self._strategy_id, self._read_options)

    def _from_components(self, components: Any) -> Any:
        strategy = _strategies[self._strategy_id]
        return self.value_type(components, strategy, ReadOptions(*self._read_options))


class PerReplicaDatasetSpec(_PerReplicaTypeSpec):
    """Type spec of a `PerReplicaDataset`."""

    __slots__ = ()
    value_type = PerReplicaDataset


class PerReplicaIteratorSpec(_PerReplicaTypeSpec):
    """Type spec of a `PerReplicaIterator`."""

    __slots__ = ()
    value_type = PerReplicaIterator


def _spec_of(kind: type, value: Any) -> Any:
    # A spec is compared by plain values, so the strategy stands in a table.
    _strategies[id(value.strategy)] = value.strategy
    inner = _compat.type_spec_of(value.components)
    return kind(inner, id(value.strategy), value.read_options)


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
    if is_read_on_cpus(strategy, options):
        return PerReplicaDataset(divided, strategy, read_options, batches=batches)
    local = flatten_local_replicas(divided)
    distributed = strategy.distribute_datasets_from_function(lambda _: local, options)
    if read_options.asks_workers:
        return distributed
    return _compat.without_partial_batches(distributed)


def is_read_on_cpus(strategy: Any, options: Any) -> bool:
    """Return whether a step takes its rows from host memory, or from a GPU's."""
    extended = strategy.extended
    devices = map(_compat.device_type, extended.worker_devices)
    has_gpus = extended.group.backend == "nccl" or "GPU" in devices
    return options is None and (not has_gpus or extended.balance is not None)
