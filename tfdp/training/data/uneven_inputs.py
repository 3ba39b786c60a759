"""Uneven inputs: the step at which the data ends for all workers.

Workers ask each other at each step. Either they go on while any worker has data, and
those without get empty batches; or they stop as soon as one has none.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import all_reduce
from tfdp.ground import _compat
from tfdp.ground.base.finalizers import FinalizerThread
from tfdp.ground.forks import keep_in_forks
from tfdp.training.data.read_counts import Read

_deletions = FinalizerThread("tfdp-iterators")


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
        num_workers = all_reduce(own, group, 0)[0]  # [], int32
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

    @property
    def components(self) -> Any:
        """The iterator of this worker, a composite tensor."""
        return self._iterator


class StockIterator(StepIterator):
    """Base class of iterators over what an iterator of TensorFlow's gives.

    Args:
        iterator: Iterator of TensorFlow's over a distributed dataset.
    """

    spec_class: type[ComponentsSpec]

    def __init__(self, iterator: Any) -> None:
        super().__init__(iterator, _compat.strategy_of_iterator(iterator))

    @property
    def element_spec(self) -> Any:
        """Spec of an element, per replica where there are several."""
        return self._iterator.element_spec

    @property
    def _type_spec(self) -> tf.TypeSpec:
        return self.spec_class(_compat.type_spec_of(self._iterator))


class CountedIterator(StockIterator):
    """Iterator whose reads are counted, see `tfdp.training.data.read_counts`."""

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

    def get_next(self) -> Any:
        """Return the next batches; raise `tf.errors.OutOfRangeError` at the end."""
        optionals = _compat.optionals_of_replicas(self._iterator)

        def values() -> Any:
            return _compat.values_or_empty(self._iterator, optionals)

        def end() -> Any:
            with tf.control_dependencies([raise_out_of_range(self.strategy)]):
                return values()

        return tf.cond(self._all_have(optionals), values, end)

    def get_next_as_optional(self) -> Any:
        """Return the next batches, or an empty optional at the end."""
        optionals = _compat.optionals_of_replicas(self._iterator)

        def values() -> Any:
            found = _compat.values_or_empty(self._iterator, optionals)
            return tf.experimental.Optional.from_value(found)

        def nothing() -> Any:
            return tf.experimental.Optional.empty(self.element_spec)

        return tf.cond(self._all_have(optionals), values, nothing)

    def _all_have(self, optionals: list) -> tf.Tensor:
        # The last batches of a worker may be fewer than its replicas.
        return has_next_step(
            self.strategy, _compat.any_has_value(optionals), stops=True
        )


class ComponentsSpec(tf.TypeSpec):
    """Base class of the type specs of what is made of its `components`."""

    __slots__ = ("_inner",)

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def _serialize(self) -> tuple:
        return (self._inner,)

    @property
    def _component_specs(self) -> Any:
        return self._inner

    def _to_components(self, value: Any) -> Any:
        return value.components

    def _from_components(self, components: Any) -> Any:
        return self.value_type(components)


class CountedIteratorSpec(ComponentsSpec):
    """Type spec of a `CountedIterator`, as an argument of `tf.function`."""

    __slots__ = ()
    value_type = CountedIterator


class ShortestIteratorSpec(ComponentsSpec):
    """Type spec of a `ShortestIterator`, as an argument of `tf.function`."""

    __slots__ = ()
    value_type = ShortestIterator


CountedIterator.spec_class = CountedIteratorSpec
ShortestIterator.spec_class = ShortestIteratorSpec
