"""The state of local steps, the exchange between the replicas, and Keras's loops."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.features.local_steps.exchanges import Exchanges
from tfdp.features.local_steps.options import LocalStepsOptions
from tfdp.features.local_steps.outer_step import OuterStep, Update
from tfdp.features.local_steps.pace import Pace
from tfdp.features.local_steps.reducers import NodeReducers
from tfdp.ground import _compat
from tfdp.ground.base import batch_weight
from tfdp.ground.base.context import is_tfdp, replica_context, strategy_of
from tfdp.ground.base.feature import Feature
from tfdp.ground.base.loops import steps_alone
from tfdp.ground.base.param_groups import innermost
from tfdp.training.reduction.fusion import wide_dtype
from tfdp.training.reduction.gradient_reducer import GradientReducer
from tfdp.training.replicas.variables import StatisticVariable
from tfdp.training.step.grouped_update import decay_and_update
from tfdp.training.step.step import Step, StepFeature


class LocalSteps(StepFeature):
    """Counts what a replica has done alone, and exchanges it when that is due.

    Args:
        make_variable: Callable that creates a Keras variable of the optimizer.
        options: `LocalStepsOptions`.
        variables: Sequence of the trained Keras variables.

    Source: Stich 2019, "Local SGD Converges Fast and Communicates Little",
    https://arxiv.org/abs/1805.09767.
    """

    trains_alone = True

    def __init__(
        self,
        make_variable: Callable[..., Any],
        options: LocalStepsOptions,
        variables: Sequence[Any],
    ) -> None:
        self.options = options
        self._trained = list(variables)
        self._node_reducers = NodeReducers(variables)
        self.pace = Pace(options) if options.is_dynamic else None
        self._fragments = options.fragments_of(
            [math.prod(variable.shape) for variable in variables]
        )
        self.outer = self.exchanges = None
        if options.outer is not None:
            self.outer = OuterStep(make_variable, options.outer, variables)
            self.exchanges = Exchanges(
                make_variable, options, self.outer, self._trained, self._fragments
            )
        self.updates = make_variable(
            shape=(), dtype="int", initializer="zeros", name="local_updates"
        )
        # Since the last exchange of each fragment; another number on each replica, and
        # zero where the state may be saved.
        self.samples = make_variable(
            shape=(len(self._fragments),),
            dtype="float32",
            initializer="zeros",
            name="local_samples",
        )
        # Of micro-batches whose update is still to be made.
        self.waiting_samples = make_variable(
            shape=(), dtype="float32", initializer="zeros", name="local_waiting_samples"
        )

    @property
    def variables(self) -> list:
        """Keras variables of the optimizer that it has made."""
        own = [self.updates, self.samples, self.waiting_samples]
        for part in self.outer, self.exchanges:
            own += [] if part is None else part.variables
        return own

    @property
    def num_groups(self) -> int:
        """Int, the replicas, or nodes, that step alone."""
        strategy, outer = tf.distribute.get_strategy(), self.options.outer
        if outer is None or outer.scope == "replica" or not is_tfdp(strategy):
            return strategy.num_replicas_in_sync
        return len(strategy.extended.group.nodes)

    def groups_of_ranks(self, strategy: Any) -> Sequence[Sequence[int]]:
        """The ranks of the replicas of each group that steps by itself.

        Args:
            strategy: A tfdp strategy.
        """
        outer = self.options.outer
        if outer is None or outer.scope == "replica":
            return [[rank] for rank in range(strategy.num_replicas_in_sync)]
        return [sorted(node) for node in strategy.extended.topology.nodes]

    def prepare(self, strategy: Any) -> None:
        """Prepare what is not made within a step, on all workers, once.

        Args:
            strategy: The strategy that trains.
        """
        if self.exchanges is not None:
            self.exchanges.prepare(strategy)

    def rest(self) -> None:
        """Wait for no worker that is late, nor be waited for, while all meet."""
        if self.exchanges is not None and self.exchanges.rounds is not None:
            self.exchanges.rounds.rest()

    def meet(self) -> None:
        """Go on after all have met."""
        if self.pace is not None:
            self.pace.restart()
        if self.exchanges is not None and self.exchanges.rounds is not None:
            self.exchanges.rounds.meet()

    def reducer(self) -> GradientReducer:
        """The reducer of the gradients of the replica that is running."""
        outer = self.options.outer
        if outer is None or outer.scope == "replica":
            return GradientReducer()
        strategy = tf.distribute.get_strategy()
        if not is_tfdp(strategy) or len(strategy.extended.group.nodes) < 2:
            raise ValueError(
                "All replicas are on one node, so that there is nothing to exchange "
                'between nodes. Use `DiLoCo(scope="replica")`, or say with '
                "`CommunicationOptions(node_size=...)` how many replicas count as one."
            )
        return self._node_reducers.of_replica(strategy, replica_context())

    def begin(self) -> None:
        """Prepare a step, before the first update."""
        if self.outer is not None:
            self.outer.begin(self._trained)

    def end(self, step: Step, is_due: Any, is_kept: Any) -> None:
        """Count a micro-batch, and exchange what was learned when that is due."""
        self.count(is_due, is_kept)
        optimizer, reducer = step.optimizer, step.reducer
        self.exchange_if_due(optimizer, reducer, decay_and_update, is_due)

    def count(self, is_due: tf.Tensor | bool, is_kept: tf.Tensor | bool) -> None:
        """Count a micro-batch of this replica, once its update is made.

        Micro-batches that are left over where all meet count in no average.

        Args:
            is_due: Scalar bool tensor, or bool, whether an update was due; alike on
                all replicas.
            is_kept: Scalar bool tensor, or bool, false where an overflow was skipped,
                so that nothing was learned from the samples.
        """
        samples = _compat.local_part(self.samples)
        own = tf.cast(_own_samples(), samples.dtype)
        if is_due is not True:
            waiting = _compat.local_part(self.waiting_samples)
            own += waiting.read_value()
            left = tf.where(is_due, tf.zeros_like(own), own)
            waiting.assign(left, read_value=False)
            is_kept = tf.logical_and(is_due, is_kept)
        learned_from = own * tf.cast(is_kept, own.dtype)
        samples.assign_add(tf.fill(samples.shape, learned_from), read_value=False)
        updates = _compat.local_part(self.updates)
        updates.assign_add(tf.cast(is_due, updates.dtype), read_value=False)

    def exchange_if_due(
        self,
        optimizer: Any,
        reducer: GradientReducer,
        update: Update,
        is_due: tf.Tensor | bool,
    ) -> None:
        """Exchange the fragments whose turn it is after an update.

        Args:
            optimizer: Keras optimizer, no wrapper.
            reducer: `GradientReducer` of all replicas.
            update: Callable that runs an optimizer, see `OuterStep.update`.
            is_due: Scalar bool tensor, or bool, whether an update was due; alike on
                all replicas.
        """
        updates = _compat.local_part(self.updates).read_value()
        place = updates % self.options.sync_every
        for number, offset in enumerate(self.options.offsets):
            begins = tf.logical_and(is_due, tf.equal(place, offset))
            if not self.options.delay:
                exchange = functools.partial(
                    self._exchange, number, optimizer, reducer, update
                )
                _cond(begins, exchange)
                continue
            _cond(begins, functools.partial(self._launch, number, updates))
            later = (offset + self.options.delay) % self.options.sync_every
            is_over = tf.logical_and(is_due, tf.equal(place, later))
            self._finish(number, is_over, updates, reducer, update)

    def exchange(
        self, optimizer: Any, reducer: GradientReducer, update: Update
    ) -> None:
        """Exchange everything, slots too: afterwards all replicas have one state.

        Args:
            optimizer: Keras optimizer, no wrapper.
            reducer: `GradientReducer` of all replicas.
            update: Callable that runs an optimizer, see `OuterStep.update`.
        """
        updates = _compat.local_part(self.updates)
        for number in range(len(self._fragments)):
            if self.options.delay:
                self._finish(number, True, updates.read_value(), reducer, update)
            self._exchange(number, optimizer, reducer, update)
        if self.exchanges is not None:
            self.exchanges.take_common_weights()
            slots = slots_of(optimizer)
            _assign(slots, _means(slots, reducer, 1.0 / reducer.num_replicas))
        if self.outer is not None:
            self.outer.end()
        updates.assign(tf.zeros((), updates.dtype), read_value=False)
        waiting = _compat.local_part(self.waiting_samples)
        waiting.assign(tf.zeros((), waiting.dtype), read_value=False)

    def _exchange(
        self, number: int, optimizer: Any, reducer: GradientReducer, update: Update
    ) -> None:
        """Exchange a fragment, unless nothing was done since it was the last time."""
        samples = _compat.local_part(self.samples)
        own = tf.cast(samples[number], tf.float64)
        (total,) = reducer.sum([own])
        exchanges, variables = self.exchanges, self._trained
        learned: Sequence[tf.Tensor] | None = None
        if exchanges is not None and exchanges.rounds is not None:
            # By how much a worker has moved from where it was, not from where all are.
            learned = exchanges.learned(number)
            exchanges.take_state_of_first(reducer)

        def exchange() -> None:
            if exchanges is not None:
                gradients = exchanges.learned(number) if learned is None else learned
                exchanges.exchange(number, gradients, own / total, reducer, update)
            else:
                state = [*variables, *slots_of(optimizer)]
                _assign(state, _means(state, reducer, own / total))
            samples.scatter_nd_update([[number]], [0.0])

        _cond(total > 0, exchange)

    def _launch(self, number: int, updates: tf.Tensor) -> None:
        """Send what was learned of a fragment, and go on."""
        assert self.exchanges is not None
        samples = _compat.local_part(self.samples)
        self.exchanges.launch(number, samples[number], updates)
        samples.scatter_nd_update([[number]], [0.0])

    def _finish(
        self,
        number: int,
        is_over: tf.Tensor | bool,
        updates: tf.Tensor,
        reducer: GradientReducer,
        update: Update,
    ) -> None:
        """Use what was sent of a fragment, if anything is under way."""
        exchanges = self.exchanges
        assert exchanges is not None

        def give_back(sent: tf.Tensor) -> None:
            samples = _compat.local_part(self.samples)
            samples.scatter_nd_add([[number]], [sent])

        finish = functools.partial(
            exchanges.finish, number, updates, reducer, update, give_back
        )
        _cond(tf.logical_and(is_over, exchanges.is_under_way(number)), finish)


def _means(variables: Sequence[Any], reducer: GradientReducer, share: Any) -> list:
    """Means over all replicas, each of which counts by its share."""
    parts = [_compat.local_part(variable) for variable in variables]
    values = [tf.cast(part.read_value(), wide_dtype(part.dtype)) for part in parts]
    return reducer.sum(
        [tf.math.multiply_no_nan(v, tf.cast(share, v.dtype)) for v in values]
    )


def _assign(variables: Sequence[Any], values: Sequence[tf.Tensor]) -> None:
    with tf.control_dependencies(values):
        for variable, value in zip(variables, values, strict=True):
            part = _compat.local_part(variable)
            part.assign(tf.cast(value, part.dtype), read_value=False)


def _own_samples() -> tf.Tensor:
    """Scalar float64 tensor, the samples of this replica's micro-batch.

    Where Keras's loops do not count them all replicas have as many.
    """
    weight, samples = batch_weight.current(), batch_weight.num_samples()
    own = tf.constant(1.0, tf.float64) if weight is None else weight
    return own if samples is None else own * tf.cast(samples, own.dtype)


def slots_of(optimizer: Any) -> list:
    """Keras variables of an optimizer that follow from its replica's gradients.

    Its scalars, such as the learning rate and the number of updates, follow from the
    number of steps alone, and are alike on all replicas as they are.

    Args:
        optimizer: Keras optimizer, no wrapper.
    """
    found = {
        id(variable): variable
        for part in innermost(optimizer)
        for variable in part.variables
        if len(variable.shape) and tf.as_dtype(variable.dtype).is_floating
    }
    return list(found.values())


def _cond(predicate: tf.Tensor, action: Callable[[], None]) -> None:
    def run() -> tf.Tensor:
        action()
        return tf.constant(True)

    tf.cond(predicate, run, lambda: tf.constant(False))


class LocalStepsFeature(Feature):
    """Replicas, or nodes, that train alone between meetings: see each hook."""

    def before_meeting(self, model: Any) -> None:
        """Tell late workers that this one waits for them, and they not for it."""
        if steps_alone(model):
            local_steps = model.optimizer.features.local_steps
            if local_steps is not None:
                local_steps.rest()

    before_loop = before_meeting

    def equalize_replicas(self, model: Any) -> None:
        """Average what the replicas of a model have learned alone.

        After local steps every replica would evaluate and save its own weights, and the
        moving statistics of its own batches. Averages of these are what averages in
        every step would have led to, since each step moves them by a fraction of its
        batch's.
        """
        average = getattr(getattr(model, "optimizer", None), "average_replicas", None)
        if average is not None:
            average()
        strategy = strategy_of(model)
        if strategy is not None and steps_alone(model):
            values = [variable.value for variable in model.variables]
            strategy.extended.average(
                [value for value in values if isinstance(value, StatisticVariable)]
            )

    def wrap_step(self, model: Any, step: Callable) -> Callable:
        """Let a worker that is slow leave out updates where its callback says so."""

        @functools.wraps(step)
        def paced(iterator: Any) -> Any:
            own = model.optimizer.features.local_steps if steps_alone(model) else None
            if own is None or own.pace is None:
                return step(iterator)
            return own.pace.step(model, step, iterator)

        return paced

    def batches_between_meetings(
        self, model: Any, *, is_delayed: bool = True
    ) -> int | None:
        """Return after how many batches the workers meet at the latest.

        Args:
            model: Keras model in `fit`.
            is_delayed: Bool, whether exchanges that run beside the steps are no
                meetings. Defaults to `True`.

        Returns:
            Int, 1 without local steps; or `None` if they do not within an epoch, as
            where nobody waits for a worker that is late.
        """
        if not steps_alone(model):
            return 1
        options = model.optimizer.features.local_step_options
        if options.delay and (is_delayed or options.outer.min_participants is not None):
            return None
        return options.sync_every * model.optimizer.accumulation_steps
