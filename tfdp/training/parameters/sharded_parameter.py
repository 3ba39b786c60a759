"""Variables that are divided among replicas, and read as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.ground._compat import tensor_reads, tf_distribute
from tfdp.ground.base import program_trace
from tfdp.ground.base.context import replica_context
from tfdp.ground.plans.shards import Segment
from tfdp.ground.plans.units import Ranges
from tfdp.training.parameters.packing import elements_of
from tfdp.training.replicas.assigned_values import AssignedValues
from tfdp.training.replicas.variables import MirroredVariable


class ShardedParameter(MirroredVariable):
    """Variable whose elements are divided among replicas.

    A model sees the whole parameter: a step that reads it gathers it, together with the
    other parameters of its unit, and its gradient is that of the whole. Its components,
    one for each local replica, are the parts.

    Args:
        strategy: A tfdp strategy.
        parts: Sequence of `tf.Variable`, the part of each local replica.
        shape: `tf.TensorShape` of the whole.
        ranges: `Ranges`, the range of elements of each owner.
        reader: `Gathers`, which gathers the parameter; or `None` if it has no values
            yet, after a change of the replicas.
        casts: Bool, whether Keras reads it in the dtype of an autocast scope.
    """

    has_parts = True

    def __init__(
        self,
        strategy: Any,
        parts: Sequence[tf.Variable],
        shape: Any,
        ranges: Ranges,
        reader: Any,
        *,
        casts: bool,
    ) -> None:
        self.whole_shape = tf.TensorShape(shape)
        self.ranges = ranges
        self.reader = reader
        self.casts = casts
        # `unit` is set when an optimizer plans which parameters are gathered together.
        # Eager mode keeps the gathered value, for all local replicas of a
        # `strategy.run`, and the tensor that gradient tapes see for the parameter.
        self.unit: Any = None
        self.eager_value: tuple[Any, tf.Tensor] | None = None
        self.eager_source: tf.Tensor | None = None
        self.assigned = AssignedValues()
        super().__init__(strategy, list(parts), tf.VariableAggregation.NONE)

    @property
    def num_elements(self) -> int:
        """Int, number of elements of the whole."""
        return self.whole_shape.num_elements()

    def replace_parts(self, parts: Sequence[tf.Variable], ranges: Ranges) -> None:
        """Replace the parts of the local replicas and the ranges of all owners.

        Gathered values are dropped.
        """
        self._values = tuple(parts)
        self.ranges = ranges
        self.reader.forget(self)

    # TensorFlow and Keras must see the whole parameter, not this process's parts, so
    # the inherited methods for shape, value and assignment are overridden.

    @property
    def trainable(self) -> bool:
        """Bool, always `True`."""
        return True

    @property
    def shape(self) -> tf.TensorShape:
        """`tf.TensorShape` of the whole."""
        return self.whole_shape

    def get_shape(self) -> tf.TensorShape:
        """Return the `tf.TensorShape` of the whole."""
        return self.whole_shape

    @property
    def handle(self) -> tf.Tensor:
        """Tensor that stands for the parameter on gradient tapes."""
        return self.reader.source(self)

    def _get(self) -> tf.Tensor:
        """Return the whole parameter, gathered if necessary."""
        return self.reader.read(self)

    def _get_on_device_or_primary(self) -> tf.Tensor:
        """Return the whole parameter, gathered if necessary, on any device."""
        return self._get()

    def value(self) -> tf.Tensor:
        """Return the whole parameter, gathered if necessary."""
        return self._get()

    def read_value(self) -> tf.Tensor:
        """Return the whole parameter, gathered if necessary."""
        return self._get()

    def numpy(self) -> np.ndarray:
        """Return the whole parameter as an array, gathered if necessary."""
        return np.asarray(self._get().numpy())

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> ShardedParameter:
        """Assign a value of the whole shape: each replica assigns its part."""
        del args, kwargs
        value = tf.convert_to_tensor(value, self.dtype)
        value.shape.assert_is_compatible_with(self.whole_shape)
        self.record(value, replaces=True)
        return self._update_parts(lambda part, own: part.assign(own), value)

    def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> ShardedParameter:
        """Add a value of the whole shape: each replica adds to its part."""
        del args, kwargs
        delta = tf.convert_to_tensor(delta, self.dtype)
        self.record(delta, replaces=False)
        return self._update_parts(lambda part, own: part.assign_add(own), delta)

    def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> ShardedParameter:
        """Subtract a value of the whole shape: each replica from its part."""
        return self.assign_add(-tf.convert_to_tensor(delta, self.dtype))

    def assign_part(self, value: tf.Tensor) -> None:
        """Assign a value to the part of the running replica; drop gathered values.

        Args:
            value: Tensor with as many elements as the part.
        """
        part = tf_distribute.local_part(self)
        part.assign(tf.reshape(value, part.shape), read_value=False)
        self.reader.forget(self)

    def _update_parts(self, update: Callable, value: tf.Tensor) -> ShardedParameter:
        """Update the part of the running replica, or all local parts outside of one.

        Args:
            update: Callable that takes a part and its new elements.
            value: Tensor of the whole shape.
        """
        if (trace := program_trace.current()) is not None:

            def run(values: list) -> None:
                """Update the part of the replica that traces the recorded step.

                `values` has one tensor: `value`, whole, on that replica.
                """
                self._update_parts(update, values[0])

            trace.add([value], run)
            return self
        context = replica_context()
        replicas: Sequence[int] = range(len(self.values))
        if context is not None:
            replicas = [tf_distribute.local_replica_id(context)]
            self.reader.gather_before_assignment()
        for replica in replicas:
            part = self.values[replica]
            start, stop = self.ranges[self.reader.groups.owner(replica)]
            with tf.device(part.device):
                elements = copy_of_elements(value, start, stop)
                update(part, tf.reshape(elements, part.shape))
        self.reader.forget(self)
        return self


def sharded_parameter(variable: Any) -> ShardedParameter | None:
    """Return the `ShardedParameter` of a Keras variable, or `None` if it is whole."""
    value = tensor_reads.value_of(variable)
    return value if isinstance(value, ShardedParameter) else None


def parameter_of(variable: Any) -> ShardedParameter:
    """Return the `ShardedParameter` of a Keras variable that is sharded."""
    found = sharded_parameter(variable)
    assert found is not None
    return found


def check_reader(variables: Sequence[Any], reader: Any) -> None:
    """Check that each variable is whole, or sharded by the `Gathers` of an optimizer.

    Args:
        variables: Sequence of Keras variables.
        reader: `Gathers` of the optimizer, or `None` if all variables must be whole.

    Raises:
        ValueError: If a variable is sharded in another way.
    """
    for variable in variables:
        parameter = sharded_parameter(variable)
        if parameter is None or parameter.reader is reader:
            continue
        if parameter.unit is None and reader is not None:
            # No optimizer has planned a unit with this parameter yet, so the optimizer
            # of `reader` may plan one.
            continue
        if parameter.unit is None:
            raise ValueError(
                'The model was created in `strategy.scope(init="deferred")`: each '
                "replica has only a part of its parameters. Give `compile` a "
                '`DistributedOptimizer(..., sharding="parameters")`, or `fit` '
                f"`ShardedOptimizer(stage=3)`. Received: {parameter.name!r}"
            )
        raise ValueError(
            "The model's parameters are sharded by another optimizer, with other "
            "options. Create each optimizer that updates them as "
            '`DistributedOptimizer(..., sharding="parameters")` with the same '
            "`shard_scope`, or build the model again. Received: "
            f"{parameter.name!r}"
        )


def copy_of_elements(whole: tf.Tensor, start: int, stop: int) -> tf.Tensor:
    """Return a copy of elements `start` to `stop - 1` of a flattened tensor.

    A slice shares the memory of its tensor, so a variable with the slice as its value
    would keep the whole tensor alive.
    """
    return tf.raw_ops.DeepCopy(x=tf.reshape(whole, [-1])[start:stop])


def own_elements(variable: Any, segment: Segment, replica: int) -> tf.Tensor:
    """Return a segment's elements of a variable, as a local replica holds them.

    Args:
        variable: Keras variable, whole on every replica or sharded.
        segment: `Segment`; for a sharded variable it must be the replica's part.
        replica: Int, index of the replica among the local ones.

    Returns:
        Tensor of shape `[segment.size]`.
    """
    part = tf_distribute.local_value(variable, replica).read_value()
    if sharded_parameter(variable) is None:
        return elements_of(part, segment)
    return tf.reshape(part, [-1])
