"""A dataset of shares and its iterator: one element holds all local replicas'.

TensorFlow's own iterator for several devices traces functions of its own for
each device whenever an epoch begins, and waits for its threads whenever one
ends, which on CPUs takes longer than a small epoch. GPUs keep it, since it
copies ahead of the step.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp import _compat
from tfdp.data.batch_weights import CountedBatch
from tfdp.data.end_of_data import StepIterator, goes_on, raise_end
from tfdp.data.rows import shares_of_ranks
from tfdp.data.weighted_rows import shares_by_weight

PREFETCHED_STEPS = 2

# The operation of `Dataset.from_generator`.
_GENERATOR = "GeneratorDataset"

_strategies: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


class Reading(NamedTuple):
    """How a `ShareDataset` is read, alike on all workers.

    Args:
        asks: Bool, whether workers may run out of data at different steps, so that
            they have to ask each other at each.
        counts: Bool, whether an element is a `CountedBatch`: for Keras's loops,
            which hand a batch to `strategy.run` unopened. Defaults to `False`.
        stops: Bool, whether the end of one worker's data is that of all, and not
            the end of the longest. Defaults to `False`.
        by_weight: Bool, whether elements are whole batches, which each step divides
            by the weights that the strategy has at that moment. A pipeline reads
            ahead, on each worker as far as it happens to: workers would divide one
            batch by different weights. Defaults to `False`.
    """

    asks: bool
    counts: bool = False
    stops: bool = False
    by_weight: bool = False


def shares_read_ahead(
    batches: tf.data.Dataset,
    ranks: list[int],
    num_replicas: int,
    *,
    checks: bool | None = None,
) -> tf.data.Dataset:
    """What `shares_of_ranks` returns, read ahead of the step.

    What a Python generator has given is gone for whoever reads it next. Of one no
    more is drawn than on one device, and by all workers as much: one batch ahead
    where Keras or the user prefetches, none where nobody does.

    Args:
        batches: `tf.data.Dataset` of global batches.
        ranks: List of ints.
        num_replicas: Int, on all workers.
        checks: Bool or `None`, see `shares_of_ranks`. Defaults to `None`.
    """
    num_ahead = PREFETCHED_STEPS
    if any(name == _GENERATOR for name, _ in _compat.operations_in(batches)):
        batches, is_ahead = _compat.without_automatic_prefetch(batches)
        num_ahead = int(is_ahead)
    shares = shares_of_ranks(batches, ranks, num_replicas, checks=checks)
    return shares.prefetch(num_ahead) if num_ahead else shares


class ShareDataset(_compat.DistributedDatasetsFromFunction):
    """What `strategy.experimental_distribute_dataset` returns on CPUs.

    A subclass of the stock class by name only: Keras asks for the name.

    Args:
        dataset: `tf.data.Dataset`, each element a tuple of the local shares and
            the rows of their global batch.
        strategy: A tfdp strategy.
        reading: `Reading`.
        batches: `tf.data.Dataset` of the global batches themselves, or `None`.
            Defaults to `None`.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        strategy: Any,
        reading: Reading,
        batches: tf.data.Dataset | None = None,
    ) -> None:
        self.dataset = dataset
        self.strategy = strategy
        self.reading = reading
        self.batches = batches

    def __iter__(self) -> ShareIterator:
        return ShareIterator(iter(self.dataset), self.strategy, self.reading)

    def read(self, reading: Reading) -> ShareDataset:
        """The same batches, read in another way.

        Args:
            reading: `Reading`; by weight only where there are `batches`.
        """
        dataset = self.dataset
        if reading.by_weight:
            dataset = shares_read_ahead(self.batches, [0], 1, checks=True)
        return ShareDataset(dataset, self.strategy, reading, self.batches)

    @property
    def element_spec(self) -> Any:
        """The spec of an element, per replica where there are several."""
        return _element_spec(self, self.dataset)

    @property
    def cardinality(self) -> Any:
        """Number of steps, as `tf.data.Dataset.cardinality` gives it."""
        return self.dataset.cardinality()

    @property
    def components(self) -> Any:
        """The dataset of this worker, which is made of tensors."""
        return self.dataset

    @property
    def _type_spec(self) -> tf.TypeSpec:
        return _spec_of(ShareDatasetSpec, self)


class ShareIterator(StepIterator):
    """Iterates over a `ShareDataset`, also inside `tf.function`.

    Args:
        iterator: `tf.data.Iterator` over elements of a `ShareDataset`.
        strategy: A tfdp strategy.
        reading: `Reading`.
    """

    def __init__(self, iterator: Any, strategy: Any, reading: Reading) -> None:
        super().__init__(iterator, strategy)
        self.reading = reading

    @property
    def element_spec(self) -> Any:
        """The spec of an element, per replica where there are several."""
        return _element_spec(self, self._iterator)

    def get_next(self) -> Any:
        """The next shares; raises `tf.errors.OutOfRangeError` at the end."""
        if not self.reading.asks:
            parts, num_rows = self._iterator.get_next()
            batch = self._per_replica(parts)
            return CountedBatch(batch, num_rows) if self.reading.counts else batch
        optional = self._iterator.get_next_as_optional()

        def value_or_empty() -> Any:
            return tf.cond(optional.has_value(), optional.get_value, self._empty)

        # Workers that run out of data alone know the rows of no common batch.
        parts, _ = tf.cond(self._goes_on(optional), value_or_empty, self._end)
        return self._per_replica(parts)

    def get_next_as_optional(self) -> Any:
        """The next shares, or an empty optional at the end."""
        optional = self._iterator.get_next_as_optional()
        asks = self.reading.asks
        has_value = self._goes_on(optional) if asks else optional.has_value()

        def value() -> Any:
            parts, _ = (
                tf.cond(optional.has_value(), optional.get_value, self._empty)
                if asks
                else optional.get_value()
            )
            return tf.experimental.Optional.from_value(self._per_replica(parts))

        def nothing() -> Any:
            return tf.experimental.Optional.empty(self.element_spec)

        return tf.cond(has_value, value, nothing)

    def _per_replica(self, parts: tuple) -> Any:
        """The local replicas' shares; the parts are them, or one whole batch."""
        if self.reading.by_weight:
            extended = self.strategy.extended
            first, weights = extended.first_rank, extended.balance.weights
            ranks = list(range(first, first + extended.num_local))
            parts = shares_by_weight(parts[0], ranks, weights.read_value())
        return _compat.per_replica(list(parts))

    def _goes_on(self, optional: Any) -> tf.Tensor:
        return goes_on(self.strategy, optional.has_value(), stops=self.reading.stops)

    def _end(self) -> Any:
        with tf.control_dependencies([raise_end(self.strategy)]):
            return self._empty()

    def _empty(self) -> Any:
        return tf.nest.map_structure(_no_rows, self._iterator.element_spec)

    @property
    def _type_spec(self) -> tf.TypeSpec:
        return _spec_of(ShareIteratorSpec, self)


class _ShareSpec(tf.TypeSpec):
    """Lets a dataset of shares or its iterator be an argument of `tf.function`."""

    __slots__ = ("_inner", "_reading", "_strategy_id")

    def __init__(self, inner: Any, strategy_id: int, reading: tuple) -> None:
        self._inner = inner
        self._strategy_id = strategy_id
        self._reading = tuple(reading)

    def _serialize(self) -> tuple:
        return (self._inner, self._strategy_id, self._reading)

    @property
    def _component_specs(self) -> Any:
        return self._inner

    def _to_components(self, value: Any) -> Any:
        return value.components

    def _from_components(self, components: Any) -> Any:
        strategy = _strategies[self._strategy_id]
        return self.value_type(components, strategy, Reading(*self._reading))


class ShareDatasetSpec(_ShareSpec):
    """The spec of a `ShareDataset`."""

    __slots__ = ()

    @property
    def value_type(self) -> type:
        return ShareDataset


class ShareIteratorSpec(_ShareSpec):
    """The spec of a `ShareIterator`."""

    __slots__ = ()

    @property
    def value_type(self) -> type:
        return ShareIterator


def _spec_of(kind: type, value: Any) -> Any:
    # A spec is compared by plain values, so the strategy stands in a table.
    _strategies[id(value.strategy)] = value.strategy
    inner = _compat.type_spec_of(value.components)
    return kind(inner, id(value.strategy), value.reading)


def _element_spec(value: Any, source: Any) -> Any:
    """The spec of what a `ShareDataset` or `ShareIterator` gives from a source."""
    parts = source.element_spec[0]
    if value.reading.by_weight:
        any_rows = tf.nest.map_structure(_of_any_rows, parts[0])
        parts = (any_rows,) * value.strategy.extended.num_local
    return _per_replica_spec(parts)


def _of_any_rows(spec: Any) -> Any:
    """The spec of some of the rows of a tensor."""
    if not getattr(getattr(spec, "shape", None), "rank", None):
        return spec
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        kinds = spec.ragged_rank, spec.row_splits_dtype
        return tf.RaggedTensorSpec(shape, spec.dtype, *kinds)
    return type(spec)(shape, spec.dtype)


def _per_replica_spec(specs: tuple) -> Any:
    if len(specs) == 1:
        return specs[0]

    def of_replicas(*own: Any) -> Any:
        # None is the same object for all replicas, and stays it.
        is_none = isinstance(own[0], _compat.NoneTensorSpec)
        return own[0] if is_none else _compat.PerReplicaSpec(*own)

    return tf.nest.map_structure(of_replicas, *specs)


def _no_rows(spec: Any) -> Any:
    """An empty batch of a spec, for a worker that has run out of data."""
    if isinstance(spec, _compat.NoneTensorSpec):
        return None
    if isinstance(spec, tf.OptionalSpec):
        return _compat.empty_optional(spec)
    if isinstance(spec, tf.SparseTensorSpec):
        shape = [0, *(size or 0 for size in spec.shape[1:])]
        indices = tf.zeros([0, len(shape)], tf.int64)
        return tf.SparseTensor(indices, tf.zeros([0], spec.dtype), shape)
    if isinstance(spec, tf.RaggedTensorSpec):
        rows: list = [[]] if spec.ragged_rank else []
        empty = tf.ragged.constant(rows, spec.dtype, ragged_rank=spec.ragged_rank)
        return empty[:0]
    shape = [0, *(size or 0 for size in spec.shape[1:])] if spec.shape.rank else []
    return tf.zeros(shape, spec.dtype)
