"""Where the data ends for all workers: they ask each other at each step.

With the question whether any worker has data, those without get empty batches until
the last one is through. With the question whether all have, nobody goes on once one
has none.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp import _compat
from tfdp.collectives import all_reduce


def goes_on(strategy: Any, has_data: tf.Tensor, *, stops: bool) -> tf.Tensor:
    """Whether there is another step.

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


def raise_end(strategy: Any) -> tf.Tensor:
    """Raises the error of the end of data, for a worker that has more of its own.

    Raises:
        tf.errors.OutOfRangeError: Always; in a graph, when it runs.

    Returns:
        Scalar tensor that waits for the error.
    """
    with tf.device(strategy.extended.host_group.devices[0]):
        return iter(tf.data.Dataset.range(0)).get_next()


class CommonEndDataset:
    """A distributed dataset of TensorFlow's, which ends when one worker's does.

    TensorFlow's own ends when all are through, and it has no option for that.

    Args:
        dataset: A distributed dataset of a tfdp strategy.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> CommonEndIterator:
        return CommonEndIterator(iter(self._dataset))

    @property
    def element_spec(self) -> Any:
        """The spec of an element, per replica where there are several."""
        return self._dataset.element_spec


class StepIterator(_compat.DistributedIteratorInterface, _compat.CompositeTensor):
    """What iterators of tfdp have in common: Python's protocol around `get_next`.

    Args:
        iterator: The iterator of this worker, which is made of tensors.
        strategy: A tfdp strategy.
    """

    def __init__(self, iterator: Any, strategy: Any) -> None:
        self._iterator = iterator
        self.strategy = strategy

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        try:
            return self.get_next()
        except tf.errors.OutOfRangeError as error:
            raise StopIteration from error

    @property
    def components(self) -> Any:
        """The iterator of this worker, which is made of tensors."""
        return self._iterator


class CommonEndIterator(StepIterator):
    """Iterates over a `CommonEndDataset`, also inside `tf.function`.

    Args:
        iterator: Iterator of TensorFlow's over a distributed dataset.
    """

    def __init__(self, iterator: Any) -> None:
        super().__init__(iterator, _compat.strategy_of_iterator(iterator))

    @property
    def element_spec(self) -> Any:
        """The spec of an element, per replica where there are several."""
        return self._iterator.element_spec

    def get_next(self) -> Any:
        """The next batches; raises `tf.errors.OutOfRangeError` at the end."""
        optionals = _compat.optionals_of_replicas(self._iterator)

        def values() -> Any:
            return _compat.values_or_empty(self._iterator, optionals)

        def end() -> Any:
            with tf.control_dependencies([raise_end(self.strategy)]):
                return values()

        return tf.cond(self._all_have(optionals), values, end)

    def get_next_as_optional(self) -> Any:
        """The next batches, or an empty optional at the end."""
        optionals = _compat.optionals_of_replicas(self._iterator)

        def values() -> Any:
            found = _compat.values_or_empty(self._iterator, optionals)
            return tf.experimental.Optional.from_value(found)

        def nothing() -> Any:
            return tf.experimental.Optional.empty(self.element_spec)

        return tf.cond(self._all_have(optionals), values, nothing)

    def _all_have(self, optionals: list) -> tf.Tensor:
        # The last batches of a worker may be fewer than its replicas.
        return goes_on(self.strategy, _compat.any_has_value(optionals), stops=True)

    @property
    def _type_spec(self) -> tf.TypeSpec:
        return CommonEndIteratorSpec(_compat.type_spec_of(self._iterator))


class CommonEndIteratorSpec(tf.TypeSpec):
    """Lets a `CommonEndIterator` be an argument of `tf.function`."""

    __slots__ = ("_inner",)

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def value_type(self) -> type:
        return CommonEndIterator

    def _serialize(self) -> tuple:
        return (self._inner,)

    @property
    def _component_specs(self) -> Any:
        return self._inner

    def _to_components(self, value: Any) -> Any:
        return value.components

    def _from_components(self, components: Any) -> Any:
        return CommonEndIterator(components)
