"""THE PATH of a step on one replica: from local gradients to updated variables.

    local gradients -> 1 accumulate -> [at the last micro-batch:] 2 reduce
      -> 3 unscale -> 4 all finite? -> 5 clip -> 6 decay and update
      -> 7 moving averages -> 8 constraints -> 9 count

Everything above `2 reduce` is the replica's own; everything below it is computed
from the sums of all replicas and so alike on each, branches included. A step with
an overflow anywhere is skipped everywhere and changes the scale and its counters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp import _compat
from tfdp.base import batch_weight
from tfdp.base.param_groups import ParamGroup, is_linear
from tfdp.collectives import step_events
from tfdp.reduction.fusion import weighted
from tfdp.reduction.gradient_noise import GradientNoise, squared_norm
from tfdp.reduction.replica_reducer import GradientReducer
from tfdp.step.accumulation import Accumulation, dense
from tfdp.step.loss_scale import LossScale
from tfdp.step.state_layout import GradientStatistics, SlicedLayout, StateLayout


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step is made of.

    Args:
        optimizer: Keras optimizer that the parts belong to.
        parts: List of `ParamGroup`, which optimizer updates which variables.
        variables: List of Keras variables that have gradients.
        positions: List of ints, their positions among all trained variables.
        reducer: `GradientReducer`, sums what is no gradient over the replicas.
        weight: Scalar tensor by which this replica's gradients count, see
            `tfdp.data.batch_weights`, or `None` for one.
        layout: `StateLayout`, where gradients, variables and slots lie.
        rates: List of scalar tensors, the learning rate of each part, or `None`
            for the optimizer's own.
        growths: List of scalar tensors or `None`, by how much the rate of each
            part has grown in a warmup, where its momentum contains the rate.
        noise: `GradientNoise`, or `None` if it is not measured.
        accumulation: `Accumulation`, or `None` for an update each time.
        scale: `LossScale`, or `None` for none.
        fixed_scale: Float, a factor of the loss that is not looked after.
        sliced: `SlicedLayout`, the layout, where what is accumulated are slices of
            sums over all replicas; `None` for the replica's own gradients.
    """

    optimizer: Any
    parts: list[ParamGroup]
    variables: list[Any]
    positions: list[int]
    reducer: GradientReducer
    weight: tf.Tensor | None
    layout: StateLayout
    rates: list[Any]
    growths: list[Any]
    noise: GradientNoise | None
    accumulation: Accumulation | None
    scale: LossScale | None
    fixed_scale: float | None
    sliced: SlicedLayout | None = None


def take_step(step: Step, gradients: Sequence[Any]) -> None:
    """Takes in the gradients of one micro-batch of this replica.

    Args:
        step: `Step`.
        gradients: Sequence of tensors and `tf.IndexedSlices`, one for each of
            the step's variables.
    """
    accumulation = step.accumulation
    if accumulation is None:
        sums = _reduce(step, gradients, step.weight)
        _finish(step, *_update_all(step, sums, None, gradients))
        return
    gradients = dense(gradients)
    if step.weight is not None:
        # Each micro-batch has its own rows.
        gradients = [weighted(item, step.weight) for item in gradients]
    made, kept = tf.cond(
        accumulation.completes(),
        lambda: _close_and_update(step, accumulation, gradients),
        lambda: _accumulate(step, accumulation, gradients),  # 1
    )
    _finish(step, made, kept)


def flush(step: Step) -> None:
    """Makes an update of what was accumulated, however many micro-batches."""
    if step.accumulation is not None:
        _finish(step, *_close_and_update(step, step.accumulation, None))


def _accumulate(
    step: Step, accumulation: Accumulation, gradients: Sequence[Any]
) -> tuple[tf.Tensor, tf.Tensor]:
    if step.sliced is None:
        accumulation.add(gradients, step.positions)
    else:
        accumulation.add(*step.sliced.held(step.parts, _reduce(step, gradients, None)))
    return tf.constant(False), tf.constant(True)


def _close_and_update(
    step: Step, accumulation: Accumulation, gradients: Sequence[Any] | None
) -> tuple[tf.Tensor, tf.Tensor]:
    if step.sliced is None:
        totals, count = accumulation.close(gradients, step.positions)
        return _update_all(step, _reduce(step, totals, None), count, totals)
    if gradients is not None:
        accumulation.add(*step.sliced.held(step.parts, _reduce(step, gradients, None)))
    totals, count = accumulation.close(None, range(len(accumulation.sums)))
    sums = step.sliced.with_held(step.parts, step.variables, totals)
    return _update_all(step, sums, count, None)


def _reduce(step: Step, gradients: Sequence[Any], weight: tf.Tensor | None) -> list:
    """The gradients of each part, summed over all replicas."""
    return [
        step.layout.reduce(  # 2
            part,
            part.of(gradients),
            part.of(step.variables),
            may_sum=is_linear(part.optimizer),
            weight=weight,
        )
        for part in step.parts
    ]


def _update_all(
    step: Step,
    sums: list,
    count: tf.Tensor | None,
    own_gradients: Sequence[Any] | None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns whether an update was made and whether nothing was skipped."""
    divisor = _divisor(step, count)
    if divisor is not None:
        sums = [item.divided_by(divisor) for item in sums]  # 3
    noise = None if own_gradients is None else step.noise
    statistics = step.layout.examine(
        step.parts, sums, checks=step.scale is not None, measures=noise is not None
    )
    step_events.squared_norm(lambda: step.layout.own_squares(step.parts, sums))
    if noise is not None and own_gradients is not None:
        _measure_noise(step, noise, own_gradients, statistics, count, divisor)
    if step.scale is None:
        _update(step, sums, statistics)
        return tf.constant(True), tf.constant(True)
    is_finite = statistics.is_finite()  # 4
    scale = step.scale
    tf.cond(
        is_finite,
        lambda: _update(step, sums, statistics),
        lambda: _skip(step, scale, statistics),
    )
    return is_finite, is_finite


def _measure_noise(
    step: Step,
    noise: GradientNoise,
    gradients: Sequence[Any],
    statistics: GradientStatistics,
    count: tf.Tensor | None,
    divisor: tf.Tensor | None,
) -> None:
    """Compares each replica's gradient with that of all, by one scalar more."""
    samples, weight = batch_weight.num_samples(), batch_weight.current()
    if samples is None or weight is None:
        return
    replicas = step.reducer.num_replicas
    factor = tf.constant(1.0, tf.float64) if divisor is None else divisor
    if count is not None:
        # What was accumulated has the weights of its micro-batches.
        samples, factor = samples * tf.cast(count, tf.float32), factor / replicas
    elif step.scale is not None:
        factor *= weight  # the loss was multiplied by it
    own = squared_norm(gradients) / tf.square(tf.cast(factor, tf.float32))
    own = tf.math.multiply_no_nan(own, tf.cast(weight > 0, tf.float32))
    small = step.reducer.sum([own])[0] / replicas
    noise.update(small, statistics.squared_norm(), replicas, samples)


def _divisor(step: Step, count: tf.Tensor | None) -> tf.Tensor | None:
    """Micro-batches times loss scale in float64, or `None` for one."""
    factors = [count, step.scale and step.scale.read(), step.fixed_scale]
    given = [tf.cast(factor, tf.float64) for factor in factors if factor is not None]
    return tf.reduce_prod(given) if given else None


def _update(step: Step, sums: list, statistics: GradientStatistics) -> tf.Tensor:
    for part, reduced, rate, growth in zip(
        step.parts, sums, step.rates, step.growths, strict=True
    ):
        gradients = step.layout.clip(part, reduced, statistics)  # 5
        if growth is not None:
            step.layout.scale_momentum(part, growth)
        step.layout.update(part, gradients, part.of(step.variables), rate)  # 6
    if step.scale is not None:
        step.scale.note_success()
    return tf.constant(True)


def _skip(step: Step, scale: LossScale, statistics: GradientStatistics) -> tf.Tensor:
    positions = [item for part in step.parts for item in part.of(step.positions)]
    scale.note_skip(statistics.non_finite(), positions)
    return tf.constant(False)


def _finish(step: Step, made: tf.Tensor, kept: tf.Tensor) -> None:
    """Averages and constraints follow every micro-batch, as in Keras."""
    for part in step.parts:
        if part.optimizer.use_ema:
            _when(kept, step.scale, lambda p=part: _average(step.layout, p))  # 7
    for variable in step.variables:
        if variable.constraint is not None:
            _when(kept, step.scale, lambda v=variable: _constrain(v))  # 8
    counted = {id(item): item for item in (step.optimizer, *_optimizers(step))}
    for optimizer in counted.values():
        _compat.count_update(optimizer, tf.cast(made, tf.int64))  # 9


def _optimizers(step: Step) -> list:
    return [part.optimizer for part in step.parts]


def _average(layout: StateLayout, part: ParamGroup) -> None:
    layout.average(part)
    optimizer = part.optimizer
    if optimizer.ema_overwrite_frequency:
        is_due = (optimizer.iterations + 1) % optimizer.ema_overwrite_frequency == 0
        _cond(is_due, lambda: layout.overwrite_with_average(part))


def _constrain(variable: Any) -> None:
    part = _compat.local_part(variable)
    part.assign(variable.constraint(part), read_value=False)


def _when(kept: tf.Tensor, scale: LossScale | None, action: Callable) -> None:
    """Only with a loss scale can a step be skipped."""
    if scale is None:
        action()
    else:
        _cond(kept, action)


def _cond(predicate: Any, action: Callable) -> None:
    def act() -> tf.Tensor:
        action()
        return tf.constant(True)

    tf.cond(predicate, act, lambda: tf.constant(False))
