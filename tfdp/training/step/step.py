"""`Step`: the settings and state of one step of a replica."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdp.ground._compat import keras_optimizer, tf_distribute
from tfdp.ground.base import loops
from tfdp.ground.base.param_groups import ParamGroup, param_groups_of
from tfdp.ground.base.step_context import ActiveHooks
from tfdp.ground.text import pluralize
from tfdp.training.reduction.gradient_reducer import GradientReducer
from tfdp.training.reduction.training_group import TrainingGroup
from tfdp.training.replicas.synchronized_scope import build_in_step
from tfdp.training.step.accumulation import (
    Accumulator,
    KerasAccumulation,
    NoAccumulation,
    Totals,
    read,
    set_to_zero,
)
from tfdp.training.step.loss_scale import LossScale
from tfdp.training.step.state_layout import GradientStatistics, StateLayout


class Schedule(NamedTuple):
    """The learning rate of a parameter group in one update.

    Args:
        rate: Scalar tensor, or `None` for the optimizer's own.
        momentum_factor: Scalar tensor, the rate divided by that of the last update.
            Momentum slots that contain the rate are multiplied by it. Or `None` to
            leave them.
    """

    rate: tf.Tensor | None = None
    momentum_factor: tf.Tensor | None = None


class StepFeature:
    """Extension of an optimizer's step. By default its hooks do nothing.

    Attributes:
        label: String, name of the feature in messages; set it if `needs_all_replicas`
            is true.
        variables: List of the Keras variables that the feature has created.
        counters: Dict of the variables that logs show and backups save, by a name that
            no other feature uses.
        needs_all_replicas: Bool, whether the feature needs gradients of all replicas in
            every step.
        is_active: Bool, whether the feature has a part in steps that are traced now. An
            inactive one keeps its variables. Defaults to `True`.
        measures_norm: Bool, whether the feature reads the norm of reduced gradients.
        measures_loss: Bool, whether the feature reads the loss of the global batch.
        checks_finite: Bool, whether the feature reads whether reduced gradients are
            finite.
        compresses: Bool, whether the feature compresses tensors that it communicates.
    """

    label = ""
    is_active = True
    measures_norm = False
    measures_loss = False
    checks_finite = False
    needs_all_replicas = False
    compresses = False

    @property
    def variables(self) -> list:
        """List of the Keras variables that the feature has created."""
        return []

    @property
    def counters(self) -> dict[str, Any]:
        """Dict of the variables that logs show and backups save, by name."""
        return {}

    @property
    def state(self) -> dict[str, Any]:
        """Dict of the variables that checkpoints save, by the tensors' names."""
        return {}

    def build(self, trained: Sequence[Any]) -> None:
        """Create state for the trained variables, once they are known; by default none.

        Args:
            trained: Sequence of the trained Keras variables.
        """

    def reset(self) -> None:
        """End the feature's part in the steps of a `fit`; its variables are kept.

        Called before each `fit`, since an earlier one may have failed, and by callbacks
        at the end of their `fit`.
        """

    def equalize_replicas(self, optimizer: Any) -> None:
        """Give all replicas the same state, outside a step; all workers call it.

        `DistributedOptimizer.equalize_replicas` calls it, for example before evaluation
        and saving. A feature with which weights and slots differ between replicas
        averages them. By default nothing is done.

        Args:
            optimizer: `DistributedOptimizer`.
        """

    def schedule(self, group: ParamGroup) -> Schedule | None:
        """Return the learning rate of a parameter group in the update that is traced.

        Returns:
            `Schedule` with the rate and a factor of momentum, or `None` if the feature
            does not change the optimizer's own rate.
        """
        return None

    def check(self, optimizer: Any) -> None:
        """Check, before a step is traced, that an optimizer supports the feature.

        Args:
            optimizer: `DistributedOptimizer`.

        Raises:
            ValueError: If the feature cannot be combined with the optimizer.
        """

    def admit(self, gradients: Sequence[Any] | None) -> tf.Tensor | bool:
        """Return whether a replica's step is taken at all.

        Args:
            gradients: Sequence of this replica's gradients of the micro-batch, or
                `None` in an update with the accumulated ones.

        Returns:
            Bool, or scalar bool tensor, equal on all replicas. If it is false, the
            optimizer does nothing, and other hooks of the optimizer's step are not run.
        """
        return True

    def begin(self, *, has_batch: bool) -> None:
        """Run before an optimizer's step accumulates this replica's gradients.

        Args:
            has_batch: Bool, false in an update with the accumulated gradients alone,
                without a new micro-batch.
        """

    def examine(
        self,
        step: Step,
        totals: Totals,
        divisor: tf.Tensor | None,
        statistics: GradientStatistics,
    ) -> tf.Tensor | None:
        """Read the gradients of an update, after they are reduced and unscaled.

        Args:
            step: `Step`.
            totals: `Totals` of this replica.
            divisor: Scalar float64 tensor, the factor of `totals` that unscaling
                removes, or `None` for 1.
            statistics: `GradientStatistics` of the reduced gradients.

        Returns:
            Scalar bool tensor, whether the update may be made, equal on all replicas
            whose gradients are summed; or `None`, without a condition. An update that
            is not made changes nothing, as at an overflow of the loss scale.
        """
        return None

    def end(self, step: Step, is_due: Any, is_kept: Any) -> None:
        """Run at the end of an optimizer's step, after its counters were increased.

        Args:
            step: `Step`.
            is_due: Scalar bool tensor, or bool, whether an update was due; equal on all
                replicas.
            is_kept: Scalar bool tensor, or bool, false if the update was skipped.
        """

    def around_step(self, model: Any) -> Callable[[], None] | None:
        """Run before a replica's step in a Keras loop, and choose what to run after it.

        The step includes the forward pass.

        Args:
            model: The Keras model.

        Returns:
            Callable to run after the step, or `None`.
        """
        return None


class RowDivider(StepFeature, abc.ABC):
    """Feature with which replicas compute their rows in micro-batches.

    A subclass gives the number of micro-batches, keeps the batch before replicas take
    their rows, and marks when the step can no longer be repeated, for example with more
    micro-batches after a replica ran out of memory.
    """

    @abc.abstractmethod
    def num_parts(self) -> tf.Tensor:
        """Return the number of micro-batches of a replica's rows: scalar, int32."""

    @abc.abstractmethod
    def keep_batch(self, args: tuple) -> tuple:
        """Keep the batch of a step, so that the step can be repeated.

        Args:
            args: Tuple of nests of per-replica values, the arguments of the step.

        Returns:
            Tuple like `args`, with which the step runs.
        """

    @abc.abstractmethod
    def begin_changes(self) -> list:
        """Build the operations that mark the step of a replica as not repeatable.

        They run once all replicas have computed all their rows.

        Returns:
            List of operations; states change after them.
        """


class IndependentGroups(StepFeature, abc.ABC):
    """Feature with which groups of replicas update independently of each other.

    The optimizers' counters count an update even if a replica's group skips it, since
    other groups may have made it.
    """

    def check_update(self, optimizer: Any) -> None:
        """Check that an optimizer may update independently in each group of replicas.

        Args:
            optimizer: The Keras optimizer that updates in a loop with these groups.

        Raises:
            ValueError: If it may not.
        """

    @abc.abstractmethod
    def groups_of_ranks(self, strategy: Any) -> Sequence[Sequence[int]]:
        """Return the ranks of the replicas in each group that updates independently.

        Args:
            strategy: A tfdp strategy, or Keras's default strategy of one device.
        """

    @abc.abstractmethod
    def reducer(self) -> GradientReducer:
        """Return the reducer that sums gradients within the running replica's group."""


class LoopFeature(StepFeature):
    """Feature of the steps of a loop of Keras, whatever optimizers they have.

    It takes part in the steps that are traced while it is active: from
    `active.activate(feature)` until it is deactivated, where `active` is the module's
    list of active features.
    """

    def replace_batch(self, args: tuple) -> tuple:
        """Return the arguments that replace those of a step: by default the same.

        `args` are nests of per-replica values, before replicas select theirs.
        """
        return args

    def begin_batch(self, model: Any, batch: list) -> None:
        """Run before a step of a model, for all local replicas at once.

        Args:
            model: The Keras model.
            batch: List of nests, the arguments of the step of each local replica.
        """

    def values_to_sum(self, model: Any) -> list[tf.Tensor]:
        """Return values of a step to sum over all replicas, together with its logs.

        Returns:
            List of one tensor for each local replica, whose sum `take_sum` receives; by
            default empty, for none.
        """
        return []

    def take_sum(self, total: tf.Tensor) -> None:
        """Receive the sum of `values_to_sum` over all replicas, after a step."""

    def regroup(self, group: TrainingGroup) -> TrainingGroup:
        """Return the group with which the running replica's step is built.

        It is called in each replica's training step while the step is traced, before
        collectives are built. A feature may return a group that, for example, records
        what collectives receive. By default it is the same group.

        Args:
            group: `TrainingGroup` of the running replica.
        """
        return group


active: ActiveHooks[LoopFeature] = ActiveHooks("loop features")


@dataclasses.dataclass(frozen=True)
class Step:
    """Settings and state of an optimizer's step, see `tfdp.training.step.path`.

    Args:
        optimizer: Keras optimizer that the parameter groups belong to.
        param_groups: List of `ParamGroup`, the variables of each inner optimizer.
        variables: List of Keras variables that have gradients.
        positions: List of ints, positions of `variables` among all trained variables.
        accumulator: `Accumulator`, which sums gradients until an update is due.
        reducer: `GradientReducer`, which sums over replicas.
        layout: `StateLayout` of gradients, variables and slots.
        schedules: List of `Schedule`, one for each parameter group.
        scale: `LossScale`, or `None` without one.
        features: Sequence of `StepFeature`, called in this order.
        fixed_scale: Float, a constant loss scale without overflow checks, or `None`.
        counts_micro_batches: Bool, whether the optimizer counts micro-batches instead
            of updates, as Keras's accumulation does. Defaults to `False`.
        loss: Scalar float32 tensor, this replica's part of the loss of the micro-batch,
            if a feature reads the loss; or `None`.
        loss_sum: Keras variable that sums `loss` over the micro-batches of an update,
            or `None`.
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
    loss: tf.Tensor | None = None
    loss_sum: Any = None

    @property
    def has_independent_groups(self) -> bool:
        """Bool, whether groups of replicas update independently of each other."""
        return any(isinstance(f, IndependentGroups) for f in self.features)

    @property
    def grouped_positions(self) -> list[int]:
        """List of the positions of the step's variables among all trained variables.

        They are ordered by parameter group, one group after another, as
        `GradientStatistics` lists the gradients.
        """
        return [
            item for group in self.param_groups for item in group.of(self.positions)
        ]

    def add_loss(self, is_due: tf.Tensor | None) -> None:
        """Add the loss of a micro-batch to `loss_sum`, if a feature reads the loss.

        Args:
            is_due: Scalar bool tensor, whether an update follows. Its value has no
                effect here, since `take_loss` reads and resets the sum. `None` if every
                micro-batch has an update: nothing is added then.
        """
        if self.loss is not None and is_due is not None:
            total = tf_distribute.local_part(self.loss_sum)
            total.assign_add(self.loss, read_value=False)

    def take_loss(self, totals: Totals) -> tf.Tensor | None:
        """Return this replica's part of the loss of an update.

        With accumulation it is the mean over the micro-batches, whose losses
        `add_loss` has added to `loss_sum`. That variable is set to zero.

        Args:
            totals: `Totals` of the update.

        Returns:
            Scalar tensor, or `None` if no feature reads the loss.
        """
        if totals.count is None or self.loss_sum is None:
            return self.loss
        total = read(self.loss_sum)
        with tf.control_dependencies([total]):
            set_to_zero(self.loss_sum)
        return total / tf.cast(totals.count, total.dtype)

    @property
    def optimizers(self) -> list[Any]:
        """List of the Keras optimizers whose counters count updates, each once."""
        candidates = [
            self.optimizer,
            *(group.optimizer for group in self.param_groups),
        ]
        return list({id(item): item for item in candidates}.values())


def keras_step(optimizer: Any, variables: list, reducer: GradientReducer) -> Step:
    """Create the step of a Keras optimizer without a `DistributedOptimizer`.

    Args:
        optimizer: Built Keras optimizer without inner optimizers.
        variables: List of Keras variables that have gradients.
        reducer: `GradientReducer`.
    """
    weight = reducer.gradient_weight()
    accumulates = bool(optimizer.gradient_accumulation_steps)
    return Step(
        optimizer=optimizer,
        param_groups=param_groups_of(optimizer, variables),
        variables=variables,
        positions=keras_optimizer.positions_in(optimizer, variables),
        accumulator=KerasAccumulation(optimizer, variables, weight)
        if accumulates
        else NoAccumulation(weight),
        reducer=reducer,
        layout=StateLayout(reducer),
        schedules=[Schedule()],
        fixed_scale=None if accumulates else optimizer.loss_scale_factor,
        counts_micro_batches=accumulates,
    )


def match_gradients(
    optimizer: Any, grads: Sequence[Any], variables: Sequence[Any] | None
) -> tuple[list, list]:
    """Match gradients with variables; build the optimizer if it is not built.

    Args:
        optimizer: Keras optimizer.
        grads: Sequence of gradients, with `None` for a variable without one.
        variables: Sequence of Keras variables, one for each gradient, or `None` for
            the variables that the optimizer was built for.

    Returns:
        Tuple of the gradients without `None`, and their variables.

    Raises:
        ValueError: If the numbers of gradients and variables differ, if the optimizer
            does not know a variable, or if it is not built and `variables` is `None`.
            Also if `IndependentGroups` of the running loop refuse the optimizer.
    """
    if (groups := loops.independent_groups()) is not None:
        groups.check_update(optimizer)
    if variables is None and not optimizer.built:
        raise ValueError(
            "Give `apply` the variables, or build the optimizer for them first: "
            "`optimizer.build(variables)`."
        )
    with keras.name_scope(optimizer.name, caller=optimizer):
        if variables is not None and not optimizer.built:
            build_in_step(optimizer, variables)
        if variables is None:
            variables = keras_optimizer.trained_by(optimizer)
        trained = list(variables)
        keras_optimizer.check_known(optimizer, trained)
        if len(grads) != len(trained):
            raise ValueError(
                "`apply` needs one gradient for each variable. Received: "
                f"{pluralize(len(grads), 'gradient')} for "
                f"{pluralize(len(trained), 'variable')}"
            )
        gradients, trained = keras_optimizer.drop_missing_gradients(
            optimizer, list(grads), trained
        )
    return list(gradients), list(trained)
