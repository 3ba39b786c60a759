"""Exchanges of an island while it trains, and what all islands have in common."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp.communication.cluster.islands import Island
from tfdp.communication.transport.communicator import Array
from tfdp.communication.transport.rounds import Reply
from tfdp.features.islands.member import HubGone, Member
from tfdp.features.local_steps import LocalStepsOptions
from tfdp.ground import user_code
from tfdp.ground.base.feature import Feature, Fit, register
from tfdp.ground.forks import Owner
from tfdp.ground.text import pluralize
from tfdp.training.keras_hooks.added_callbacks import OptimizerProgressCheck
from tfdp.training.keras_hooks.worker_callbacks import WRITERS, callback_list
from tfdp.training.replicas.variables import StatisticVariable

_WARN_AFTER_SECONDS = 30.0
# Of a process that trains several times.
_fits = itertools.count()
# Those that train at the moment, by model.
_running: weakref.WeakKeyDictionary[Any, IslandTraining] = weakref.WeakKeyDictionary()


class Islands(Feature):
    """Islands that meet in outer steps only, see `tfdp.features.islands`."""

    def before_loop(self, model: Any) -> None:
        """Continue from what all islands have in common, before an evaluation."""
        if (training := _running.get(model)) is not None:
            training.meet()

    def choose_callbacks(self, fit: Fit) -> None:
        """Keep those that write files on the first island only; `DiLoCo` comes first.

        Raises:
            ValueError: If nothing would bring the islands together, or several
                callbacks.
        """
        if Island.from_environment() is None:
            return
        callbacks = fit.arguments["callbacks"]
        given = callback_list(callbacks)
        is_met = any(hasattr(callback, "trains_islands") for callback in given)
        if fit.strategy is None or not is_met:
            raise ValueError(
                "The workers of `tfdp run --islands` train with a strategy of tfdp and "
                "`tfdp.callbacks.DiLoCo`, which brings them together. Add what is "
                "missing, or leave out `--islands`."
            )
        if sum(hasattr(callback, "steps_locally") for callback in given) > 1:
            raise ValueError(
                "An island trains by one `DiLoCo`, whose exchanges are of all its "
                "replicas. Leave out `LocalSGD`, and a second `DiLoCo`."
            )
        if isinstance(callbacks, keras.callbacks.CallbackList):
            return
        writes = fit.strategy.extended.worker_group.is_job_chief
        chosen = [c for c in given if writes or not isinstance(c, WRITERS)]
        # At the end of an epoch the others see the weights that all have in common.
        fit.arguments["callbacks"] = sorted(chosen, key=_place)

    def after_fit(self, fit: Fit) -> None:
        """Leave the other islands, where `fit` has not done so: it failed."""
        if (training := _running.get(fit.model)) is not None:
            training.end(is_through=False)


register(Islands())


def _place(callback: Any) -> int:
    if isinstance(callback, OptimizerProgressCheck):
        return 0
    return 1 if hasattr(callback, "trains_islands") else 2


def meet_islands_after_flush(model: Any) -> None:
    """Exchange an update of the batches that were left over, where islands train.

    Args:
        model: Keras model.
    """
    if (training := _running.get(model)) is not None:
        training.flushed()


class OuterState:
    """Weights after the last exchange, statistics beside them, and the outer optimizer.

    To be used on a thread without a strategy's scope: these variables are no replica's.

    Args:
        template: Keras optimizer of the outer step, not built.
        weights: Sequence of arrays, the trained weights.
        statistics: Sequence of arrays that are averaged, such as moving statistics.
    """

    def __init__(
        self, template: Any, weights: Sequence[Array], statistics: Sequence[Array]
    ) -> None:
        self._optimizer = type(template).from_config(template.get_config())
        with tf.device("CPU:0"):
            self._anchors = [keras.Variable(array) for array in weights]
            self._optimizer.build(self._anchors)
        self.statistics = list(statistics)

    @property
    def weights(self) -> list[Array]:
        """List of arrays, the trained weights."""
        return [np.array(anchor.numpy()) for anchor in self._anchors]

    @property
    def arrays(self) -> list[Array]:
        """List of arrays, the whole state."""
        slots = [np.array(variable.numpy()) for variable in self._optimizer.variables]
        return [*slots, *self.weights, *self.statistics]

    def step(self, mean: Sequence[Array]) -> None:
        """Make an outer step.

        Args:
            mean: Sequence of arrays, the mean pseudo-gradients, and then the mean
                statistics.
        """
        count = len(self._anchors)
        gradients = [tf.convert_to_tensor(array) for array in mean[:count]]
        with tf.device("CPU:0"):
            self._optimizer.apply(gradients, self._anchors)
        self.statistics = list(mean[count:])

    def take(self, reply: Reply) -> None:
        """Take a state, and make the outer steps since.

        Args:
            reply: `Reply` with a state.

        Raises:
            ValueError: If it is the state of another model.
        """
        variables = [*self._optimizer.variables, *self._anchors]
        state = reply.state
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
    """An island's part of DiLoCo: what it has learned travels beside its steps.

    Args:
        model: Keras model.
        options: `LocalStepsOptions` with an outer step.
        settings: Dict that JSON can hold, which all islands have to share.
        island: `Island`.

    Raises:
        ValueError: If the options have what islands cannot do.

    Source: Douillard et al. 2023, https://arxiv.org/abs/2311.08105.
    """

    def __init__(
        self,
        model: Any,
        options: LocalStepsOptions,
        settings: dict[str, Any],
        island: Island,
    ) -> None:
        _check(options, island)
        assert options.outer is not None
        self._model = model
        self._options = options
        self._outer_options = options.outer
        self._settings = settings
        self._island = island
        self._fit = 0
        self._owner = Owner()
        self._member: Member | None = None
        self._state: OuterState | None = None
        self._version = 0
        # What the weights were after the last exchange.
        self._common: list[Array] = []
        self._batches = 0
        # Updates since what is learned was sent last; and when that was, if its
        # exchange is under way.
        self._learned = 0
        self._sent_at = 0
        self._exchange: Future[Any] | None = None
        self.staleness = self.participants = 0

    @property
    def _updates(self) -> int:
        return self._batches // _micro_batches(self._model.optimizer)

    def fit_begins(self) -> None:
        """Count this `fit`, also if nothing is left of it to train."""
        user_code.check_process_of_tensorflow("`fit`")
        self._fit = next(_fits)

    def begin(self) -> None:
        """Join the others, once, and go on from what all have in common."""
        if self._member is not None:
            return
        _running[self._model] = self
        weights, statistics = self._weights(), self._statistics()
        updates = int(self._model.optimizer.iterations.numpy())

        def join() -> None:
            template = self._outer_options.optimizer
            self._state = OuterState(template, weights, statistics)
            self._join(updates)

        _task(join).result()
        assert self._state is not None
        self._common = self._state.weights
        self._assign(self._common, self._state.statistics)

    def _join(self, updates: int) -> None:
        """Connect to the hub, and take what all have in common; on a thread."""
        assert self._state is not None
        settings = {
            **self._settings,
            "least": self._outer_options.min_participants,
            "patience_seconds": self._outer_options.patience_seconds,
        }
        self._member = Member(self._island, self._fit)
        reply = self._member.join(settings, self._state.arrays, updates)
        self._version = reply.version
        self._state.take(reply)

    def batches_end(self, count: int) -> None:
        """Send what was learned when it is time, and use what has come.

        Args:
            count: Int, batches of this execution.
        """
        before = self._updates
        self._batches += count
        self._learned += self._updates - before
        delay, every = self._options.delay, self._options.sync_every
        is_due = self._updates // every > before // every
        is_over = is_due or self._updates - self._sent_at >= delay
        if self._exchange is not None and is_over:
            self._finish(self._outer_options.mixing)
        if is_due:
            self._launch()
            if not delay:
                self._finish(0.0)

    def meet(self) -> None:
        """Go on from what all have in common: the end of an epoch, or an evaluation.

        The next exchange is due after as many updates as at the beginning.
        """
        if self._exchange is not None:
            # Nothing of its own is left to an island that has learned nothing since.
            self._finish(self._outer_options.mixing if self._learned else 0.0)
        if self._learned:
            self._launch()
            self._finish(0.0)
        self._batches %= _micro_batches(self._model.optimizer)
        self._sent_at = 0

    def flushed(self) -> None:
        """Count an update of the batches that were left over, and meet."""
        self._learned += 1
        self._batches -= self._batches % _micro_batches(self._model.optimizer)
        self.meet()

    def end(self, *, is_through: bool = True) -> None:
        """Leave the others; they do not wait for this island any more.

        Args:
            is_through: Bool, whether it has come to the end of its `fit`. Defaults to
                `True`.
        """
        _running.pop(self._model, None)
        if self._member is not None and self._owner.is_current:
            self._member.close(is_through=is_through)

    def _launch(self) -> None:
        own = zip(self._common, self._weights(), strict=True)
        arrays = [before - now for before, now in own]
        samples = float(self._learned)
        self._learned, self._sent_at = 0, self._updates
        arrays += self._statistics()
        updates = int(self._model.optimizer.iterations.numpy())
        self._exchange = _task(lambda: self._exchanged(samples, arrays, updates))

    def _exchanged(self, samples: float, arrays: list[Array], updates: int) -> bool:
        """Exchange, on a thread; returns whether this island was behind."""
        member, state = self._member, self._state
        assert member is not None
        assert state is not None
        try:
            reply = member.exchange(self._version, samples, arrays)
        except HubGone:  # which had heard nothing for too long; or the network had
            member.close()
            self._join(updates)
            return True
        if reply.is_behind:
            state.take(reply)
        else:
            state.step(reply.mean)
            self.participants = reply.participants
        self._version = reply.version
        if reply.keeps:
            with contextlib.suppress(HubGone):  # the next exchange joins again
                member.keep(reply.version, state.arrays)
        return reply.is_behind

    def _finish(self, mixing: float) -> None:
        """Take the common weights, but for a part of what was learned meanwhile."""
        assert self._exchange is not None
        assert self._state is not None
        exchange, self._exchange = self._exchange, None
        if wait([exchange], _WARN_AFTER_SECONDS).not_done:
            print(
                f"tfdp: island {self._island.index} has waited for "
                f"{_WARN_AFTER_SECONDS:g} s for the others in an exchange of `DiLoCo`; "
                "with `min_participants` it would go on without those that are late.",
                file=sys.stderr,
                flush=True,
            )
        was_behind = exchange.result()
        if was_behind:
            self._learned = 0  # which it goes on without
        self.staleness = max(self.staleness, self._updates - self._sent_at)
        weights = self._common = self._state.weights
        if mixing and not was_behind:
            weights = [
                mixing * own + (1.0 - mixing) * common
                for own, common in zip(self._weights(), self._common, strict=True)
            ]
        self._assign(weights, self._state.statistics)

    def _weights(self) -> list[Array]:
        """What the model has: float32, or wider where it is."""
        return [_wide(variable) for variable in self._model.trainable_variables]

    def _statistics(self) -> list[Array]:
        return [_wide(variable) for variable in self._averaged()]

    def _averaged(self) -> list[Any]:
        return [
            variable
            for variable in self._model.variables
            if isinstance(variable.value, StatisticVariable)
        ]

    def _assign(self, weights: list[Array], statistics: list[Array]) -> None:
        variables = [*self._model.trainable_variables, *self._averaged()]
        for variable, array in zip(variables, [*weights, *statistics], strict=True):
            variable.assign(array)


def _task(function: Callable[[], Any]) -> Future[Any]:
    """Run a function on a thread of its own, which does not outlive the process."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001  it is raised by `result`
            future.set_exception(error)

    threading.Thread(target=run, name="tfdp island", daemon=True).start()
    return future


def _wide(variable: Any) -> Array:
    value = np.array(variable.numpy())
    return value.astype("float32") if value.dtype.itemsize < 4 else value


def _micro_batches(optimizer: Any) -> int:
    own = getattr(optimizer, "accumulation_steps", None)
    return own or getattr(optimizer, "gradient_accumulation_steps", None) or 1


def _check(options: LocalStepsOptions, island: Island) -> None:
    outer = options.outer
    assert outer is not None
    if outer.min_participants is not None and outer.min_participants > island.count:
        raise ValueError(
            "`min_participants` must be at most the number of islands. Received: "
            f"min_participants={outer.min_participants}, "
            f"{pluralize(island.count, 'island')}"
        )
    others = {
        "fragments": outer.fragments > 1,
        "compression": outer.compression is not None,
        "scale_by_staleness": outer.scales_by_staleness,
        "dynamic_steps": options.is_dynamic,
        'scope="replica"': outer.scope != "node",
    }
    if found := [f"`{name}`" for name, is_used in others.items() if is_used]:
        raise ValueError(
            "Islands exchange whole weights as they are, each at its own pace. Leave "
            f"out {', '.join(found)}, or `--islands`."
        )
