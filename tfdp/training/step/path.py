"""THE PATH of a step on one replica: from local gradients to updated variables.

    local gradients -> 1 accumulate -> [at the last micro-batch:] 2 reduce
      -> 3 unscale -> 4 all finite? -> 5 clip -> 6 decay and update
      -> 7 moving averages -> 8 constraints -> 9 count

Stage 1 works on the replica's own gradients. All later stages work on the sums over
all replicas, so they give the same results and take the same branches on every replica.
An overflow on any replica skips the step on all and changes the scale and its counters.
Residuals of compression are kept for the next step only if this step is not skipped.
Features act before 1, at 4 and after 9, see `StepFeature`. Before 1 a feature may
refuse the gradients: then no stage runs. At 4 it may also skip the step, which
changes neither the scale nor its counters. With `IndependentGroups`, stage 2 reduces
only within a group of replicas, and each group skips steps on its own.

In the functions below, `is_due` is whether this micro-batch completes an update, and
`is_kept` is false if the update was skipped, for an overflow or by a feature. Each is a
bool if it is known while the step is traced, and otherwise a scalar bool tensor. `sums`
are the reduced gradients, one item of `StateLayout.reduce` for each parameter group.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import step_events
from tfdp.ground._compat import keras_optimizer
from tfdp.ground.base import step_context
from tfdp.ground.base.conditions import run_if
from tfdp.ground.base.param_groups import ParamGroup
from tfdp.training.compression.step_residuals import step_residuals
from tfdp.training.reduction.carried_scalar import CarriedScalar, carrying
from tfdp.training.step.accumulation import Totals
from tfdp.training.step.state_layout import (
    GradientStatistics,
    StateLayout,
    reduce_groups,
)
from tfdp.training.step.step import Step, active


def take_step(step: Step, gradients: Sequence[Any] | None) -> None:
    """Take a step with the gradients of one micro-batch of this replica.

    The gradients are accumulated. If that completes an update, they are reduced over
    replicas, and the variables updated.

    Args:
        step: `Step`, settings and state of the optimizer's step.
        gradients: Sequence of tensors and `tf.IndexedSlices`, one for each of the
            step's variables, or `None` to update with the accumulated gradients.
    """
    step = dataclasses.replace(step, features=(*step.features, *active.active()))
    is_admitted: tf.Tensor | bool = True
    for feature in step.features:
        condition = feature.admit(gradients)
        is_admitted = condition if is_admitted is True else is_admitted & condition
    run_if(is_admitted, lambda: _take_admitted_step(step, gradients))


def _take_admitted_step(step: Step, gradients: Sequence[Any] | None) -> None:
    """Take a step that no feature has refused by its hook `admit`.

    It runs stages 1 to 9 of the module's docstring: from the accumulation of gradients
    to the counters of the optimizers.

    Args:
        step: `Step`, settings and state of the optimizer's step.
        gradients: Sequence of tensors and `tf.IndexedSlices`, one for each of the
            step's variables, or `None` to update with the accumulated gradients.
    """
    for feature in step.features:
        feature.begin(has_batch=gradients is not None)
    micro_batch = None if gradients is None else list(gradients)
    with step_residuals(lambda: _scale_of(step)) as micro_batch_residuals:
        release, is_due = step.accumulator.accumulate(micro_batch)
        step.add_loss(is_due)
    micro_batch_residuals.assign_finite()

    def update() -> tf.Tensor:
        """Make the update that is due: reduce, check, clip and apply gradients.

        Returns:
            Scalar bool tensor, or bool: false if the update was skipped, for an
            overflow or by a feature.
        """
        totals = release()
        with (
            step_residuals(lambda: _divisor(step, totals)) as residuals,
            carrying(step.take_loss(totals)) as loss,
        ):
            sums = _reduce(step, totals)
        sums = _unscale(step, sums, totals)
        statistics, conditions = _examine(step, sums, totals, loss)
        is_finite = _is_finite(step, statistics)
        is_made = functools.reduce(tf.logical_and, conditions, is_finite)

        def apply() -> None:
            """Clip gradients, update variables, keep the residuals of compression."""
            clipped = _clip(step, sums, statistics)
            _decay_and_update(step, clipped)
            residuals.assign_all()

        run_if(
            is_made,
            apply,
            lambda: _skip(step, statistics, is_finite if conditions else False),
        )
        return is_made

    is_updated, is_kept = _update_if(is_due, update)
    _average(step, is_kept)
    _constrain(step, is_kept)
    is_due = True if is_due is None else is_due
    if step.has_independent_groups:
        # A group of replicas may skip its update while other groups make theirs. So
        # that the optimizers' counters stay equal on all replicas, they count an update
        # that is due even if this replica's group skips it.
        _count(step, is_due, True)
    else:
        _count(step, is_updated, is_kept)
    for feature in step.features:
        feature.end(step, is_due, is_kept)


def take_empty_step(step: Step) -> None:
    """Make the changes that Keras makes in its step without data, after the last batch.

    If the accumulator says that an update is due, sums of gradients are reset, weights
    decay, and the optimizers' counters increase, unless they count micro-batches. With
    a loss scale or `IndependentGroups` nothing changes. See
    `tfdp.training.step.empty_step`.

    Args:
        step: `Step`, settings and state of the optimizer's step.
    """
    if step.scale is not None or step.has_independent_groups:
        # With a loss scale Keras updates only if the gradients are finite, which it
        # cannot know without gradients.
        return
    release, is_due = step.accumulator.handle_empty_step()

    def update() -> None:
        """Reset the sums, and run the parts of an update that need no gradients."""
        release()
        for group, schedule in zip(step.param_groups, step.schedules, strict=True):
            variables = group.of(step.variables)
            step.layout.update_without_gradients(group, variables, schedule.rate)

    run_if(is_due, update)
    if not step.counts_micro_batches:
        _count(step, is_due, is_due)


def _reduce(step: Step, totals: Totals) -> list:
    """Stage 2: return the gradients of each parameter group, summed over all replicas.

    If the accumulator has reduced them already, the result is `totals.sums`.

    Args:
        step: `Step`.
        totals: `Totals`, the accumulated gradients of this replica.

    Returns:
        List of reduced gradients, one item of `StateLayout.reduce` for each group.
    """
    if totals.sums is not None:
        return totals.sums
    assert totals.gradients is not None
    gradients = step.reducer.prepare(totals.gradients)
    return reduce_groups(
        step.layout, step.param_groups, step.variables, gradients, totals.weight
    )


def _unscale(step: Step, sums: list, totals: Totals) -> list:
    """Stage 3: divide reduced gradients by the micro-batches and by the loss scale.

    Args:
        step: `Step`.
        sums: List of the reduced gradients of each parameter group.
        totals: `Totals`, which have the number of micro-batches.

    Returns:
        List like `sums`: gradients of the unscaled loss, as means over micro-batches.
    """
    divisor = _divisor(step, totals)
    return sums if divisor is None else [item.divided_by(divisor) for item in sums]


def _divisor(step: Step, totals: Totals) -> tf.Tensor | None:
    """Return the number of micro-batches times the loss scale; `None` if both are 1.

    It is a scalar float64 tensor, by which summed gradients are divided.
    """
    factors = [totals.count, _scale_of(step)]
    known = [tf.cast(factor, tf.float64) for factor in factors if factor is not None]
    return tf.reduce_prod(known) if known else None


def _scale_of(step: Step) -> tf.Tensor | None:
    """Return the loss scale in float64, or `None` if the loss is not scaled."""
    factors = [step.scale and step.scale.read(), step.fixed_scale]
    known = [tf.cast(factor, tf.float64) for factor in factors if factor is not None]
    return tf.reduce_prod(known) if known else None


def _examine(
    step: Step, sums: list, totals: Totals, loss: CarriedScalar | None
) -> tuple[GradientStatistics, list[tf.Tensor]]:
    """Compute statistics of the reduced gradients, and ask features whether to update.

    Statistics are norms, and whether gradients are finite, as far as they are needed.

    Args:
        step: `Step`.
        sums: List of the reduced gradients of each parameter group.
        totals: `Totals` of this replica.
        loss: `CarriedScalar`, the loss, if a feature reads it; or `None`.

    Returns:
        Tuple of the `GradientStatistics`, and a list of the conditions of features:
        scalar bool tensors, all of which must be true for the update to be made.
    """
    features = step.features
    statistics = step.layout.examine(
        step.param_groups,
        sums,
        checks=step.scale is not None or any(f.checks_finite for f in features),
        measures=any(feature.measures_norm for feature in features),
        loss=loss,
    )
    step_events.record_squared_norm(
        lambda: step.layout.local_squared_norm(step.param_groups, sums)
    )
    conditions = []
    if features:
        divisor = _divisor(step, totals)
        found = [f.examine(step, totals, divisor, statistics) for f in features]
        conditions = [condition for condition in found if condition is not None]
    return statistics, conditions


def _is_finite(step: Step, statistics: GradientStatistics) -> tf.Tensor | bool:
    """Stage 4: return a scalar bool tensor: whether all reduced gradients are finite.

    Without a loss scale the result is `True`, and gradients are not checked.
    """
    return True if step.scale is None else statistics.is_finite()


def _skip(
    step: Step, statistics: GradientStatistics, is_finite: tf.Tensor | bool
) -> None:
    """Record in the loss scale that a step was skipped for non-finite gradients.

    Args:
        step: `Step`.
        statistics: `GradientStatistics` of the reduced gradients.
        is_finite: Scalar bool tensor, or bool, whether all gradients are finite. If
            true, a feature has skipped the step, and nothing is recorded.
    """
    scale = step.scale
    if scale is None:
        return
    run_if(
        is_finite,
        lambda: None,
        lambda: scale.record_skip(statistics.non_finite(), step.grouped_positions),
    )


def _clip(step: Step, sums: list, statistics: GradientStatistics) -> list:
    """Stage 5: clip the gradients of each parameter group by its optimizer's settings.

    Returns:
        List of the clipped gradients of each group, as `StateLayout.clip` returns them.
    """
    return [
        step.layout.clip(group, reduced, statistics)
        for group, reduced in zip(step.param_groups, sums, strict=True)
    ]


def _decay_and_update(step: Step, gradients: list) -> None:
    """Stage 6: decay weights and update variables; count the update in the loss scale.

    Args:
        step: `Step`.
        gradients: List of the clipped gradients of each parameter group.
    """
    with step_context.using(update_draws=itertools.count(1)):
        for group, clipped, schedule in zip(
            step.param_groups, gradients, step.schedules, strict=True
        ):
            if schedule.momentum_factor is not None:
                step.layout.scale_momentum(group, schedule.momentum_factor)
            step.layout.update(group, clipped, group.of(step.variables), schedule.rate)
    if step.scale is not None:
        step.scale.record_success()


def _average(step: Step, is_kept: tf.Tensor | bool) -> None:
    """Stage 7: update the moving averages after every micro-batch, as Keras does.

    Args:
        step: `Step`.
        is_kept: Scalar bool tensor, or bool; if false, an update was skipped, and the
            averages stay.
    """
    for group in step.param_groups:
        if group.optimizer.use_ema:
            run_if(is_kept, functools.partial(_average_group, step.layout, group))


def _average_group(layout: StateLayout, group: ParamGroup) -> None:
    """Update the moving averages of a group's variables once.

    Every `ema_overwrite_frequency` updates, overwrite the variables with them.
    """
    layout.average(group)
    optimizer = group.optimizer
    if optimizer.ema_overwrite_frequency:
        is_due = (optimizer.iterations + 1) % optimizer.ema_overwrite_frequency == 0
        run_if(is_due, lambda: layout.overwrite_with_average(group))


def _constrain(step: Step, is_kept: tf.Tensor | bool) -> None:
    """Stage 8: apply constraints after every micro-batch, as Keras does.

    Args:
        step: `Step`.
        is_kept: Scalar bool tensor, or bool; if false, an update was skipped, and
            constraints are not applied.
    """
    for variable in step.variables:
        if variable.constraint is not None:
            run_if(is_kept, functools.partial(step.layout.constrain, variable))


def _count(step: Step, is_updated: tf.Tensor | bool, is_kept: tf.Tensor | bool) -> None:
    """Stage 9: add one to the counter of each optimizer, after an update.

    If the step counts micro-batches, as Keras's accumulation does, add one after each
    micro-batch instead, unless its update was skipped.

    Args:
        step: `Step`.
        is_updated: Scalar bool tensor, or bool, whether to count an update. It is false
            after a micro-batch that is only accumulated.
        is_kept: Scalar bool tensor, or bool, whether to count a micro-batch: false if
            an update was due, but skipped; true after a micro-batch that is only
            accumulated. It is read only if the step counts micro-batches.
    """
    counts = is_kept if step.counts_micro_batches else is_updated
    for optimizer in step.optimizers:
        keras_optimizer.count_update(optimizer, tf.cast(counts, tf.int64))


def _update_if(
    is_due: tf.Tensor | None, update: Callable[[], tf.Tensor | bool]
) -> tuple[tf.Tensor | bool, tf.Tensor | bool]:
    """Run an update if it is due.

    Args:
        is_due: Scalar bool tensor, or `None` if an update is always due.
        update: Callable that makes an update, and returns whether it was not skipped.

    Returns:
        Tuple of two bools or scalar bool tensors: whether an update was made, and
        whether no update was skipped, which is true if none is due.
    """
    if is_due is None:
        is_updated = update()
        return is_updated, is_updated

    def run() -> tuple[tf.Tensor, tf.Tensor]:
        """Run the update; return both results of `_update_if`, as tensors.

        They are equal, since an update is due: it was made, or it was skipped.
        """
        is_updated = tf.convert_to_tensor(update())
        return is_updated, is_updated

    return tf.cond(is_due, run, lambda: (tf.constant(False), tf.constant(True)))
