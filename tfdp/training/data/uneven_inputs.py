"""Uneven inputs: the step at which the data ends for all workers.

Workers ask each other at each step. Either they go on while any worker has data, and
those without get empty batches; or they stop as soon as one has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.communication.collectives import Member, timing
from tfdp.communication.coordination.data_wait import ReadCounts, data_wait
from tfdp.ground import _compat
from tfdp.ground.base.finalizers import FinalizerThread
from tfdp.ground.forks import keep_in_forks

# Batches asked for, and given, of this process: only where somebody watches them, so
# that nothing is added to the graph otherwise.
_counts: list[Any] = []
_deletions = FinalizerThread("tfdp-iterators")
# A spec is compared by plain values, so that classes stand in a table.
_kinds: dict[int, type] = {}


def has_next_step(strategy: Any, has_data: tf.Tensor, *, stops: bool) -> tf.Tensor:
    """Agree on whether there is another step.

    Args:
        strategy: A tfdp strategy.
        has_data: Scalar bool tensor, whether this worker has data for it.
        stops: Bool, whether all workers have to have data, or one is enough.

    Returns:
        Scalar bool tensor, the same on all workers.
    """
    group = strategy.extended.host_group
    with tf.device(group.devices[0]):
        own = tf.cast(has_data, tf.int32)[tf.newaxis]  # [1]
        num_workers = Member(group, 0).all_reduce(own)[0]  # [], int32
        return num_workers == group.size if stops else num_workers > 0


def raise_out_of_range(strategy: Any) -> tf.Tensor:
    """Raise the error of the end of data, also where this worker has more.

    Raises:
        tf.errors.OutOfRangeError: Always; in a graph, when it runs.

    Returns:
        Scalar tensor that waits for the error.
    """
    with tf.device(strategy.extended.host_group.devices[0]):
        return iter(tf.data.Dataset.range(0)).get_next()


class StockDataset:
    """Distributed dataset of TensorFlow that is read by another iterator.

    Args:
        dataset: A distributed dataset of a tfdp strategy.
        iterator_class: `CountedIterator` or `ShortestIterator`.
    """

    def __init__(self, dataset: Any, iterator_class: type[StockIterator]) -> None:
        self._dataset = dataset
        self._iterator_class = iterator_class

    def __iter__(self) -> StockIterator:
        return self._iterator_class(iter(self._dataset))

    @property
    def element_spec(self) -> Any:
        """Spec of an element, per replica where there are several."""
        return self._dataset.element_spec


class StepIterator(_compat.DistributedIteratorInterface, _compat.CompositeTensor):
    """Base class of iterators: Python's protocol around `get_next`.

    Args:
        iterator: The iterator of this worker, which is made of tensors.
        strategy: A tfdp strategy.
    """

    def __init__(self, iterator: Any, strategy: Any) -> None:
        self._iterator = iterator
        self.strategy = strategy
        keep_in_forks(iterator)

    def delete_in_background(self) -> None:
        """Delete the iterator of this worker on another thread, once this one is.

        To delete it may take as long as reading it has taken, at most a minute:
        TensorFlow's autotuning sleeps through its cancellation, of which it is notified
        before it can see it (`Model::OptimizeLoop`, `CancellationManager`).
        """
        # Its last reference is that of the call.
        _deletions.register(self, id, self._iterator)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        try:
            return self.get_next()
        except tf.errors.OutOfRangeError as error:
            raise StopIteration from error

    def get_next(self) -> Any:
        """Return the next batch; raise `tf.errors.OutOfRangeError` at the end."""
        has_next, values = self._next_step()

        def end() -> Any:
            with tf.control_dependencies([raise_out_of_range(self.strategy)]):
                return values()

        return tf.cond(has_next, values, end)

    def get_next_as_optional(self) -> Any:
        """Return the next batch, or an empty optional at the end."""
        has_next, values = self._next_step()
        return tf.cond(
            has_next,
            lambda: tf.experimental.Optional.from_value(values()),
            lambda: tf.experimental.Optional.empty(self._next_spec),
        )

    def _next_step(self) -> tuple[tf.Tensor, Callable[[], Any]]:
        """Whether there is a next batch, alike on all workers, and what returns it.

        Where there is none on this worker, it returns an empty one.
        """
        raise NotImplementedError

    @property
    def _next_spec(self) -> Any:
        return self.element_spec

    @property
    def components(self) -> Any:
        """The iterator of this worker, a composite tensor."""
        return self._iterator


class StockIterator(StepIterator):
    """Base class of iterators over what an iterator of TensorFlow's gives.

    Args:
        iterator: Iterator of TensorFlow's over a distributed dataset.
    """

    def __init__(self, iterator: Any) -> None:
        super().__init__(iterator, _compat.strategy_of_iterator(iterator))

    @property
    def element_spec(self) -> Any:
        """Spec of an element, per replica where there are several."""
        return self._iterator.element_spec

    @property
    def _type_spec(self) -> tf.TypeSpec:
        return ComponentsSpec.of(self)


class CountedIterator(StockIterator):
    """Iterator whose reads are counted, see `count_reads`."""

    def get_next(self) -> Any:
        """Return the next batch; raise `tf.errors.OutOfRangeError` at the end."""
        with Read() as read:
            batch = self._iterator.get_next()
        read.given(batch)
        return batch

    def get_next_as_optional(self) -> Any:
        """Return the next batch, or an empty optional at the end."""
        with Read() as read:
            optional = self._iterator.get_next_as_optional()
        read.given(optional.has_value())
        return optional


class ShortestIterator(StockIterator):
    """Iterator that ends with the shortest data of a worker.

    TensorFlow's own ends with the longest, without an option.
    """

    def _next_step(self) -> tuple[tf.Tensor, Callable[[], Any]]:
        optionals = _compat.optionals_of_replicas(self._iterator)
        # The last batches of a worker may be fewer than its replicas.
        has_data = _compat.any_has_value(optionals)
        has_next = has_next_step(self.strategy, has_data, stops=True)
        return has_next, lambda: _compat.values_or_empty(self._iterator, optionals)


class ComponentsSpec(tf.TypeSpec):
    """Type spec of what is made of its `components`, an argument of `tf.function`.

    Args:
        inner: Spec of the components.
        kind: Int, the number of the class of the value in a table.
        *settings: Further arguments of the class, of types that specs can compare.
    """

    __slots__ = ("_inner", "_kind", "_settings")

    def __init__(self, inner: Any, kind: int, *settings: Any) -> None:
        self._inner = inner
        self._kind = kind
        self._settings = settings

    @classmethod
    def of(cls, value: Any, *settings: Any) -> ComponentsSpec:
        """Return the spec of a value."""
        kind = type(value)
        _kinds[id(kind)] = kind
        return cls(tf.type_spec_from_value(value.components), id(kind), *settings)

    @property
    def value_type(self) -> Any:
        """Class of the value."""
        return _kinds[self._kind]

    def _serialize(self) -> tuple:
        return (self._inner, self._kind, *self._settings)

    @property
    def _component_specs(self) -> Any:
        return self._inner

    def _to_components(self, value: Any) -> Any:
        return value.components

    def _from_components(self, components: Any) -> Any:
        return self.value_type(components, *self._settings)


def count_reads() -> None:
    """Count the reads of what is traced from now on."""
    if not _counts:
        _counts.extend(
            _compat.plain_variable(np.int64(0), tf.int64, "CPU:0") for _ in range(2)
        )
        data_wait.read_counts = _read


def is_counting() -> bool:
    """Return whether reads are counted."""
    return bool(_counts)


class Read:
    """A read of a batch, as a context manager around it.

    The end of the data is an error of TensorFlow, after which nothing is counted: so
    a read takes its number from the batches asked for, and is not one more.
    """

    def __enter__(self) -> Read:
        if _counts:
            asked = _counts[0]
            self._number = _write(asked, lambda: asked.assign_add(1))
            self._order = tf.control_dependencies([self._number])
            self._order.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if _counts:
            self._order.__exit__(*error)

    def given(self, batch: Any) -> None:
        """Count that the batch is there.

        Args:
            batch: Nest of tensors, as it was read.
        """
        if _counts:
            given = _counts[1]
            with tf.control_dependencies(tf.nest.flatten(batch, True)):
                _write(given, lambda: given.assign(self._number))


def _write(count: Any, assign: Callable[[], Any]) -> tf.Tensor:
    if tf.executing_eagerly():
        assign()
        return count.read_value()
    return timing.write(count, assign)


def _read() -> ReadCounts:
    return ReadCounts(
        *(
            # Without a function: that would wake other threads, and cost more.
            int(tf.raw_ops.ReadVariableOp(resource=count.handle, dtype=tf.int64))
            for count in _counts
        )
    )
