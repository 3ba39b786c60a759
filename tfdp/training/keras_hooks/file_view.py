"""View of a `DistributedOptimizer` as the plain Keras optimizer that files hold.

Files hold accumulation as `gradient_accumulation_steps`, loss scaling as a
`LossScaleOptimizer`, and sharded state as if it were whole. Values loaded into the view
are written to the `DistributedOptimizer`. The accumulators of an optimizer that was
built before it is wrapped are taken over.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras.optimizers.schedules import LearningRateSchedule

from tfdp.ground._compat import (
    keras_optimizer,
    optimizer_state,
    optimizer_views,
    tf_distribute,
)
from tfdp.ground.base.context import num_replicas_of
from tfdp.ground.base.param_groups import innermost, is_multi
from tfdp.training.sharding.full_state import FullState
from tfdp.training.sharding.sharded_state import ShardedState
from tfdp.training.sharding.state_tensors import StateTensor
from tfdp.training.step.accumulation import AccumulationState
from tfdp.training.step.loss_scale import LossScale, LossScaling

# Ending of a schedule's name in a file: the schedule has counted updates. Plain Keras,
# which counts micro-batches, reads the name and ignores it.
_OF_UPDATES = "_of_updates"


class VariableView:
    """Stand-in for a variable, which Keras reads on saving and assigns on loading.

    Args:
        name: String, name and path of the variable.
        shape: Tuple of ints, shape of the value.
        read: Callable that returns the value as an array.
        write: Callable that assigns a loaded array.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], read: Callable, write: Callable
    ) -> None:
        self.name = self.path = name
        self.shape = shape
        self.numpy = read
        self.assign = write

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        del copy
        return np.asarray(self.numpy(), dtype)


@keras.saving.register_keras_serializable(package="tfdp")
class ScheduleByBatches(LearningRateSchedule):
    """Learning-rate schedule of a Keras optimizer that accumulated gradients itself.

    Keras's schedules count micro-batches then, while `iterations` of tfdp counts
    updates.

    Args:
        schedule: `LearningRateSchedule` of micro-batches.
        steps: Int, number of micro-batches of an update.
    """

    def __init__(self, schedule: Any, steps: int) -> None:
        self.schedule, self.steps = schedule, steps

    def __call__(self, step: Any) -> Any:
        # Keras reads the rate in the last micro-batch of an update, before it counts.
        return self.schedule(step * self.steps + (self.steps - 1))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor, as Keras serializes them."""
        schedule = keras.optimizers.schedules.serialize(self.schedule)
        return {"schedule": schedule, "steps": self.steps}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ScheduleByBatches:
        """Create a schedule from its config."""
        schedule = keras.optimizers.schedules.deserialize(config["schedule"])
        return cls(schedule, config["steps"])


def keras_view(distributed: Any, full_state: FullState) -> Any:
    """Create the Keras optimizer that files hold: a view of a `DistributedOptimizer`.

    Args:
        distributed: `DistributedOptimizer`, built or not.
        full_state: `FullState`, the gathered values of sharded state.

    Returns:
        A Keras optimizer of the class of the wrapped one, or a
        `LossScaleOptimizer` around it.
    """
    view, features = distributed.inner_optimizer, distributed.features
    if distributed.is_sharded:
        view = _with_full_state(view, distributed.shards, full_state)
    if features.steps > 1:
        view = _view_with_accumulation(
            view, features.steps, accumulated_gradients_of(distributed, full_state)
        )
    scaling, scale = features.scaling, features.scale
    if scaling is None:
        return view
    if scaling.growth_steps is None:
        return optimizer_views.with_fixed_scale(view, scaling.initial_scale)
    return optimizer_views.loss_scale_optimizer(
        view,
        initial_scale=scaling.initial_scale,
        growth_steps=scaling.growth_steps,
        counters=None if scale is None else (scale.good_steps, scale.value),
    )


def sharded_tensors(distributed: Any) -> list[StateTensor]:
    """Return the sharded state tensors: slots, and gradients accumulated in shards.

    Args:
        distributed: `DistributedOptimizer`.

    Returns:
        List of `StateTensor`, empty if no state is sharded.
    """
    shards, accumulation = distributed.shards, distributed.features.accumulation
    if shards is None:
        return []
    tensors = shards.tensors()
    if distributed.accumulates_sums and accumulation is not None:
        tensors += shards.accumulated(accumulation.sums).values()
    return tensors


def _with_full_state(
    optimizer: Any, shards: ShardedState, full_state: FullState
) -> Any:
    """Create a view of an optimizer with sharded state, as if its slots were whole.

    Args:
        optimizer: The user's Keras optimizer.
        shards: `ShardedState` of the optimizer.
        full_state: `FullState`, the gathered values of `shards`.

    Returns:
        A Keras optimizer of the same class.
    """
    views = {}
    for group in innermost(optimizer):
        sharded = shards.parts.get(id(group))
        views[id(group)] = group
        if sharded is not None:
            entries = [_view_of(tensor, full_state) for tensor in shards.state(sharded)]
            num_averages = len(sharded.variables) if group.use_ema else 0
            views[id(group)] = optimizer_views.with_state(group, entries, num_averages)
    if not is_multi(optimizer):
        return views[id(optimizer)]
    return optimizer_views.multi_with_parts(optimizer, views, None)


def _view_of(tensor: StateTensor, full_state: FullState) -> VariableView:
    """Create a view of a sharded tensor, which is saved from its gathered value.

    A loaded value is written to the local shards. `full_state` has the gathered value.
    """

    def write(value: Any) -> None:
        """Assign the elements of a loaded array to the local shards."""
        flat = np.asarray(value).ravel()
        for shard in tensor.local_shards:
            shard.write(flat[shard.start : shard.stop])

    return VariableView(
        tensor.name, tensor.shape, lambda: full_state.read(tensor), write
    )


@dataclasses.dataclass(frozen=True)
class AccumulatedGradients:
    """Views of accumulated gradients as one device has them: sums over replicas.

    Args:
        accumulation: `AccumulationState` of the replicas.
        scale: `LossScale` by which the gradients are scaled, or `None`.
        num_replicas: Int, number of replicas on all workers.
        slices: List with, for each variable, a pair of the `StateTensor` of its sum and
            the `FullState` with the gathered value, if sums are accumulated in shards;
            or `None`, the default.
    """

    accumulation: AccumulationState
    scale: LossScale | None
    num_replicas: int
    slices: list[tuple[StateTensor, FullState]] | None = None

    @property
    def steps(self) -> int:
        """Int, number of micro-batches of an update."""
        return int(self.accumulation.steps.numpy())

    def view_of_sum(self, index: int) -> VariableView:
        """Create a view of the sum of a variable's gradients over all replicas.

        Keras accumulates unscaled gradients, tfdp scaled ones. Unless slices are
        accumulated, each of N replicas receives an N-th of a loaded sum.

        Args:
            index: Int, index of the variable.
        """
        if self.slices is not None:
            # A slice holds the sum over all replicas and has one owner. So a loaded sum
            # is assigned to the slice without a division, by divisor 1.
            sum_view, divisor = _view_of(*self.slices[index]), 1
        else:
            sum_view = self._local_sum(self.accumulation.sums[index])
            divisor = self.num_replicas

        def factor() -> float:
            """Return the loss scale, which the sums contain; 1 without one."""
            return 1.0 if self.scale is None else float(self.scale.value.numpy())

        def read() -> np.ndarray:
            """Return the unscaled sum over all replicas, or zeros after an overflow."""
            total = sum_view.numpy()
            total = total / np.asarray(factor(), total.dtype)
            # tfdp skips an update if its sum has an overflow. Keras checks new
            # gradients only, and would apply a non-finite sum from a file. So zeros are
            # saved.
            return total if np.isfinite(total).all() else np.zeros_like(total)

        def write(value: Any) -> None:
            """Scale a loaded, unscaled sum, and assign each replica its part."""
            sum_view.assign(np.asarray(value) * (factor() / divisor))

        return VariableView(sum_view.path, sum_view.shape, read, write)

    def _local_sum(self, variable: Any) -> VariableView:
        """Create a view of a Keras variable in which each replica accumulates a sum.

        A read estimates the total of all replicas from the sums of this worker. A write
        assigns the value to each local replica.
        """
        return VariableView(
            variable.path,
            tuple(variable.shape),
            lambda: tf_distribute.sum_of_local_parts(variable, self.num_replicas),
            variable.assign,
        )

    def counter(self, iterations: Any) -> VariableView:
        """Create a view of `iterations` that counts micro-batches, as in Keras."""
        count = self.accumulation.count

        def read() -> np.ndarray:
            """Return the number of all micro-batches so far, not only of updates."""
            updates = int(iterations.numpy())
            return np.asarray(updates * self.steps + int(count.numpy()))

        def write(value: Any) -> None:
            """Set the counters from the number of all micro-batches so far.

            With `steps` micro-batches in each update, the quotient is the number of
            updates, and the remainder that of micro-batches since the last one.
            """
            updates, rest = divmod(int(np.asarray(value)), self.steps)
            iterations.assign(updates)
            count.assign(rest)

        return VariableView(iterations.path, (), read, write)


def accumulated_gradients_of(
    distributed: Any, full_state: FullState
) -> AccumulatedGradients | None:
    """Return the accumulated gradients of a `DistributedOptimizer`.

    It is `None` if the optimizer does not accumulate gradients. `full_state` has the
    gathered values of gradients that are accumulated in shards.
    """
    features, shards = distributed.features, distributed.shards
    accumulation, slices = features.accumulation, None
    if accumulation is None:
        return None
    if distributed.accumulates_sums:
        tensors = shards.accumulated(accumulation.sums)
        trained = keras_optimizer.trained_by(distributed)
        slices = [(tensors[id(variable)], full_state) for variable in trained]
    replicas = num_replicas_of(distributed)
    return AccumulatedGradients(accumulation, features.scale, replicas, slices)


def _view_with_accumulation(
    optimizer: Any, steps: int, sums: AccumulatedGradients | None
) -> Any:
    """Create a view of an optimizer with the accumulators that Keras would have.

    Args:
        optimizer: The user's Keras optimizer, maybe a `MultiOptimizer`, whose inner
            optimizers all accumulate.
        steps: Int, number of micro-batches of an update.
        sums: `AccumulatedGradients` of the optimizer, or `None` if there are none.

    Returns:
        Keras optimizer, the view.
    """
    parts = innermost(optimizer)
    views = {
        id(p): _view_of_part_with_accumulation(optimizer, p, steps, sums) for p in parts
    }
    if not is_multi(optimizer):
        return views[id(optimizer)]
    counter = sums and sums.counter(optimizer_state.own_variables(optimizer)[0])
    return optimizer_views.multi_with_parts(optimizer, views, counter)


def _view_of_part_with_accumulation(
    outer: Any, optimizer: Any, steps: int, sums: AccumulatedGradients | None
) -> Any:
    """Create a view of one optimizer as if Keras accumulated its gradients.

    With `sums`, the view's counter and accumulators convert the counts and sums of
    tfdp. All its other variables are those of the optimizer.

    Args:
        outer: The user's optimizer, `optimizer` or a `MultiOptimizer` around it; its
            order of variables is that of `sums`.
        optimizer: Keras optimizer without inner optimizers.
        steps: Int, number of micro-batches of an update.
        sums: `AccumulatedGradients` of `outer`, or `None` if there are none.

    Returns:
        Keras optimizer, a shallow copy of `optimizer`.
    """
    optimizer = optimizer_views.copy_with(optimizer)
    schedule = keras_optimizer.rate_or_schedule(optimizer)
    if isinstance(schedule, ScheduleByBatches):
        optimizer.learning_rate = schedule.schedule
    elif isinstance(schedule, LearningRateSchedule) and hasattr(schedule, "name"):
        optimizer.learning_rate = named = copy.copy(schedule)
        named.name = f"{schedule.name}{_OF_UPDATES}"
    if sums is None:
        return optimizer_views.as_accumulating(optimizer, steps, None)
    trained = keras_optimizer.trained_by(optimizer)
    positions = keras_optimizer.positions_in(outer, trained)
    entries = [sums.view_of_sum(position) for position in positions]
    own = optimizer_state.own_variables(optimizer)
    head = optimizer_state.num_variables_before_accumulators(optimizer)
    variables = [sums.counter(own[0]), *own[1:head], *entries, *own[head:]]
    return optimizer_views.as_accumulating(optimizer, steps, variables)


def move_accumulated_gradients(
    optimizer: Any,
    steps: int,
    accumulation: AccumulationState | None,
    trained: list[Any],
    scale: float,
) -> None:
    """Move a Keras optimizer's accumulated gradients to `accumulation`; free its own.

    The optimizer's `iterations`, which counted micro-batches, counts updates from now
    on.

    Args:
        optimizer: Keras optimizer, maybe built with `gradient_accumulation_steps`.
        steps: Int, the optimizer's `gradient_accumulation_steps`.
        accumulation: `AccumulationState` of tfdp, or `None` to discard the gradients.
        trained: List of the variables whose sums `accumulation` holds.
        scale: Float, the loss scale, by which Keras has divided the gradients.
    """
    positions = {id(variable): index for index, variable in enumerate(trained)}
    parts = list(filter(optimizer_state.has_accumulators, innermost(optimizer)))
    for group in parts:
        sums = optimizer_state.pop_accumulators(group)
        iterations = optimizer_state.own_variables(group)[0]
        updates, count = divmod(int(iterations.numpy()), steps)
        iterations.assign(updates)
        if accumulation is None:
            continue
        accumulation.count.assign(count)
        own = keras_optimizer.trained_by(group)
        for variable, total in zip(own, sums, strict=True):
            if total is not None:
                local_sum = accumulation.sums[positions[id(variable)]]
                tf_distribute.copy_local_parts(total, local_sum, scale)
    if parts and is_multi(optimizer):
        iterations = optimizer_state.own_variables(optimizer)[0]
        iterations.assign(int(iterations.numpy()) // steps)


def loss_scaling_of(optimizer: keras.optimizers.LossScaleOptimizer) -> LossScaling:
    """Return the settings of Keras's `LossScaleOptimizer` as a `LossScaling`."""
    return LossScaling(
        initial_scale=float(optimizer.initial_scale),
        growth_steps=int(optimizer.dynamic_growth_steps),
    )


def pop_accumulation_steps(optimizer: Any) -> int:
    """Remove `gradient_accumulation_steps` from a Keras optimizer; return it, or 1.

    Its learning-rate schedule continues to count micro-batches, unless it is from a
    file of tfdp in which it counted updates.

    Raises:
        ValueError: If the optimizers of a `MultiOptimizer` have different ones.
    """
    parts = innermost(optimizer)
    steps = {group.gradient_accumulation_steps or 1 for group in parts}
    if len(steps) > 1:
        raise ValueError(
            "The optimizers of a `MultiOptimizer` must have the same "
            "`gradient_accumulation_steps`. Received: "
            f"gradient_accumulation_steps={sorted(steps)}"
        )
    number = steps.pop() if steps else 1
    for group in parts:
        group.gradient_accumulation_steps = None
        schedule = keras_optimizer.rate_or_schedule(group)
        if number == 1 or not isinstance(schedule, LearningRateSchedule):
            continue
        name = getattr(schedule, "name", None) or ""
        if name.endswith(_OF_UPDATES):
            schedule.name = name.removesuffix(_OF_UPDATES)
        else:
            group.learning_rate = ScheduleByBatches(schedule, number)
    return number


def rate_of(optimizer: Any, accumulation: AccumulationState | None) -> Any:
    """Return the learning rate of a wrapped Keras optimizer, as Keras reads it.

    Args:
        optimizer: Keras optimizer that a `DistributedOptimizer` wraps.
        accumulation: `AccumulationState` of the wrapper, or `None`.
    """
    schedule = keras_optimizer.rate_or_schedule(optimizer)
    if not isinstance(schedule, ScheduleByBatches):
        return optimizer.learning_rate
    count = 0 if accumulation is None else keras.ops.cast(accumulation.count, "int64")
    return schedule.schedule(optimizer.iterations * schedule.steps + count)


def count_updates_in_schedules(optimizer: Any) -> None:
    """Remove `ScheduleByBatches` from learning-rate schedules, to count updates."""
    for group in innermost(optimizer):
        schedule = keras_optimizer.rate_or_schedule(group)
        if isinstance(schedule, ScheduleByBatches):
            group.learning_rate = schedule.schedule
