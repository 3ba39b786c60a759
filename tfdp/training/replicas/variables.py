"""Classes of the variables that a tfdp strategy creates."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.ground._compat import tf_distribute
from tfdp.ground.base import loops, program_trace
from tfdp.ground.base.context import replica_context
from tfdp.training.replicas.assigned_values import AssignedValues

_MERGE_OPS = {"Maximum": "max", "Minimum": "min", "LogicalAnd": "min"}
# Moving statistics of BatchNormalization, and of layers modelled on it, are recognized
# by name. Replicas update them from different rows, so they need an average.
_STATISTICS = ("moving_mean", "moving_variance")


class _Array:
    """Mixin that converts a variable to an array, an int, a float or a bool.

    TensorFlow's distributed variables lack the conversions. Keras and NumPy use them,
    as in `int(optimizer.iterations)`.
    """

    numpy: Any

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # `numpy` returns a copy already.
        return np.asarray(self.numpy(), dtype=dtype)

    def __int__(self) -> int:
        return int(self.numpy())

    def __index__(self) -> int:
        return self.numpy().__index__()

    def __float__(self) -> float:
        return float(self.numpy())

    def __bool__(self) -> bool:
        return bool(self.numpy())


class MirroredVariable(_Array, tf_distribute.MirroredVariable):
    """Variable with a copy on every replica.

    It has the name of TensorFlow's class because Keras's own tests look for that name.
    """

    # True for a sharded parameter: each replica holds a part of its elements, so no
    # copies can be broadcast or compared.
    has_parts = False
    # A script may assign different values on different workers. True after an
    # assignment outside of a step, until workers have compared the value.
    was_assigned = False
    # With sharded state, a checksum of the weights does not show whether workers have
    # assigned the same values outside of steps. So such a variable records them.
    assigned: AssignedValues | None = None

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        """Update this replica's copy by `update_fn`, and return its result.

        The assignment is recorded.
        """
        if (trace := program_trace.current()) is not None:
            trace.record_assigned(self)
            return update_fn(self._get_on_device_or_primary(), value, **kwargs)
        self.distribute_strategy.extended.record_assigned(self)
        return super()._update_replica(update_fn, value, **kwargs)

    def _in_program(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of this replica's copy, in a step of Keras's loops.

        Args:
            method: String, name of the method.
            *args: Positional arguments of the method.
            **kwargs: Keyword arguments of the method.

        Returns:
            Result of the method.

        Raises:
            NotImplementedError: Outside of a step that is traced as on one device.
        """
        if program_trace.current() is None:
            raise NotImplementedError(
                f"`{method}` of a variable with a copy on every replica works only in "
                "steps of `fit`, `evaluate` and `predict`. Use `assign` elsewhere."
            )
        local = self._get_on_device_or_primary()
        return getattr(local, method)(*args, **kwargs)

    scatter_nd_add = functools.partialmethod(_in_program, "scatter_nd_add")
    scatter_nd_sub = functools.partialmethod(_in_program, "scatter_nd_sub")
    scatter_nd_update = functools.partialmethod(_in_program, "scatter_nd_update")
    scatter_nd_max = functools.partialmethod(_in_program, "scatter_nd_max")
    scatter_nd_min = functools.partialmethod(_in_program, "scatter_nd_min")

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Assign a value, as `tf.Variable.assign`.

        Outside of steps, assignments are recorded, to compare them between workers.
        """
        self.record(value, replaces=True)
        return super().assign(value, *args, **kwargs)

    def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        """Add a value, as `tf.Variable.assign_add`; record it as `assign` does."""
        self.record(delta, replaces=False)
        return super().assign_add(delta, *args, **kwargs)

    def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        """Subtract a value, as `tf.Variable.assign_sub`; record it as `assign` does."""
        self.record(delta, replaces=False, is_negative=True)
        return super().assign_sub(delta, *args, **kwargs)

    def record(self, value: Any, *, replaces: bool, is_negative: bool = False) -> None:
        """Record that a script has assigned this variable, to compare workers.

        Assignments in a step are not recorded. The value is recorded, as a hash, only
        for a weight with sharded state.

        Args:
            value: Tensor, the value that is assigned, added or subtracted.
            replaces: Bool, whether it replaces the previous value.
            is_negative: Bool, whether it is subtracted. Defaults to `False`.
        """
        if replica_context() is not None:
            return
        self.was_assigned = True
        if self.assigned is None:
            return
        if self.distribute_strategy.extended.worker_group.num_workers > 1:
            value = tf.convert_to_tensor(value, self.dtype)
            self.assigned.add(-value if is_negative else value, replaces=replaces)


class StatisticVariable(MirroredVariable):
    """Moving statistic of local batches, averaged over replicas in each step.

    With TensorFlow's variables replicas drift apart, and saving takes replica 0's
    statistic. Where groups of replicas update independently, each replica's statistic
    follows its own batches until the replicas are synchronized.
    """

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        """Update this replica's statistic by `update_fn`; return its result.

        The end of the step averages the statistic over replicas.
        """
        if program_trace.current() is None and loops.independent_groups() is None:
            self.distribute_strategy.extended.record_statistics([self])
        return super()._update_replica(update_fn, value, **kwargs)


class MetricVariable(_Array, tf_distribute.SyncOnReadVariable):
    """Metric state with a component on every replica, merged when it is read.

    Components merge by sum, as in TensorFlow, unless the traced update of the metric
    combines values by maximum or minimum. The sum of bools is true if any is.
    """

    merge = "sum"
    # An assigned value is divided among the components, but a traced update may show
    # that they merge by maximum or minimum. So the last value that was assigned outside
    # of a step is kept, or `None`.
    _begins_with: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create the components; a sum keeps its initial value on rank 0 only."""
        super().__init__(*args, **kwargs)
        if self.is_merged and not self.dtype.is_bool and tf.executing_eagerly():
            self._keep_initial_on_rank_0()

    @property
    def is_merged(self) -> bool:
        """Bool, whether a read merges the components, by a sum or as `merge` says.

        It is true if the aggregation is `SUM`, except for strings, which have no sum.
        The components of other variables need no merging: in Keras's loops, all of them
        have the value of one device.
        """
        is_sum = self.aggregation == tf.VariableAggregation.SUM
        return is_sum and self.dtype != tf.string

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Assign a value; inside a replica, to this replica's component only.

        Outside of a replica, the components are set so that their merge is the value. A
        traced assignment of a maximum or minimum sets how the components merge.
        """
        in_replica = replica_context() is not None
        if program_trace.current() is not None:
            return super().assign(value, *args, **kwargs)
        if in_replica and tf.is_symbolic_tensor(value):
            op = value.op
            while op.type in ("Identity", "Cast"):
                op = op.inputs[0].op
            before, self.merge = self.merge, _MERGE_OPS.get(op.type, self.merge)
            if before == "sum" != self.merge and self._begins_with is not None:
                self._begin_whole(self._begins_with)
        elif not in_replica and (self.merge != "sum" or self.dtype.is_bool):
            # TensorFlow's method would divide the value by the number of replicas,
            # which is right only for numbers that are merged by a sum.
            for component in self.values:
                component.assign(value)
            return self
        elif not in_replica and self.dtype.is_integer and self.is_merged:
            self._begins_with = None if tf.is_symbolic_tensor(value) else value
            return self._assign_parts(tf.convert_to_tensor(value, self.dtype))
        elif not in_replica and not tf.is_symbolic_tensor(value):
            self._begins_with = value
        return super().assign(value, *args, **kwargs)

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        """Update this replica's component by `update_fn`, and return its result.

        The assignment is recorded. A step that is traced as on one device records it
        only for components that are not merged.
        """
        if not self.is_merged and (trace := program_trace.current()) is not None:
            trace.record_assigned(self)
        self.distribute_strategy.extended.record_assigned(self)
        return super()._update_replica(update_fn, value, **kwargs)

    def _keep_initial_on_rank_0(self) -> None:
        """Set all components but that of rank 0 to zero, because a read sums them."""
        initial = self.values[0].numpy()
        if not initial.any():
            return
        self._begins_with = initial
        first_rank = self.distribute_strategy.extended.first_rank
        for rank, component in enumerate(self.values, first_rank):
            if rank:
                component.assign(np.zeros_like(initial))

    def _begin_whole(self, value: Any) -> None:
        """Set each component to the whole initial value, not to its part of a sum.

        It is called when the traced update shows a merge by maximum or minimum, before
        any update runs. Until then the value was divided among the components.

        Args:
            value: Number or array, the value that was assigned last outside of a step.
        """
        with tf.init_scope():
            for component in self.values:
                component.assign(tf.cast(value, component.dtype))

    def _assign_parts(self, total: tf.Tensor) -> Any:
        """Divide an integer among all replicas' components, and return the variable.

        The component of rank 0 gets the remainder, too.

        TensorFlow's method drops the remainder: 1 on two replicas would be read as 0.
        """
        num_replicas = self.distribute_strategy.num_replicas_in_sync
        first_rank = self.distribute_strategy.extended.first_rank
        part = total // num_replicas
        for rank, component in enumerate(self.values, first_rank):
            rest = total - num_replicas * part if rank == 0 else 0
            component.assign(part + rest)
        return self

    def _get_cross_replica(self) -> Any:
        """Return a tensor, the merged components of all replicas."""
        extended = self.distribute_strategy.extended
        if self.aggregation != tf.VariableAggregation.SUM:
            return super()._get_cross_replica()
        return extended.merge_metric_variables([self])[0]


CLASS_MAPPING = {
    "VariableClass": MirroredVariable,
    tf.VariableSynchronization.ON_WRITE: MirroredVariable,
    tf.VariableSynchronization.ON_READ: MetricVariable,
}
STATISTIC_MAPPING = {
    **CLASS_MAPPING,
    tf.VariableSynchronization.ON_WRITE: StatisticVariable,
}


def class_mapping(kwargs: dict[str, Any]) -> dict:
    """Return the classes for creating a variable, by its creation arguments.

    Args:
        kwargs: Dict, the arguments of the variable's creator.

    Returns:
        `STATISTIC_MAPPING` for a moving statistic, or else `CLASS_MAPPING`; both are
        dicts like TensorFlow's `VARIABLE_CLASS_MAPPING`.
    """
    name = (kwargs.get("name") or "").split(":")[0].rsplit("/", 1)[-1]
    is_statistic = (
        not kwargs.get("trainable", True)
        and name in _STATISTICS
        and kwargs.get("dtype") is not None
        and tf.as_dtype(kwargs["dtype"]).is_floating
        and kwargs.get("aggregation") in (None, tf.VariableAggregation.NONE)
    )
    return STATISTIC_MAPPING if is_statistic else CLASS_MAPPING


def aggregation_of(kwargs: dict[str, Any]) -> Any:
    """Return the aggregation for creating a variable, by its creation arguments.

    Keras's counters, recognized by a dtype that is a string, have the aggregation
    `ONLY_FIRST_REPLICA`. It broadcasts the first replica's value on every assignment,
    by a collective that cannot run inside a conditional. All replicas count the same,
    so each may assign its own copy: for these counters the result is `NONE`.

    Args:
        kwargs: Dict, the arguments of the variable's creator.

    Returns:
        `tf.VariableAggregation`; for other variables, that of `kwargs`, or `NONE`
        without one.
    """
    aggregation = kwargs.get("aggregation", tf.VariableAggregation.NONE)
    dtype = kwargs.get("dtype")
    first_only = aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
    is_metric = kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
    is_counter = isinstance(dtype, str) and tf.as_dtype(dtype).is_integer
    if first_only and is_counter and not is_metric:
        return tf.VariableAggregation.NONE
    return aggregation
