"""Exchange and outer step of each fragment: at once, or delayed by inner updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives.background import BackgroundThread
from tfdp.features.local_steps import in_flight
from tfdp.features.local_steps.in_flight import Deferred, RoundExchange
from tfdp.features.local_steps.options import LocalStepsOptions
from tfdp.features.local_steps.outer_step import ReplicatedOuterStep, assign
from tfdp.features.local_steps.reducers import (
    new_reducer,
    sums_by_samples,
    sums_by_share,
)
from tfdp.ground._compat import tf_distribute
from tfdp.ground.base.context import replica_context
from tfdp.training.reduction.gradient_reducer import GradientReducer, ReplicaReducer
from tfdp.training.reduction.reducer import Reducer
from tfdp.training.step.accumulation import read


class Exchanges:
    """Exchanges of a model's fragments, groups of variables, at once or delayed.

    In an exchange, an outer optimizer updates the common weights of all replicas by the
    mean of their pseudo-gradients, the changes that they have made by local updates.

    Args:
        make_variable: Callable that creates a Keras variable of the inner optimizer.
        options: `LocalStepsOptions` with an outer step.
        trained: Sequence of the trained Keras variables.
        fragments: Sequence of sequences of ints, for each fragment the positions of its
            variables in `trained`.

    Source: Douillard et al. 2025, "Streaming DiLoCo with overlapping communication",
    https://arxiv.org/abs/2501.18512, algorithm 2, for delayed exchanges and how their
    results are mixed with the local weights; Zhang et al. 2016,
    https://arxiv.org/abs/1511.05950, for smaller updates from stale gradients.
    """

    def __init__(
        self,
        make_variable: Callable[..., Any],
        options: LocalStepsOptions,
        trained: Sequence[Any],
        fragments: Sequence[Sequence[int]],
    ) -> None:
        assert options.outer is not None
        self._outer_options = options.outer
        self._sync_every = options.sync_every
        template = options.outer.optimizer
        self.outer = ReplicatedOuterStep(make_variable, template, trained)
        self._trained = list(trained)
        self._fragments = fragments
        self._reducer: Reducer | None = None
        self._background_reducer: Reducer | None = None
        self._in_flight: dict[int, BackgroundThread | Deferred] = {}
        # With `min_participants`, exchanges take place in rounds, which do not wait for
        # late workers; otherwise `None`.
        self.rounds: RoundExchange | None = None
        # For each fragment, the number of the update after which its pseudo-gradients
        # were sent, or 0 if no exchange is in flight. The lateness of the outer step is
        # counted from that update.
        self._launched = make_variable(
            shape=(len(fragments),),
            dtype="int",
            initializer="zeros",
            name="exchanges_launched",
        )
        # Largest number of updates between sending pseudo-gradients and their outer
        # step. `DiLoCo` resets this variable in each epoch, and logs it.
        self.staleness = make_variable(
            shape=(), dtype="int", initializer="zeros", name="exchange_staleness"
        )

    @property
    def variables(self) -> list:
        """List of the Keras variables that were created in the inner optimizer."""
        outer = [self.outer.is_begun, *self.outer.anchors]
        return [*outer, self._launched, self.staleness]

    def prepare(self, strategy: Any) -> None:
        """Create threads that run delayed exchanges during the steps, if supported.

        Call it on all workers before a step is traced, since the graph refers to the
        threads. A second call has no effect.
        """
        options = self._outer_options
        if options.min_participants is not None and self.rounds is None:
            self.rounds = RoundExchange(
                strategy,
                self._specs_of(0),
                in_flight.specs_of(self.outer.carried),
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
                self._compressed_of(number),
                self._specs_of(number),
            )

    def exchange(
        self,
        number: int,
        gradients: Sequence[tf.Tensor],
        share: tf.Tensor,
        reducer: GradientReducer,
    ) -> None:
        """Average a fragment's pseudo-gradients, and update its weights by them.

        A pseudo-gradient is the common weight minus a replica's weight after its local
        updates.

        Args:
            number: Int, index of the fragment, a part of the weights.
            gradients: Sequence of tensors, pseudo-gradients of this replica.
            share: Scalar tensor, weight of this replica; the weights add up to 1.
            reducer: `GradientReducer` of all replicas.
        """
        reducer = self._pseudo_gradient_reducer(reducer)
        sums = sums_by_share(reducer, gradients, share, self._compressed_of(number))
        self._step(number, sums)

    def launch(self, number: int, samples: tf.Tensor, updates: tf.Tensor) -> None:
        """Start a delayed exchange: send this replica's pseudo-gradients of a fragment.

        Args:
            number: Int, index of the fragment, a part of the weights.
            samples: Scalar float32 tensor, samples by which this replica is weighted.
            updates: Scalar tensor, inner updates so far, the same on all replicas.
        """
        gradients = self.outer.pseudo_gradients(self._fragments[number])
        replica = tf_distribute.active_local_replica_id()
        if self.rounds is not None:
            state = [read(variable) for variable in self.outer.carried]
            self.rounds.launch(replica, samples, gradients, state)
        else:
            self._in_flight_of(number).launch(replica, [samples, *gradients])
        launched = tf_distribute.local_part(self._launched)
        launched.scatter_nd_update([[number]], [tf.cast(updates, launched.dtype)])

    def is_in_flight(self, number: int) -> tf.Tensor:
        """Return a scalar bool tensor, true if the exchange of a fragment is in flight.

        Args:
            number: Int, index of the fragment, a part of the weights.
        """
        return tf_distribute.local_part(self._launched)[number] > 0

    def finish(
        self, number: int, updates: tf.Tensor, reducer: GradientReducer
    ) -> tf.Tensor | None:
        """Make the outer step of a delayed exchange; mix its result with local weights.

        Args:
            number: Int, index of the fragment, a part of the weights.
            updates: Scalar tensor, inner updates so far, the same on all replicas.
            reducer: `GradientReducer` of all replicas.

        Returns:
            Scalar tensor, the samples that were sent if the exchange did not take
            place, else zero; or `None` if all exchanges take place.
        """
        launched = tf_distribute.local_part(self._launched)
        late = tf.cast(updates, launched.dtype) - launched[number]
        mixing = self._outer_options.mixing
        unused = None
        if self.rounds is None:
            sums = self._means_of_sent(number, reducer)
            self._step(number, self._scaled(sums, late), mixing)
        else:
            result = self.rounds.collect(tf_distribute.active_local_replica_id())

            def step() -> tf.Tensor:
                """Update fragment `number` from the mean pseudo-gradients of a round.

                Returns:
                    Scalar tensor, zero: no sent samples are left to count again.
                """
                assign(self.outer.carried, result.state)
                kept = tf.where(result.is_behind, 0.0, mixing)
                self._step(number, self._scaled(result.gradients, late), kept)
                return tf.zeros_like(result.samples)

            unused = tf.cond(result.is_made, step, lambda: result.samples)
        staleness = tf_distribute.local_part(self.staleness)
        staleness.assign(tf.maximum(staleness.read_value(), late), read_value=False)
        launched.scatter_nd_update([[number]], [tf.zeros((), launched.dtype)])
        return unused

    def broadcast_state(self, reducer: GradientReducer) -> None:
        """Set outer optimizer and weights on all replicas to those of the first one.

        Its worker leads all exchanges; the other workers may have missed some.
        """
        context = replica_context()
        assert context is not None
        is_first = tf.equal(context.replica_id_in_sync_group, 0)
        state = [read(variable) for variable in self.outer.carried]
        parts = [tf.where(is_first, value, tf.zeros_like(value)) for value in state]
        assign(self.outer.carried, reducer.sum(parts))

    def _means_of_sent(
        self, number: int, reducer: GradientReducer
    ) -> Sequence[tf.Tensor]:
        """Return the mean of the sent pseudo-gradients of fragment `number`.

        A `BackgroundThread` has averaged them: the step waits for its result. Those of
        a `Deferred` are averaged now.
        """
        sent = self._in_flight_of(number)
        tensors = sent.collect(tf_distribute.active_local_replica_id())
        if isinstance(sent, BackgroundThread):
            return tensors
        samples, *gradients = tensors
        reducer = self._pseudo_gradient_reducer(reducer)
        compressed = self._compressed_of(number)
        return sums_by_samples(reducer, samples, gradients, compressed)

    def _scaled(
        self, sums: Sequence[tf.Tensor], late_updates: tf.Tensor
    ) -> Sequence[tf.Tensor]:
        """Return the sums, scaled by their staleness if `scales_by_staleness` is set.

        The factor is `sync_every / (sync_every + late_updates)`.

        Args:
            sums: Sequence of tensors, mean pseudo-gradients.
            late_updates: Scalar tensor, inner updates since they were sent.
        """
        if not self._outer_options.scales_by_staleness:
            return sums
        factor = self._sync_every / tf.cast(self._sync_every + late_updates, tf.float64)
        return [total * tf.cast(factor, total.dtype) for total in sums]

    def adopt_common_weights(self) -> None:
        """Set the weights of this replica to the outer ones, if exchanges are delayed.

        A delayed exchange has mixed local weights into the weights of a replica.
        """
        if self._outer_options.delay:
            assign(self._trained, [read(anchor) for anchor in self.outer.anchors])

    def _variables_of(self, number: int) -> list:
        """Return the trained Keras variables of a fragment, by its index."""
        return [self._trained[position] for position in self._fragments[number]]

    def _compressed_of(self, number: int) -> list | None:
        """Return the variables of fragment `number`; `None` without compression."""
        is_exact = self._outer_options.compression is None
        return None if is_exact else self._variables_of(number)

    def _specs_of(self, number: int) -> list[tf.TensorSpec]:
        """Return the `tf.TensorSpec` of each pseudo-gradient of fragment `number`."""
        positions = self._fragments[number]
        return in_flight.specs_of([self.outer.anchors[p] for p in positions])

    def _step(
        self, number: int, sums: Sequence[tf.Tensor], mixing: float | tf.Tensor = 0.0
    ) -> None:
        """Make an outer step with a fragment, and set this replica's weights by it.

        Args:
            number: Int, index of the fragment, a part of the weights.
            sums: Sequence of tensors, mean pseudo-gradients.
            mixing: Float or scalar tensor from 0 to 1, the fraction of the local
                weights that is kept. Defaults to `0.0`.
        """
        values = self.outer.update(self._fragments[number], sums)
        variables = self._variables_of(number)
        if tf.is_tensor(mixing) or mixing:
            for index, variable in enumerate(variables):
                value = values[index]
                kept = tf.cast(mixing, value.dtype)
                local = tf.cast(read(variable), value.dtype)
                values[index] = kept * local + (1.0 - kept) * value
        assign(variables, values)

    def _pseudo_gradient_reducer(self, reducer: GradientReducer) -> GradientReducer:
        """Return the reducer of pseudo-gradients, which compresses them if that is set.

        One that compresses is created at the first call. Without compression, or
        outside of a replica of a tfdp strategy, `reducer` itself is returned.
        """
        context = replica_context()
        if self._outer_options.compression is None or context is None:
            return reducer
        if self._reducer is None:
            self._reducer = new_reducer(
                context.strategy, self._outer_options.compression_by_level
            )
        return ReplicaReducer(self._reducer, context)

    def _in_flight_of(self, number: int) -> BackgroundThread | Deferred:
        """Return the thread or queue with the sent pseudo-gradients of a fragment.

        It is the `BackgroundThread` that `prepare` has created for the fragment. If
        there is none, it is a queue, which is created at the first call.
        """
        if number not in self._in_flight:
            strategy = tf.distribute.get_strategy()
            self._in_flight[number] = Deferred(strategy, self._specs_of(number))
        return self._in_flight[number]
