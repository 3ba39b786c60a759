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

from tfdp import _compat, shares
from tfdp.accumulate import Accumulation, dense
from tfdp.fusion import zeros_unless
from tfdp.gradient_noise import GradientNoise, squared_norm
from tfdp.layout import StateLayout
from tfdp.loss_scale import LossScale
from tfdp.reduced import Reduced
from tfdp.reducer import GradientReducer
from tfdp.traits import Part, is_linear


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step is made of.

    Args:
        optimizer: Keras optimizer that the parts belong to.
        parts: List of `Part`, which optimizer updates which variables.
        variables: List of Keras variables that have gradients.
        positions: List of ints, their positions among all trained variables.
        reducer: `GradientReducer`, sums gradients over the replicas.
        layout: `StateLayout`, where variables and slots lie.
        rates: List of scalar tensors, the learning rate of each part, or `None`
            for the optimizer's own.
        growths: List of scalar tensors or `None`, by how much the rate of each
            part has grown in a warmup, where its momentum contains the rate.
        noise: `GradientNoise`, or `None` if it is not measured.
        accumulation: `Accumulation`, or `None` for an update each time.
        scale: `LossScale`, or `None` for none.
        fixed_scale: Float, a factor of the loss that is not looked after.
    """

    optimizer: Any
    parts: list[Part]
    variables: list[Any]
    positions: list[int]
    reducer: GradientReducer
    layout: StateLayout
    rates: list[Any]
    growths: list[Any]
    noise: GradientNoise | None
    accumulation: Accumulation | None
    scale: LossScale | None
    fixed_scale: float | None


def take_step(step: Step, gradients: Sequence[Any]) -> None:
    """Takes in the gradients of one micro-batch of this replica.

    Args:
        step: `Step`.
        gradients: Sequence of tensors and `tf.IndexedSlices`, one for each of
            the step's variables.
    """
    accumulation = step.accumulation
    if accumulation is None:
        share = shares.current()
        valid = None if share is None else share > 0
        _finish(step, *_reduce_and_update(step, gradients, None, valid))
        return
    gradients = _without_empty_share(dense(gradients))
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
    accumulation.add(gradients, step.positions)
    return tf.constant(False), tf.constant(True)


def _close_and_update(
    step: Step, accumulation: Accumulation, gradients: Sequence[Any] | None
) -> tuple[tf.Tensor, tf.Tensor]:
    sums, count = accumulation.close(gradients, step.positions)
    return _reduce_and_update(step, sums, count, None)


def _reduce_and_update(
    step: Step,
    gradients: Sequence[Any],
    count: tf.Tensor | None,
    valid: tf.Tensor | None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns whether an update was made and whether nothing was skipped."""
    sums = [
        step.reducer.reduce_gradients(  # 2
            part.of(gradients),
            part.of(step.variables),
            may_sum=is_linear(part.optimizer),
            valid=valid,
        )
        for part in step.parts
    ]
    divisor = _divisor(step, count)
    if divisor is not None:
        sums = [item.divided_by(divisor) for item in sums]  # 3
    if step.noise is not None:
        _measure_noise(step, step.noise, gradients, sums, count, divisor)
    if step.scale is None:
        _update(step, sums)
        return tf.constant(True), tf.constant(True)
    is_finite = tf.reduce_all([item.all_finite() for item in sums])  # 4
    scale = step.scale
    tf.cond(is_finite, lambda: _update(step, sums), lambda: _skip(step, scale, sums))
    return is_finite, is_finite


def _measure_noise(
    step: Step,
    noise: GradientNoise,
    gradients: Sequence[Any],
    sums: list[Reduced],
    count: tf.Tensor | None,
    divisor: tf.Tensor | None,
) -> None:
    """Compares each replica's gradient with that of all, by one scalar more."""
    samples, weight = shares.num_samples(), shares.current()
    if samples is None or weight is None:
        return
    if count is not None:
        samples, weight = samples * tf.cast(count, tf.float32), None
    replicas = step.reducer.num_replicas
    part = tf.constant(1.0 / replicas, tf.float64) if weight is None else weight
    factor = part if divisor is None else part * divisor
    own = squared_norm(gradients) / tf.square(tf.cast(factor, tf.float32))
    small = step.reducer.sum([own])[0] / replicas
    large = squared_norm([item for reduced in sums for item in reduced.gradients()])
    noise.update(small, large, replicas, samples)


def _divisor(step: Step, count: tf.Tensor | None) -> tf.Tensor | None:
    """Micro-batches times loss scale in float64, or `None` for one."""
    factors = [count, step.scale and step.scale.read(), step.fixed_scale]
    given = [tf.cast(factor, tf.float64) for factor in factors if factor is not None]
    return tf.reduce_prod(given) if given else None


def _update(step: Step, sums: list[Reduced]) -> tf.Tensor:
    for part, reduced, rate, growth in zip(
        step.parts, sums, step.rates, step.growths, strict=True
    ):
        gradients = step.layout.clip(part, reduced.gradients())  # 5
        if growth is not None:
            step.layout.scale_momentum(part, growth)
        step.layout.update(part, gradients, part.of(step.variables), rate)  # 6
    if step.scale is not None:
        step.scale.note_success()
    return tf.constant(True)


def _skip(step: Step, scale: LossScale, sums: list[Reduced]) -> tf.Tensor:
    gradients = [item for reduced in sums for item in reduced.gradients()]
    positions = [item for part in step.parts for item in part.of(step.positions)]
    scale.note_skip(gradients, positions)
    return tf.constant(False)


def _finish(step: Step, made: tf.Tensor, kept: tf.Tensor) -> None:
    """Averages and constraints follow every micro-batch, as in Keras."""
    for part in step.parts:
        if part.optimizer.use_ema:
            _when(kept, step.scale, lambda part=part: _average(part))  # 7
    for variable in step.variables:
        if variable.constraint is not None:
            _when(kept, step.scale, lambda v=variable: _constrain(v))  # 8
    counted = {id(item): item for item in (step.optimizer, *_optimizers(step))}
    for optimizer in counted.values():
        _compat.count_update(optimizer, tf.cast(made, tf.int64))  # 9


def _optimizers(step: Step) -> list:
    return [part.optimizer for part in step.parts]


def _average(part: Part) -> None:
    optimizer = part.optimizer
    _compat.update_moving_average(optimizer)
    if optimizer.ema_overwrite_frequency:
        is_due = (optimizer.iterations + 1) % optimizer.ema_overwrite_frequency == 0
        _cond(is_due, lambda: _compat.overwrite_with_moving_average(optimizer))


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


def _without_empty_share(gradients: list) -> list:
    """Zeros for a replica without samples, whose means are 0 / 0."""
    share = shares.current()
    if share is None:
        return gradients
    return [zeros_unless(share > 0, gradient) for gradient in gradients]
