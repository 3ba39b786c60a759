"""The steps of `fit` that two replicas compute, repeated where bits differ."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.communication.collectives import timing
from tfdp.communication.coordination.progress import progress
from tfdp.communication.coordination.watch import WorkerLost
from tfdp.features.replay.checked_step import CheckedStep
from tfdp.features.replay.suspects import ReplayDigests, suspects
from tfdp.ground.base.feature import Feature, Fit, register
from tfdp.ground.base.wrappers import sharding_of
from tfdp.ground.text import pluralize
from tfdp.training.keras_hooks.worker_callbacks import callback_list
from tfdp.training.replicas.drift import replica_names
from tfdp.training.step.step import active

_log = logging.getLogger("tfdp")
# Passes of TensorFlow's graph optimizer, all on by default, that replay switches off:
# they replace operations by others, which may round differently.
_REWRITES = (
    "arithmetic_optimization",
    "common_subgraph_elimination",
    "constant_folding",
    "layout_optimizer",
    "loop_optimization",
    "remapping",
    "shape_optimization",
)


class ReplayedSteps:
    """Runs the steps of a `fit`, some of them replayed: two replicas compute each row.

    Args:
        strategy: A tfdp strategy of several replicas.
        model: Keras model.
        fraction: Float in (0, 1], fraction of steps that are replayed.
    """

    def __init__(self, strategy: Any, model: Any, fraction: float) -> None:
        self._strategy, self._model = strategy, model
        self._period = round(1 / fraction)
        self._checked = CheckedStep(strategy)
        self._num_steps = 0
        # Seconds of each step without a replay, and of each one with a replay, from
        # which `cost` estimates the extra time. The first step, which was traced, is
        # left out.
        self._usual: list[float] = []
        self._replayed: list[float] = []
        self._num_replayed = 0
        self._functions: dict[bool, Callable] = {}
        self._is_making = False
        self._read = tf.function(lambda iterator: iterator.get_next(), autograph=False)

    def wrap(self, step: Callable) -> Callable:
        """Return a function that runs `step`, and replays a fraction of its calls."""
        if self._is_making:
            return step
        self._functions.clear()

        @functools.wraps(step)
        def replaying(data: Any) -> Any:
            """Run or replay a step on an iterator of batches, and return its logs."""
            begin = time.monotonic()
            before, self._num_steps = self._num_steps, self._num_steps + 1
            is_due = self._num_steps % self._period == 0
            logs = self._replay(step, data) if is_due else step(data)
            if before:
                times = self._replayed if is_due else self._usual
                times.append(time.monotonic() - begin)
            return logs

        return replaying

    def _replay(self, step: Callable, data: Any) -> Any:
        """Have two replicas compute each row of a step; repeat it once if bits differ.

        Args:
            step: Callable, the step without a replay; called if the data has ended.
            data: Iterator of batches.

        Returns:
            The logs of the step.

        Raises:
            WorkerLost: On all workers, to continue without the one that is wrong.
            RuntimeError: On all workers, if bits differ again.
        """
        try:
            batch = self._read(data)
        except tf.errors.OutOfRangeError:
            # The data has ended: the step raises the same error, which ends the epoch.
            return step(data)
        self._num_replayed += 1
        rounds: list[ReplayDigests] = []
        while len(rounds) < 2:
            self._run(batch, is_stand_in=True)
            logs = self._run(batch, is_stand_in=False)
            # The digests were all-gathered: all workers read the same ones, and repeat
            # the step together.
            rounds.append(ReplayDigests(*self._checked.read()))
            if rounds[-1].is_right:
                break
        if len(rounds) == 2:
            self._report(rounds)
        return logs

    def _run(self, batch: Any, *, is_stand_in: bool) -> Any:
        """Run a step, record its digests in the `CheckedStep`, and return its logs.

        Args:
            batch: The batch of the step, an element of the data of `fit`.
            is_stand_in: Bool, whether each replica computes the rows of the next one;
                the step then makes no update. Otherwise it computes its own rows.
        """
        if is_stand_in not in self._functions:
            self._functions[is_stand_in] = self._make_function()
        self._checked.is_stand_in = is_stand_in
        with contextlib.ExitStack() as stack:
            if is_stand_in:
                stack.enter_context(active.suspended())
                stack.enter_context(timing.recorders.suspended())
            stack.enter_context(_activated(self._checked))
            stack.enter_context(_unoptimized())
            return self._functions[is_stand_in]([batch])

    def _make_function(self) -> Callable:
        """Return a new `train_function`, not traced yet; the model keeps its own."""
        model, usual = self._model, self._model.train_function
        self._is_making = True
        try:
            model.make_train_function(force=True)
            return model.train_function
        finally:
            self._is_making = False
            model.train_function = usual

    def _report(self, rounds: list[ReplayDigests]) -> None:
        """Report the replicas that differ in a step and maybe in its repetition.

        If the repetition is right, the report is a warning in the log, else an error.

        Args:
            rounds: List of two `ReplayDigests`, of the step and of its repetition.

        Raises:
            WorkerLost: On all workers, if they differ again, only one worker can be
                wrong, and the job can continue without it.
            RuntimeError: On all workers, if they differ again otherwise.
        """
        extended, ranks = self._strategy.extended, suspects(rounds)
        names = replica_names(self._strategy)
        what = (
            "computed other bits from the same rows than another replica"
            if any(round_.pairs[1] for round_ in rounds)
            else "received another sum of gradients than the other replicas"
        )
        with progress.computing():
            place = progress.current.name
        named = " or ".join(names[rank] for rank in ranks)
        text = f"In {place}, {named} {what}"
        if rounds[-1].is_right:
            _log.warning(
                "tfdp: %s. The step was made again before its update, and now all bits "
                "agree.",
                text,
            )
            return
        workers = {rank // extended.num_local for rank in ranks}
        text += ", also when the step was made again; no weight was changed."
        if len(workers) == 1 and extended.continues_after_loss:
            text = f"{text} Its worker is left out."
            _log.warning("tfdp: %s", text)
            raise WorkerLost(text, workers.pop())
        raise RuntimeError(
            f"{text} Replace its host, and continue from the last checkpoint. If it "
            "comes on other hosts, too, the model's operations are not deterministic: "
            "call `tf.config.experimental.enable_op_determinism()`."
        )

    def cost(self) -> str:
        """Return a text: the number of replayed steps, and the share of time they cost.

        The share is left out while too few steps were timed.
        """
        count = f"{self._num_replayed:,} of {pluralize(self._num_steps, 'step')}"
        if not self._usual or len(self._replayed) < 2:
            return f"replayed {count}"
        usual = float(np.median(self._usual))
        extra = (float(np.median(self._replayed[1:])) - usual) * self._num_replayed
        share = max(extra, 0.0) / (usual * self._num_steps + max(extra, 0.0))
        return f"replayed {count}, in {share:.1%} of the time".replace("%", " %")


def check_replay(strategy: Any, model: Any) -> None:
    """Raise if the steps of a model cannot be replayed.

    Args:
        strategy: The model's tfdp strategy, or `None`.
        model: Keras model.

    Raises:
        ValueError: If a setting excludes replays; the text names it.
    """
    features = getattr(model.optimizer, "features", None)
    problems = {
        "one replica, so that no other one can compute the same rows": (
            strategy is None or strategy.num_replicas_in_sync == 1
        ),
        "`run_eagerly=True`": model.run_eagerly,
        "`jit_compile=True`": model.jit_compile,
        f"steps_per_execution={model.steps_per_execution}": (
            model.steps_per_execution > 1
        ),
        '`sharding="parameters"`': sharding_of(model.optimizer).shards_parameters,
        '`GradientAccumulation(steps="auto")`': (
            features is not None and features.divider_of_rows is not None
        ),
    }
    for problem, is_present in problems.items():
        if is_present:
            raise ValueError(
                "`ConsistencyCheck(replay=...)` has two replicas compute the same "
                f"step. Received: {problem}. Remove `replay`, or the other setting."
            )


@contextlib.contextmanager
def _activated(checked: CheckedStep) -> Iterator[None]:
    """Activate the hooks of `checked` for steps traced in this `with` block."""
    active.activate(checked)
    try:
        yield
    finally:
        active.deactivate(checked)


@contextlib.contextmanager
def _unoptimized() -> Iterator[None]:
    """Switch off the rewrites of graphs in `_REWRITES` in this `with` block.

    Functions then run the operations that were traced. A stand-in makes no update, so
    TensorFlow would optimize its graph in another way, and other kernels round in
    another way: those around `BatchNormalization` did. The options hold for the whole
    process.
    """
    options = tf.config.optimizer.get_experimental_options()
    before = {name: options.get(name, True) for name in _REWRITES}
    tf.config.optimizer.set_experimental_options(dict.fromkeys(_REWRITES, False))
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options(before)


class Replays(Feature):
    """Replays steps of a `fit` with the callback `ConsistencyCheck(replay=...)`."""

    def __init__(self) -> None:
        self.of_model: weakref.WeakKeyDictionary[Any, ReplayedSteps]
        self.of_model = weakref.WeakKeyDictionary()

    def choose_callbacks(self, fit: Fit) -> None:
        """Set up `ReplayedSteps` if a callback of this `fit` has a `replay` fraction.

        Implements `Feature.choose_callbacks`, which is called before each `fit`, but
        changes no callback. The largest fraction is used, and the step traced again.
        """
        callbacks = callback_list(fit.arguments.get("callbacks"))
        found = [c.replay for c in callbacks if getattr(c, "can_replay", False)]
        fractions = [fraction for fraction in found if fraction is not None]
        if fractions and fit.strategy and fit.strategy.num_replicas_in_sync > 1:
            self.of_model[fit.model] = ReplayedSteps(
                fit.strategy, fit.model, max(fractions)
            )
            fit.model.train_function = None

    def wrap_step(self, model: Any, step: Callable) -> Callable:
        """Return the step with replays if this `fit` has them, else `step` itself."""
        replays = self.of_model.get(model)
        return step if replays is None else replays.wrap(step)

    def after_fit(self, fit: Fit) -> None:
        """Drop this `fit`'s `ReplayedSteps`, so that later steps are not replayed."""
        if self.of_model.pop(fit.model, None) is not None:
            fit.model.train_function = None


REPLAYS = Replays()
register(REPLAYS)
