"""Distributed dataset on CPUs: one element holds the rows of all local replicas.

TensorFlow's own iterator for several devices traces functions of its own for
each device whenever an epoch begins, and waits for its threads whenever one
ends, which on CPUs takes longer than a small epoch. GPUs keep it, since it
copies ahead of the step.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp.ground import _compat
from tfdp.training.data.batch_weights import CountedBatch
from tfdp.training.data.element_specs import element_spec_of, empty_of
from tfdp.training.data.load_balancer import rows_of_ranks_by_weight
from tfdp.training.data.rows import divide_batches, flatten_local_replicas
from tfdp.training.data.stages import MAPS
from tfdp.training.data.uneven_inputs import (
    ComponentsSpec,
    Read,
    StepIterator,
    has_next_step,
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
        return _spec_of(self)


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
        if self.read_options.asks_workers:
            return super().get_next()
        with Read() as read:
            element = self._iterator.get_next()
        read.given(element)
        return self._batch(*element)

    def _next_step(self) -> tuple[tf.Tensor, Callable[[], Any]]:
        with Read() as read:
            optional = self._iterator.get_next_as_optional()
        has_data = optional.has_value()
        read.given(has_data)
        if not self.read_options.asks_workers:
            return has_data, lambda: self._batch(*optional.get_value())
        stops = self.read_options.stops_at_shortest
        has_next = has_next_step(self.strategy, has_data, stops=stops)

        def rows() -> Any:
            # Workers that have run out of data know the rows of no common batch.
            parts, _ = tf.cond(has_data, optional.get_value, self._empty)
            return self._per_replica(parts)

        return has_next, rows

    @property
    def _next_spec(self) -> Any:
        if not self._counts_rows:
            return self.element_spec
        return CountedBatch(self.element_spec, self._iterator.element_spec[1])

    @property
    def _counts_rows(self) -> bool:
        return self.read_options.counts_rows and not self.read_options.asks_workers

    def _batch(self, parts: tuple, num_rows: tf.Tensor) -> Any:
        """Return the batch of a step that needs not ask the other workers."""
        batch = self._per_replica(parts)
        return CountedBatch(batch, num_rows) if self._counts_rows else batch

    def _per_replica(self, parts: tuple) -> Any:
        """Return a per-replica value of the local rows, or of one global batch."""
        if self.read_options.by_weight:
            extended = self.strategy.extended
            weights = extended.balance.weights.read_value()
            parts = rows_of_ranks_by_weight(parts[0], extended.local_ranks, weights)
        return _compat.per_replica(list(parts))

    def _empty(self) -> Any:
        return tf.nest.map_structure(empty_of, self._iterator.element_spec)

    @property
    def _type_spec(self) -> tf.TypeSpec:
        return _spec_of(self)


class PerReplicaSpec(ComponentsSpec):
    """Type spec of a `PerReplicaDataset` or a `PerReplicaIterator`."""

    __slots__ = ()

    def _from_components(self, components: Any) -> Any:
        strategy_id, read_options = self._settings
        strategy = _strategies[strategy_id]
        return self.value_type(components, strategy, ReadOptions(*read_options))


def _spec_of(value: Any) -> PerReplicaSpec:
    # A spec is compared by plain values, so the strategy stands in a table.
    _strategies[id(value.strategy)] = value.strategy
    return PerReplicaSpec.of(value, id(value.strategy), tuple(value.read_options))


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
