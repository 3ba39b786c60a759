"""Outer steps of each fragment: at once, or some inner updates after they began."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives.background import Background
from tfdp.features.local_steps import in_flight
from tfdp.features.local_steps.in_flight import Deferred, RoundExchange
from tfdp.features.local_steps.options import LocalStepsOptions
from tfdp.features.local_steps.outer_step import OuterStep, Update
from tfdp.features.local_steps.reducers import (
    new_reducer,
    sums_by_samples,
    sums_by_share,
)
from tfdp.ground import _compat
from tfdp.ground.base.context import replica_context
from tfdp.training.reduction.gradient_reducer import GradientReducer, ReplicaReducer
from tfdp.training.reduction.reducer import Reducer


class Exchanges:
    """The exchange of each fragment, and what is under way of it.

    Args:
        make_variable: Callable that creates a Keras variable of the inner optimizer.
        options: `LocalStepsOptions` with an outer step.
        outer: `OuterStep`.
        trained: Sequence of the trained Keras variables.
        fragments: Sequence of sequences of ints, their positions by fragment.

    Source: Douillard et al. 2025, "Streaming DiLoCo with overlapping communication",
    https://arxiv.org/abs/2501.18512, algorithm 2, for delayed exchanges and how their
    results are mixed with the local weights; Zhang et al. 2016,
    https://arxiv.org/abs/1511.05950, for smaller updates from stale gradients.
    """

    def __init__(
        self,
        make_variable: Callable[..., Any],
        options: LocalStepsOptions,
        outer: OuterStep,
        trained: Sequence[Any],
        fragments: Sequence[Sequence[int]],
    ) -> None:
        assert options.outer is not None
        self._outer_options = options.outer
        self._sync_every = options.sync_every
        self._outer = outer
        self._trained = list(trained)
        self._fragments = fragments
        self._reducer: Reducer | None = None
        self._background_reducer: Reducer | None = None
        self._in_flight: dict[int, Background | Deferred] = {}
        # Where a worker may miss outer steps of the others.
        self.rounds: RoundExchange | None = None
        # By fragment, after which update what is under way was sent; 0: nothing is.
        self._launched = make_variable(
            shape=(len(fragments),),
            dtype="int",
            initializer="zeros",
            name="exchanges_launched",
        )
        # The most updates by which an outer step was late since this was last zero.
        self.staleness = make_variable(
            shape=(), dtype="int", initializer="zeros", name="exchange_staleness"
        )

    @property
    def variables(self) -> list:
        """Keras variables of the inner optimizer that it has made."""
        return [self._launched, self.staleness]

    def prepare(self, strategy: Any) -> None:
        """Let exchanges run beside the steps where they may, on all workers.

        Outside of a step, and once: what is traced refers to it.
        """
        options = self._outer_options
        if options.min_participants is not None and self.rounds is None:
            self.rounds = RoundExchange(
                strategy,
                self._specs_of(0),
                in_flight.specs_of(self._outer.carried),
                options.min_participants,
                options.patience_seconds,
            )
        may_run = options.delay and in_flight.has_background(strategy)
        if not may_run or self._in_flight or self.rounds is not None:
            return
        self._background_reducer = in_flight.background_reducer(
            strategy, options.compression_by_level
        )
        for number in range(len(self._fragments)):
            self._in_flight[number] = in_flight.background_exchange(
                f"tfdp exchange {number}",
                self._background_reducer,
                self._variables_of(number),
                self._specs_of(number),
                compresses=self._compresses,
            )

    def learned(self, number: int) -> list[tf.Tensor]:
        """The pseudo-gradients of a fragment, this replica's."""
        return self._outer.pseudo_gradients(
            self._fragments[number], self._variables_of(number)
        )

    def exchange(
        self,
        number: int,
        gradients: Sequence[tf.Tensor],
        share: tf.Tensor,
        reducer: GradientReducer,
        update: Update,
    ) -> None:
        """Make an outer step of a fragment; all replicas go on from its result.

        Args:
            number: Int, of the fragment.
            gradients: Sequence of tensors, what this replica has learned.
            share: Scalar tensor, by which this replica counts; those of all make one.
            reducer: `GradientReducer` of all replicas.
            update: Callable that runs an optimizer, see `OuterStep.update`.
        """
        sums = sums_by_share(
            self._own_reducer(reducer),
            gradients,
            self._variables_of(number),
            share,
            compresses=self._compresses,
        )
        self._step(number, sums, update)

    def launch(self, number: int, samples: tf.Tensor, updates: tf.Tensor) -> None:
        """Send what this replica has learned of a fragment.

        Args:
            number: Int, of the fragment.
            samples: Scalar float32 tensor, by which this replica counts.
            updates: Scalar tensor, inner updates so far, alike on all replicas.
        """
        gradients = self.learned(number)
        if self.rounds is not None:
            state = [_read(variable) for variable in self._outer.carried]
            self.rounds.launch(_replica(), samples, gradients, state)
        else:
            self._in_flight_of(number).launch(_replica(), [samples, *gradients])
        launched = _compat.local_part(self._launched)
        launched.scatter_nd_update([[number]], [tf.cast(updates, launched.dtype)])

    def is_under_way(self, number: int) -> tf.Tensor:
        """Scalar bool tensor, whether what was sent of a fragment waits to be used."""
        return _compat.local_part(self._launched)[number] > 0

    def finish(
        self,
        number: int,
        updates: tf.Tensor,
        reducer: GradientReducer,
        update: Update,
        give_back: Callable[[tf.Tensor], None],
    ) -> None:
        """Make the outer step of what was sent, and mix it with what was done since.

        Args:
            number: Int, of the fragment.
            updates: Scalar tensor, inner updates so far, alike on all replicas.
            reducer: `GradientReducer` of all replicas.
            update: Callable that runs an optimizer, see `OuterStep.update`.
            give_back: Callable that counts samples again that were sent in vain.
        """
        launched = _compat.local_part(self._launched)
        late = tf.cast(updates, launched.dtype) - launched[number]
        mixing = self._outer_options.mixing
        if self.rounds is None:
            sums = self._sums_of_sent(number, reducer)
            self._step(number, self._scaled(sums, late), update, mixing)
        else:
            outcome = self.rounds.collect(_replica())

            def step() -> tf.Tensor:
                self._take_state(outcome.state)
                kept = tf.where(outcome.is_behind, 0.0, mixing)
                self._step(number, self._scaled(outcome.gradients, late), update, kept)
                return tf.constant(True)

            def go_on() -> tf.Tensor:
                give_back(outcome.samples)
                return tf.constant(False)

            tf.cond(outcome.is_made, step, go_on)
        staleness = _compat.local_part(self.staleness)
        staleness.assign(tf.maximum(staleness.read_value(), late), read_value=False)
        launched.scatter_nd_update([[number]], [tf.zeros((), launched.dtype)])

    def take_state_of_first(self, reducer: GradientReducer) -> None:
        """Take the outer state of the first replica, whose worker misses no step."""
        context = replica_context()
        assert context is not None
        is_first = tf.equal(context.replica_id_in_sync_group, 0)
        own = [_read(variable) for variable in self._outer.carried]
        self._take_state(
            reducer.sum([tf.where(is_first, v, tf.zeros_like(v)) for v in own])
        )

    def _sums_of_sent(
        self, number: int, reducer: GradientReducer
    ) -> Sequence[tf.Tensor]:
        """Sums over all replicas of what they have sent."""
        sent = self._in_flight_of(number)
        if isinstance(sent, Background):
            return sent.collect(_replica())
        samples, *gradients = sent.collect(_replica())
        return sums_by_samples(
            self._own_reducer(reducer),
            samples,
            gradients,
            self._variables_of(number),
            compresses=self._compresses,
        )

    def _scaled(
        self, sums: Sequence[tf.Tensor], late: tf.Tensor
    ) -> Sequence[tf.Tensor]:
        """Sums that are `late` updates old, smaller if that is asked for."""
        if not self._outer_options.scales_by_staleness:
            return sums
        factor = self._sync_every / tf.cast(self._sync_every + late, tf.float64)
        return [total * tf.cast(factor, total.dtype) for total in sums]

    def _take_state(self, state: Sequence[tf.Tensor]) -> None:
        for variable, value in zip(self._outer.carried, state, strict=True):
            _compat.local_part(variable).assign(value, read_value=False)

    def take_common_weights(self) -> None:
        """Leave nothing of its own to a replica that has made no update since."""
        if not self._outer_options.delay:
            return
        for variable, anchor in zip(self._trained, self._outer.anchors, strict=True):
            part = _compat.local_part(variable)
            value = _compat.local_part(anchor).read_value()
            part.assign(tf.cast(value, part.dtype), read_value=False)

    @property
    def _compresses(self) -> bool:
        return self._outer_options.compression is not None

    def _variables_of(self, number: int) -> list:
        return [self._trained[position] for position in self._fragments[number]]

    def _specs_of(self, number: int) -> list[tf.TensorSpec]:
        positions = self._fragments[number]
        return in_flight.specs_of([self._outer.anchors[p] for p in positions])

    def _step(
        self,
        number: int,
        sums: Sequence[tf.Tensor],
        update: Update,
        mixing: float | tf.Tensor = 0.0,
    ) -> None:
        """Make an outer step; a replica keeps some of its own weights."""
        common = self._outer.update(self._fragments[number], sums, update)
        for variable, value in zip(self._variables_of(number), common, strict=True):
            part, mixed = _compat.local_part(variable), value
            if tf.is_tensor(mixing) or mixing:
                kept = tf.cast(mixing, value.dtype)
                own = tf.cast(part.read_value(), value.dtype)
                mixed = kept * own + (1.0 - kept) * value
            part.assign(tf.cast(mixed, part.dtype), read_value=False)

    def _own_reducer(self, reducer: GradientReducer) -> GradientReducer:
        """The reducer of pseudo-gradients of the replica that is running."""
        context = replica_context()
        if not self._compresses or context is None:
            return reducer
        if self._reducer is None:
            self._reducer = new_reducer(
                context.strategy, self._outer_options.compression_by_level
            )
        return ReplicaReducer(self._reducer, context)

    def _in_flight_of(self, number: int) -> Background | Deferred:
        if number not in self._in_flight:
            strategy = tf.distribute.get_strategy()
            self._in_flight[number] = Deferred(strategy, self._specs_of(number))
        return self._in_flight[number]


def _read(variable: Any) -> tf.Tensor:
    return tf.convert_to_tensor(_compat.local_part(variable))


def _replica() -> int:
    """Index of the replica that is running among the local ones."""
    context = replica_context()
    return 0 if context is None else _compat.local_replica_id(context)
