"""`Step`: the settings and state that one step of a replica is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdp.ground import _compat
from tfdp.ground.base.param_groups import ParamGroup, param_groups_of
from tfdp.ground.text import pluralize
from tfdp.training.reduction.gradient_reducer import GradientReducer
from tfdp.training.replicas.synchronized_scope import build_in_step
from tfdp.training.step.accumulation import (
    Accumulator,
    KerasAccumulation,
    NoAccumulation,
    Totals,
)
from tfdp.training.step.loss_scale import LossScale
from tfdp.training.step.state_layout import GradientStatistics, StateLayout


class Schedule(NamedTuple):
    """The learning rate of a parameter group in one update.

    Args:
        rate: Scalar tensor, or `None` for the optimizer's own.
        momentum_factor: Scalar tensor, by how much the rate has grown since the last
            update where momentum contains the rate, or `None`.
    """

    rate: tf.Tensor | None = None
    momentum_factor: tf.Tensor | None = None


class StepFeature:
    """What can be added to a step; each hook does nothing where it is not overridden.

    Attributes:
        label: String, its name in a sentence; needed with `needs_all_replicas`.
        variables: List of the Keras variables that it has made.
        counters: Dict of those that the logs show and a backup keeps, by a name that
            no other feature uses.
        needs_all_replicas: Bool, whether it needs what all replicas have in every step.
        trains_alone: Bool, whether replicas update by themselves, so that an update
            that one of them skips is counted on all; see `Features.start_local_steps`.
        measures_norm: Bool, whether it reads the norm of the reduced gradients.
    """

    label = ""
    trains_alone = False
    measures_norm = False
    needs_all_replicas = False

    @property
    def variables(self) -> list:
        return []

    @property
    def counters(self) -> dict[str, Any]:
        return {}

    def check(self, optimizer: Any) -> None:
        """Raise what it cannot be combined with, before a step is traced.

        Args:
            optimizer: `DistributedOptimizer`.

        Raises:
            ValueError: If there is such a thing.
        """

    def begin(self) -> None:
        """Prepare a step, before its first stage."""

    def examine(
        self,
        step: Step,
        totals: Totals,
        divisor: tf.Tensor | None,
        statistics: GradientStatistics,
    ) -> None:
        """Look at the gradients of an update, reduced and unscaled.

        Args:
            step: `Step`.
            totals: `Totals`, this replica's own gradients.
            divisor: Scalar float64 tensor, by which those are too large, or `None`.
            statistics: `GradientStatistics` of the reduced gradients.
        """

    def end(self, step: Step, is_due: Any, is_kept: Any) -> None:
        """Continue once a micro-batch is counted.

        Args:
            step: `Step`.
            is_due: Scalar bool tensor, or bool, whether an update was due; alike on all
                replicas.
            is_kept: Scalar bool tensor, or bool, false where an overflow was skipped.
        """


@dataclasses.dataclass(frozen=True)
class Step:
    """Settings and state of a step, see `tfdp.training.step.path`.

    Args:
        optimizer: Keras optimizer that the parameter groups belong to.
        param_groups: List of `ParamGroup`, which optimizer updates which variables.
        variables: List of Keras variables that have gradients.
        positions: List of ints, their positions among all trained variables.
        accumulator: `Accumulator`, stage 1.
        reducer: `GradientReducer`, sums over the replicas.
        layout: `StateLayout`, where gradients, variables and slots lie.
        schedules: List of `Schedule`, one for each parameter group.
        scale: `LossScale`, or `None` for none.
        features: Sequence of `StepFeature`, called in this order.
        fixed_scale: Float, a factor of the loss that is not looked after, or `None`.
        counts_micro_batches: Bool, whether the optimizer counts micro-batches, as
            Keras's accumulation does, and not updates. Defaults to `False`.
    """

    optimizer: Any
    param_groups: list[ParamGroup]
    variables: list[Any]
    positions: list[int]
    accumulator: Accumulator
    reducer: GradientReducer
    layout: StateLayout
    schedules: list[Schedule]
    scale: LossScale | None = None
    features: Sequence[StepFeature] = ()
    fixed_scale: float | None = None
    counts_micro_batches: bool = False

    @property
    def trains_alone(self) -> bool:
        """Bool, whether replicas update by themselves."""
        return any(feature.trains_alone for feature in self.features)

    @property
    def optimizers(self) -> list[Any]:
        """List of the Keras optimizers that count updates, each once."""
        all_of_them = [
            self.optimizer,
            *(group.optimizer for group in self.param_groups),
        ]
        return list({id(item): item for item in all_of_them}.values())


def keras_step(optimizer: Any, variables: list, reducer: GradientReducer) -> Step:
    """The step of a Keras optimizer that is in no `DistributedOptimizer`.

    Args:
        optimizer: Built Keras optimizer, no wrapper.
        variables: List of Keras variables that have gradients.
        reducer: `GradientReducer`.
    """
    weight = reducer.gradient_weight()
    accumulates = bool(optimizer.gradient_accumulation_steps)
    return Step(
        optimizer=optimizer,
        param_groups=param_groups_of(optimizer, variables),
        variables=variables,
        positions=[_compat.index_in(optimizer, variable) for variable in variables],
        accumulator=KerasAccumulation(optimizer, variables, weight)
        if accumulates
        else NoAccumulation(weight),
        reducer=reducer,
        layout=StateLayout(reducer),
        schedules=[Schedule()],
        fixed_scale=None if accumulates else optimizer.loss_scale_factor,
        counts_micro_batches=accumulates,
    )


def checked_gradients(
    optimizer: Any, grads: Sequence[Any], variables: Sequence[Any] | None
) -> tuple[list, list]:
    """Match gradients with variables; build the optimizer if it is not built.

    Args:
        optimizer: Keras optimizer.
        grads: Sequence of gradients, `None` where there is none.
        variables: Sequence of Keras variables, one for each, or `None` for those that
            the optimizer was built for.

    Returns:
        Tuple of the gradients that there are, and their variables.

    Raises:
        ValueError: If they do not match, or the optimizer does not know a variable.
    """
    if variables is None and not optimizer.built:
        raise ValueError(
            "Give `apply` the variables, or build the optimizer for them first: "
            "`optimizer.build(variables)`."
        )
    with keras.name_scope(optimizer.name, caller=optimizer):
        if variables is not None and not optimizer.built:
            build_in_step(optimizer, variables)
        given = _compat.trained_by(optimizer) if variables is None else list(variables)
        _compat.check_known(optimizer, given)
        if len(grads) != len(given):
            raise ValueError(
                "`apply` needs one gradient for each variable. Received: "
                f"{pluralize(len(grads), 'gradient')} for "
                f"{pluralize(len(given), 'variable')}"
            )
        gradients, given = _compat.without_missing(optimizer, list(grads), given)
    return list(gradients), list(given)
