"""Uneven inputs: agreement of the workers on the step at which the data ends.

At each step an all-reduce counts the workers that have data. Either the loop continues
while any worker has data, and workers without data get empty batches; or it stops as
soon as one worker has no data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.communication.collectives import Member, timing
from tfdp.communication.coordination.data_wait import ReadCounts, data_wait
from tfdp.ground._compat import runtime, tf_data
from tfdp.ground.base.finalizers import FinalizerThread
from tfdp.ground.forks import keep_in_forks

# Two variables, the numbers of batches that this process has requested and received.
# `_counts` is empty until `count_reads` is called: graphs have no counters by default.
_counts: list[Any] = []
_deletions = FinalizerThread("tfdp-iterators")
# Classes by their `id`. TensorFlow compares type specs by plain values, so a spec holds
# the `id` of the class of its values instead of the class.
_kinds: dict[int, type] = {}


def has_next_step(strategy: Any, has_data: tf.Tensor, *, stops: bool) -> tf.Tensor:
    """Agree between workers on whether another step follows.

    Args:
        strategy: A tfdp strategy.
        has_data: Scalar bool tensor, whether this worker has data for the step.
        stops: Bool, whether a step requires data on all workers, and not only on one.

    Returns:
        Scalar bool tensor, the same on all workers.
    """
    group = strategy.extended.host_group
    with tf.device(group.devices[0]):
        has_data_here = tf.cast(has_data, tf.int32)[tf.newaxis]
        num_with_data = Member(group, 0).all_reduce(has_data_here)[0]
        return num_with_data == group.size if stops else num_with_data > 0


def raise_out_of_range(strategy: Any) -> tf.Tensor:
    """Raise the end-of-data error, even if this worker has more data.

    Raises:
        tf.errors.OutOfRangeError: Always; a graph raises it when it runs.

    Returns:
        Scalar tensor, whose computation raises the error in a graph.
    """
    with tf.device(strategy.extended.host_group.devices[0]):
        return iter(tf.data.Dataset.range(0)).get_next()


class StockDataset:
    """Wrapper of TensorFlow's own distributed dataset that replaces its iterator.

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
        """Spec of an element, per replica if there are several local replicas."""
        return self._dataset.element_spec


class StepIterator(tf_data.DistributedIteratorInterface, tf_data.CompositeTensor):
    """Base class of distributed iterators, with Python's protocol around `get_next`.

    Args:
        iterator: Composite tensor, the iterator of this worker.
        strategy: A tfdp strategy.
    """

    def __init__(self, iterator: Any, strategy: Any) -> None:
        # The list holds the only reference to the iterator, so emptying the list
        # deletes the iterator, see `delete_in_background`.
        self._kept = [iterator]
        self.strategy = strategy
        keep_in_forks(iterator)

    @property
    def _iterator(self) -> Any:
        """The iterator of this worker."""
        return self._kept[0]

    def delete_in_background(self) -> None:
        """Let another thread delete this worker's iterator once `self` is deleted.

        Deletion may take as long as reading has taken, up to a minute: the notification
        of a cancellation can precede the wait of TensorFlow's autotuning, which then
        sleeps for its whole period (`Model::OptimizeLoop`, `CancellationManager`).
        """
        _deletions.register(self, self._kept.clear)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        """Return the next batch; raise `StopIteration` at the end of the data."""
        try:
            return self.get_next()
        except tf.errors.OutOfRangeError as error:
            raise StopIteration from error

    def get_next(self) -> Any:
        """Return the next batch; raise `tf.errors.OutOfRangeError` at the end."""
        has_next, values = self._next_step()

        def end() -> Any:
            """Raise `tf.errors.OutOfRangeError` when the graph runs."""
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
        """Return whether the loop has a next step, and a function that reads its batch.

        On a worker that has run out of data, the function returns an empty batch.
        """
        raise NotImplementedError

    @property
    def _next_spec(self) -> Any:
        """Type spec of the batch that `get_next` returns."""
        return self.element_spec

    @property
    def components(self) -> Any:
        """The iterator of this worker, from which a type spec rebuilds the object."""
        return self._iterator


class StockIterator(StepIterator):
    """Base class of wrappers of TensorFlow's own distributed iterator.

    Args:
        iterator: TensorFlow's iterator over a distributed dataset.
    """

    def __init__(self, iterator: Any) -> None:
        super().__init__(iterator, tf_data.strategy_of_iterator(iterator))

    @property
    def element_spec(self) -> Any:
        """Spec of an element, per replica if there are several local replicas."""
        return self._iterator.element_spec

    @property
    def _type_spec(self) -> tf.TypeSpec:
        """Type spec by which `tf.function` takes the iterator as an argument."""
        return ComponentsSpec.of(self)


class CountedIterator(StockIterator):
    """TensorFlow's distributed iterator, with counts of requested and received batches.

    The counts show how long a process waits for data. Reads that are traced before
    `count_reads` is called are not counted.
    """

    def get_next(self) -> Any:
        """Return the next batch; raise `tf.errors.OutOfRangeError` at the end."""
        with CountedRead() as read:
            batch = self._iterator.get_next()
        read.count_received(batch)
        return batch

    def get_next_as_optional(self) -> Any:
        """Return the next batch, or an empty optional at the end."""
        with CountedRead() as read:
            optional = self._iterator.get_next_as_optional()
        read.count_received(optional.has_value())
        return optional


class ShortestIterator(StockIterator):
    """TensorFlow's distributed iterator, ended when the first worker runs out of data.

    Without this class it ends with the worker that has the most data.
    """

    def _next_step(self) -> tuple[tf.Tensor, Callable[[], Any]]:
        """Return whether all workers have data, and a function that reads the batch."""
        optionals = tf_data.optionals_of_replicas(self._iterator)
        # At the end of its data a worker may have batches for only some replicas. One
        # batch is enough for a step, since the other replicas get empty batches.
        has_data = tf_data.any_has_value(optionals)
        has_next = has_next_step(self.strategy, has_data, stops=True)
        return has_next, lambda: tf_data.values_or_empty(self._iterator, optionals)


class ComponentsSpec(tf.TypeSpec):
    """Type spec of a class whose values `tf.function` takes apart into `components`.

    Args:
        inner: Spec of the components.
        kind: Int, the `id` of the class, which `of` has registered.
        *settings: Further arguments of the class, of types that specs can compare.
    """

    __slots__ = ("_inner", "_kind", "_settings")

    def __init__(self, inner: Any, kind: int, *settings: Any) -> None:
        self._inner = inner
        self._kind = kind
        self._settings = settings

    @classmethod
    def of(cls, value: Any, *settings: Any) -> ComponentsSpec:
        """Return the spec of a value, and register the value's class by its `id`.

        `settings` are further arguments of the class, of types that specs can compare.
        """
        kind = type(value)
        _kinds[id(kind)] = kind
        return cls(tf.type_spec_from_value(value.components), id(kind), *settings)

    @property
    def value_type(self) -> Any:
        """Class of the values that this spec describes."""
        return _kinds[self._kind]

    def _serialize(self) -> tuple:
        """Return the arguments of the spec, by which TensorFlow compares specs."""
        return (self._inner, self._kind, *self._settings)

    @property
    def _component_specs(self) -> Any:
        """Spec of `components`, the parts into which `tf.function` takes a value."""
        return self._inner

    def _to_components(self, value: Any) -> Any:
        """Return the `components` of a value of the class that the spec describes."""
        return value.components

    def _from_components(self, components: Any) -> Any:
        """Return a value of the spec's class, rebuilt from its components."""
        return self.value_type(components, *self._settings)


def count_reads() -> None:
    """Count the batches that this process requests and receives, until it ends.

    `data_wait` compares the counts to measure waits for data. Only eager code, and
    functions that are traced after this call, count their reads.
    """
    if not _counts:
        _counts.extend(
            runtime.plain_variable(np.int64(0), tf.int64, "CPU:0") for _ in range(2)
        )
        data_wait.read_counts = _read_counts


def is_counting() -> bool:
    """Return whether this process counts the batches that it requests and receives.

    It does from the call of `count_reads` on.
    """
    return bool(_counts)


class CountedRead:
    """Context manager around a read of a batch, which counts the read for `data_wait`.

    On entry, one is added to the number of requested batches. `count_received` then
    sets the number of received batches to that number, instead of adding one: at the
    end of the data TensorFlow raises, and a request is never received. Without
    `count_reads` nothing is counted.
    """

    def __enter__(self) -> CountedRead:
        """Count a request; operations that the block creates run after the count."""
        if _counts:
            num_requested = _counts[0]
            self._number = _write_count(
                num_requested, lambda: num_requested.assign_add(1)
            )
            self._order = tf.control_dependencies([self._number])
            self._order.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """End the block, whose operations run after the count of the request."""
        if _counts:
            self._order.__exit__(*error)

    def count_received(self, batch: Any) -> None:
        """Set the number of received batches to that of this request.

        Args:
            batch: Nest of tensors, the result of the read. The assignment waits for it
                by a control dependency.
        """
        if _counts:
            num_received = _counts[1]
            with tf.control_dependencies(tf.nest.flatten(batch, True)):
                _write_count(num_received, lambda: num_received.assign(self._number))


def _write_count(counter: Any, assign: Callable[[], Any]) -> tf.Tensor:
    """Assign a counter, eagerly or in a graph, and return its new value.

    Args:
        counter: `tf.Variable`, the counter.
        assign: Function without arguments that assigns it.
    """
    if tf.executing_eagerly():
        assign()
        return counter.read_value()
    return timing.write(counter, assign)


def _read_counts() -> ReadCounts:
    """Return how many batches this process has requested and received."""
    return ReadCounts(
        *(
            # `ReadVariableOp` reads a counter at less cost than a call of a traced
            # function, and wakes no other thread.
            int(tf.raw_ops.ReadVariableOp(resource=count.handle, dtype=tf.int64))
            for count in _counts
        )
    )
