"""Exchanges of an island while it trains, and the outer state common to all islands.

An island is a worker, or several, that trains as a separate job. By outer steps, see
`tfdp.features.local_steps`, it averages its weights with the other islands.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp.communication.coordination.model_group import worker_group_of
from tfdp.communication.transport.communicator import Array
from tfdp.communication.transport.rounds import Reply
from tfdp.features.islands.hub_clients import HubClient, HubLost
from tfdp.features.islands.island import Island
from tfdp.features.local_steps import LocalStepsOptions, OuterOptions
from tfdp.features.local_steps.outer_step import OuterStep
from tfdp.ground import user_code
from tfdp.ground.base.feature import Feature, Fit, JobPart, register
from tfdp.ground.base.param_groups import batches_per_update
from tfdp.ground.base.threads import run_on_thread
from tfdp.ground.forks import Owner
from tfdp.ground.text import pluralize, say
from tfdp.training.keras_hooks.added_callbacks import OptimizerProgressCheck
from tfdp.training.keras_hooks.worker_callbacks import WRITERS, callback_list
from tfdp.training.replicas.variables import StatisticVariable

# Seconds after which an island that waits for others prints the reason, so that the job
# does not seem to hang.
_WARN_AFTER_SECONDS = 30.0
_THREAD = "tfdp island"
# Counter of the calls of `fit` in this process: islands exchange with each other in the
# calls that have the same number.
_fit_numbers = itertools.count()
# The `IslandTraining` of each model that is in `fit`, for hooks that are called with
# the model alone.
_running: weakref.WeakKeyDictionary[Any, IslandTraining] = weakref.WeakKeyDictionary()


class Islands(Feature):
    """Hooks for islands: separate jobs that average their weights in outer steps."""

    def job_part(self) -> JobPart | None:
        """Return the part of each batch that this island trains on.

        It is `None` if this process is not part of an island.
        """
        island = Island.from_environment()
        return None if island is None else island.part

    def before_loop(self, model: Any) -> None:
        """Make an outer step with the other islands, so that all have the same weights.

        It does nothing unless the model is in a `fit` of an island.
        """
        if (training := _running.get(model)) is not None:
            training.sync()

    def choose_callbacks(self, fit: Fit) -> None:
        """Keep file-writing callbacks on the first island only; move `DiLoCo` first.

        It changes the arguments of `fit`, and does nothing without islands.

        Raises:
            ValueError: On an island, without a tfdp strategy, or unless the callbacks
                contain exactly one `DiLoCo` and no `LocalSGD`.
        """
        if Island.from_environment() is None:
            return
        callbacks = fit.arguments["callbacks"]
        given = callback_list(callbacks)
        has_exchange = any(hasattr(callback, "trains_islands") for callback in given)
        if fit.strategy is None or not has_exchange:
            raise ValueError(
                "The workers of `tfdp run --islands` need a strategy of tfdp and the "
                "callback `tfdp.callbacks.DiLoCo`, which synchronizes the islands. Add "
                "what is missing, or remove `--islands`."
            )
        if sum(hasattr(callback, "steps_locally") for callback in given) > 1:
            raise ValueError(
                "An island needs exactly one `DiLoCo`, which exchanges for all its "
                "replicas. Remove `LocalSGD`."
            )
        if isinstance(callbacks, keras.callbacks.CallbackList):
            return
        writes = worker_group_of(fit.model).is_job_chief
        chosen = [c for c in given if writes or not isinstance(c, WRITERS)]
        # `DiLoCo` exchanges at the end of an epoch. It is called before the user's
        # other callbacks, so that checkpoints, for example, have the common weights.
        fit.arguments["callbacks"] = sorted(chosen, key=_order_of_callback)

    def after_fit(self, fit: Fit) -> None:
        """Disconnect this island from the hub if `fit` has failed."""
        if (training := _running.get(fit.model)) is not None:
            training.leave(is_through=False)


register(Islands())


def _order_of_callback(callback: Any) -> int:
    """Return a sort key of a callback, by which `DiLoCo` precedes the user's others.

    It is 0 for `OptimizerProgressCheck`, 1 for `DiLoCo` and 2 for others.
    """
    if isinstance(callback, OptimizerProgressCheck):
        return 0
    return 1 if hasattr(callback, "trains_islands") else 2


def sync_islands_after_flush(model: Any) -> None:
    """On an island, count an update of leftover accumulated batches, and sync islands.

    Without islands, or outside of `fit`, it has no effect.

    Args:
        model: Keras model.
    """
    if (training := _running.get(model)) is not None:
        training.sync_after_flush()


class OuterState(OuterStep):
    """Outer optimizer and weights of an island, and statistics averaged over islands.

    Use it on a thread outside of a strategy's scope: its variables must not be
    replicated.

    Args:
        template: Keras optimizer of the outer step, not built; it is copied.
        weights: Sequence of arrays, the trained weights.
        statistics: Sequence of arrays that are averaged, such as moving statistics.
    """

    def __init__(
        self, template: Any, weights: Sequence[Array], statistics: Sequence[Array]
    ) -> None:
        with tf.device("CPU:0"):
            super().__init__(template, [keras.Variable(array) for array in weights])
        self.statistics = list(statistics)

    @property
    def weights(self) -> list[Array]:
        """List of arrays, the outer weights."""
        return _values_of(self.anchors)

    @property
    def arrays(self) -> list[Array]:
        """List of arrays: the optimizer's variables, outer weights and statistics."""
        return [*_values_of(self.carried), *self.statistics]

    def step(self, mean: Sequence[Array]) -> None:
        """Make an outer step from the mean over all islands.

        Args:
            mean: Sequence of arrays, mean pseudo-gradients followed by mean statistics.
        """
        count = len(self.anchors)
        with tf.device("CPU:0"):
            gradients = [tf.convert_to_tensor(array) for array in mean[:count]]
            self.update(range(count), gradients)
        self.statistics = list(mean[count:])

    def take(self, reply: Reply) -> None:
        """Adopt the state in a reply of the hub, and make the outer steps after it.

        Args:
            reply: `Reply` with a state, and the mean for each of these steps.

        Raises:
            ValueError: If the shapes are those of another model.
        """
        variables, state = self.carried, reply.state
        shapes = [tuple(v.shape) for v in variables]
        shapes += [array.shape for array in self.statistics]
        if [array.shape for array in state] != shapes:
            raise ValueError(
                "The islands do not fit together: their models, or outer optimizers, "
                "differ in shapes. Start all with the same script."
            )
        for variable, array in zip(variables, state, strict=False):
            variable.assign(array)
        self.statistics = list(state[len(variables) :])
        for mean in reply.means:
            self.step(mean)


class IslandTraining:
    """DiLoCo on one island; exchanges run on a thread, concurrently with the steps.

    Args:
        model: Keras model.
        options: `LocalStepsOptions` with an outer step.
        settings: Dict, JSON-serializable, which must be the same on all islands.
        island: `Island` that trains in this process.

    Raises:
        ValueError: If islands do not support the options.

    Source: Douillard et al. 2023, https://arxiv.org/abs/2311.08105.
    """

    # Number of this `fit`, set by `begin_fit`: islands exchange in calls of `fit` that
    # have the same number.
    _fit: int
    # Outer state, set by `join`. Pseudo-gradients are its weights minus the model's. An
    # exchange changes it on another thread.
    _state: OuterState

    def __init__(
        self,
        model: Any,
        options: LocalStepsOptions,
        settings: dict[str, Any],
        island: Island,
    ) -> None:
        self._model = model
        self._options = options
        self._outer_options = _checked_outer(options, island)
        self._settings = settings
        self._island = island
        self._owner = Owner()
        self._client: HubClient | None = None
        self._version = 0
        self._batches = 0
        # Number of updates since pseudo-gradients were last sent: the weight of this
        # island in the next mean.
        self._new_updates = 0
        # Value of `_updates` when pseudo-gradients were last sent: the delay of an
        # exchange is counted from it. `sync` resets this value and `_updates` to 0.
        self._sent_at = 0
        self._exchange: Future[bool] | None = None
        self.staleness = self.participants = 0

    @property
    def _updates(self) -> int:
        """Int, updates since the last `sync`, computed from the number of batches."""
        return self._batches // batches_per_update(self._model.optimizer)

    def begin_fit(self) -> None:
        """Count this call of `fit`: islands exchange in calls with the same number."""
        user_code.check_process_of_tensorflow("`fit`")
        self._fit = next(_fit_numbers)

    def join(self) -> None:
        """Join the other islands at the first call, and adopt the common weights."""
        if self._client is not None:
            return
        _running[self._model] = self
        weights, statistics = self._weights(), self._statistics()
        updates = int(self._model.optimizer.iterations.numpy())

        def connect() -> None:
            """Create the `OuterState`, and connect to the hub; runs on a thread."""
            template = self._outer_options.optimizer
            self._state = OuterState(template, weights, statistics)
            self._connect(updates)

        run_on_thread(_THREAD, connect).result()
        self._assign(self._state.weights)

    def _connect(self, updates: int) -> None:
        """Connect to the hub, and adopt the common state; runs on a thread.

        Args:
            updates: Int, updates that this island has made before.
        """
        self._client = HubClient(self._island, self._fit)
        reply = self._client.join(self._settings, self._state.arrays, updates)
        self._version = reply.version
        self._state.take(reply)

    def end_batches(self, count: int) -> None:
        """Count batches; start an exchange, or apply its result, when that is due.

        An exchange starts every `sync_every` updates. Its result is applied `delay`
        updates later.

        Args:
            count: Int, batches since the last call.
        """
        before = self._updates
        self._batches += count
        self._new_updates += self._updates - before
        delay, every = self._options.delay, self._options.sync_every
        is_due = self._updates // every > before // every
        if is_due or self._updates - self._sent_at >= delay:
            self._finish(self._outer_options.mixing)
        if is_due:
            self._launch()
            if not delay:
                self._finish(0.0)

    def sync(self) -> None:
        """Exchange pseudo-gradients at once, and continue from the common weights.

        Called at the end of an epoch and before an evaluation. The next exchange is due
        `sync_every` updates later.
        """
        # Without local updates since the exchange was sent, the island has nothing to
        # keep by mixing, and adopts the common weights.
        self._finish(self._outer_options.mixing if self._new_updates else 0.0)
        if self._new_updates:
            self._launch()
            self._finish(0.0)
        self._batches %= batches_per_update(self._model.optimizer)
        self._sent_at = 0

    def sync_after_flush(self) -> None:
        """Count an update made of leftover accumulated batches, and exchange at once.

        Called through `sync_islands_after_flush`, after this update, by the callback
        `GradientAccumulation(flush="epoch")`.
        """
        self._new_updates += 1
        self._batches -= self._batches % batches_per_update(self._model.optimizer)
        self.sync()

    def leave(self, *, is_through: bool = True) -> None:
        """Disconnect from the hub: the other islands no longer wait for this island.

        Args:
            is_through: Bool, whether its `fit` has finished. If not, the hub expects
                that this island may join again. Defaults to `True`.
        """
        _running.pop(self._model, None)
        if self._client is not None and self._owner.is_current:
            self._client.close(is_through=is_through)

    def _launch(self) -> None:
        """Start an exchange of pseudo-gradients and statistics on a thread."""
        pairs = zip(self._state.weights, self._weights(), strict=True)
        arrays = [before - now for before, now in pairs]
        samples = float(self._new_updates)
        self._new_updates, self._sent_at = 0, self._updates
        arrays += self._statistics()
        updates = int(self._model.optimizer.iterations.numpy())
        self._exchange = run_on_thread(
            _THREAD, self._run_exchange, samples, arrays, updates
        )

    def _run_exchange(self, samples: float, arrays: list[Array], updates: int) -> bool:
        """Exchange pseudo-gradients with the other islands, and make the outer step.

        Runs on a thread. An island that has missed exchanges, or has lost its
        connection to the hub, adopts the common state instead.

        Args:
            samples: Float, number of updates since the last exchange, which is the
                weight of this island in the mean.
            arrays: List of arrays, pseudo-gradients followed by statistics.
            updates: Int, updates that this island has made in all, sent if it has to
                join again.

        Returns:
            Bool, whether the island was behind, and has adopted the common state.
        """
        client, state = self._client, self._state
        assert client is not None
        try:
            reply = client.exchange(self._version, samples, arrays)
        # The hub may have dropped this island because it was silent for too long, or
        # the network may have failed, so the island connects again.
        except HubLost:
            client.close()
            self._connect(updates)
            return True
        if reply.is_behind:
            state.take(reply)
        else:
            state.step(reply.mean)
            self.participants = reply.participants
        self._version = reply.version
        if reply.keeps:
            # A lost connection is ignored here, since the next exchange connects again.
            with contextlib.suppress(HubLost):
                client.keep(reply.version, state.arrays)
        return reply.is_behind

    def _finish(self, mixing: float) -> None:
        """Wait for the running exchange, if any, and set the weights by its result.

        They become a mix of the common and the local weights.

        Args:
            mixing: Float, the fraction of the local weights that is kept. If this
                island was behind, none are kept.
        """
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if wait([exchange], _WARN_AFTER_SECONDS).not_done:
            say(
                f"island {self._island.index} has waited for "
                f"{_WARN_AFTER_SECONDS:g} s for the others in an exchange of `DiLoCo`; "
                "with `min_participants` it would continue without those that are "
                "late."
            )
        was_behind = exchange.result()
        # An island that was behind adopts the common weights, and loses its local
        # updates, which must not count in the next mean.
        if was_behind:
            self._new_updates = 0
        self.staleness = max(self.staleness, self._updates - self._sent_at)
        weights = self._state.weights
        if mixing and not was_behind:
            weights = [
                mixing * local + (1.0 - mixing) * common
                for local, common in zip(self._weights(), weights, strict=True)
            ]
        self._assign(weights)

    def _weights(self) -> list[Array]:
        """Return the model's trained weights, in float32 or wider."""
        return [_wide(variable) for variable in self._model.trainable_variables]

    def _statistics(self) -> list[Array]:
        """Return the values of moving statistics, in float32 or wider."""
        return [_wide(variable) for variable in self._statistic_variables()]

    def _statistic_variables(self) -> list[Any]:
        """Return the variables of moving statistics, such as of BatchNormalization.

        An exchange averages them over the islands.
        """
        return [
            variable
            for variable in self._model.variables
            if isinstance(variable.value, StatisticVariable)
        ]

    def _assign(self, weights: list[Array]) -> None:
        """Set the trained variables to `weights`, and statistics to their last mean."""
        variables = [*self._model.trainable_variables, *self._statistic_variables()]
        arrays = [*weights, *self._state.statistics]
        for variable, array in zip(variables, arrays, strict=True):
            variable.assign(array)


def _values_of(variables: Sequence[Any]) -> list[Array]:
    """Return copies of the values of variables."""
    return [np.array(variable.numpy()) for variable in variables]


def _wide(variable: Any) -> Array:
    """Return the value of a variable, with half precision widened to float32."""
    value = np.array(variable.numpy())
    return value.astype("float32") if value.dtype.itemsize < 4 else value


def _checked_outer(options: LocalStepsOptions, island: Island) -> OuterOptions:
    """Return the options of outer steps; raise if islands do not support an option."""
    outer = options.outer
    assert outer is not None
    if outer.min_participants is not None and outer.min_participants > island.count:
        raise ValueError(
            "`min_participants` must be at most the number of islands. Received: "
            f"min_participants={outer.min_participants}, "
            f"{pluralize(island.count, 'island')}"
        )
    unsupported = {
        "fragments": outer.fragments > 1,
        "compression": outer.compression is not None,
        "scale_by_staleness": outer.scales_by_staleness,
        "dynamic_steps": options.is_dynamic,
        'scope="replica"': outer.scope != "node",
    }
    if used := [f"`{name}`" for name, is_used in unsupported.items() if is_used]:
        raise ValueError(
            f"Islands do not support {', '.join(used)}: they exchange whole weights, "
            f"each at its own pace. Remove {'them' if used[1:] else 'it'}, or "
            "`--islands`."
        )
    return outer
