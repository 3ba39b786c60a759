"""Callback that tunes buckets during `fit`, with `bucket_mb="auto"`."""

from __future__ import annotations

import math
import time
from typing import Any

import keras
import numpy as np

from tfdp.features import local_steps
from tfdp.features.tuning.plan_cache import (
    KeptPlan,
    PlanChoice,
    load_plan,
    plan_key,
    store_plan,
)
from tfdp.features.tuning.proposals import Proposal, propose
from tfdp.features.tuning.tuner import (
    TrialResult,
    Tuner,
    block_steps,
    longest,
    max_trial_steps,
)
from tfdp.ground import user_code
from tfdp.ground._compat import keras_model
from tfdp.ground.base import loops
from tfdp.ground.base.feature import Feature, Fit, register
from tfdp.ground.base.param_groups import batches_per_update
from tfdp.ground.base.wrappers import is_sharded
from tfdp.ground.options import CommunicationOptions
from tfdp.ground.plans.buckets import BucketPlan
from tfdp.ground.plans.traffic import FLAT
from tfdp.ground.text import pluralize
from tfdp.training.compression.algorithm_choice import AlgorithmChoice
from tfdp.training.keras_hooks.worker_callbacks import callback_list, prepend_callback
from tfdp.training.reduction.link_measure import (
    cluster_key,
    load_or_measure_links,
    num_fit_steps,
)

# Messages name the tuning of buckets by the option that enables it.
_NAME = '`bucket_mb="auto"`'
# Least ratio of the lengths of a `fit` and of its trial, so that a trial takes at most
# half of the `fit`.
MIN_TRIALS_PER_FIT = 2


class BucketTuning(keras.callbacks.Callback):
    """Try bucket plans in the first steps of `fit`, and keep the fastest.

    A plan divides the gradients into buckets, and chooses an algorithm for each. Steps
    of a trial are ordinary training steps: a plan does not change their result. Every
    worker has the callback, and all workers switch plans before the same step.

    It implements the interface `Loop`: a `Tuner` calls its methods `propose`, `switch`
    and `agree` to try plans.

    Args:
        strategy: A tfdp strategy of several replicas.
        num_steps: Int, steps of this `fit`, or `None` if unknown; all workers use the
            first worker's.
        data: String, description of the batches, which is part of a plan's cache key.
    """

    def __init__(self, strategy: Any, num_steps: int | None, data: str) -> None:
        super().__init__()
        self._extended = strategy.extended
        self._num_steps = num_steps
        self._data = data
        self._tuner: Tuner | None = None
        self._update_steps = 1
        self._begin = 0.0
        self._last_batch = -1
        # `train_function` of each plan that was traced in a trial, so that a switch
        # back to the plan needs no new trace.
        self._functions: dict[Proposal | None, Any] = {}
        self._plan: Proposal | None = None
        # The `train_function` of the current plan. If the model has another one, a
        # callback has replaced it, and functions that were traced before are outdated.
        self._active_function: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Apply the cached bucket plan, or start a trial if `fit` is long enough.

        If neither is possible, the default plan is used, and a warning says why.
        """
        self._update_steps = update_steps(self.model)
        kept, num_steps = self._agree_on_begin()
        if reason := why_not_tunable(self.model):
            self._keep_default(reason)
        elif kept is not None:
            self._apply(kept)
            is_chief = self._extended.worker_group.is_chief
            if (
                kept.choice
                and is_chief
                and user_code.record_if_new(self._key, self._extended)
            ):
                print(
                    f"tfdp: {_NAME} begins with {kept.choice}, which an earlier `fit` "
                    f"has found {kept.gain}."
                )
        elif reason := why_too_short(num_steps, self._update_steps):
            self._keep_default(reason)
        else:
            self._apply(KeptPlan(None))
            extended = self._extended
            load_or_measure_links(
                extended.algorithm_selector,
                extended.group,
                extended.worker_group,
                str(extended.hosts),
                num_steps,
                for_plans=True,
            )
            self._tuner = Tuner(self, self._update_steps)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Restart the count of batches, which begins at 0 in each epoch.

        `on_train_batch_end` counts the steps of an execution by it.
        """
        self._last_batch = -1

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """During a trial, record the time at which an execution of steps begins.

        An execution is one call of the traced function, of one or several steps.
        """
        if self._tuner is not None:
            self._active_function = self._active_function or self.model.train_function
            self._begin = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """During a trial, time the execution that ends; end a completed trial.

        An execution is one call of the traced function, of one or several steps. Its
        logs are read first, which waits for the devices.
        """
        num_steps, self._last_batch = batch - self._last_batch, batch
        if self._tuner is None:
            return
        for value in keras.tree.flatten(logs)[:1]:
            # A step may still run when its call has returned. Reading a value of its
            # logs waits for the end of the step, so that the measured time includes it.
            np.asarray(value)
        self._tuner.step_ends(time.perf_counter() - self._begin, num_steps)
        if self._tuner.outcome is not None:
            outcome, self._tuner = self._tuner.outcome, None
            self._end(outcome)

    def on_train_end(self, logs: Any = None) -> None:
        """If the trial is not finished, return to the default plan, with a warning."""
        if self._tuner is not None:
            self.close()
            self._keep_default("`fit` ended before a plan was found")

    def close(self) -> None:
        """Abort a running trial, and drop the steps that were traced for it."""
        if self._tuner is not None:
            self._tuner = None
            self.switch(None)
        self._functions.clear()

    def propose(self, step_seconds: float) -> list[Proposal]:
        """Propose bucket plans to try in place of the default one.

        Implements `Loop.propose`; see the function `proposals.propose`.

        Args:
            step_seconds: Float, measured time of a step with the default plan.

        Returns:
            List of `Proposal`, empty if the model has no buckets.
        """
        reducer = self._extended.reducer
        trained = reducer.plans.plans_of_subsets(self.model.trainable_variables)
        plans = [plan for _, plan, _ in trained if plan.buckets]
        if not plans:
            return []
        default = max(plans, key=lambda plan: plan.num_bytes)
        selector = self._extended.algorithm_selector
        algorithms: list[str | None] = [None]
        if reducer.options.algorithm == "auto" and selector.topology.num_replicas > 2:
            algorithms += FLAT
            algorithms += ["hierarchical"] if selector.is_hierarchical else []
        return propose(default, step_seconds, algorithms, self._routes_of)

    def switch(self, proposal: Proposal | None) -> None:
        """Use a plan from the next step on; trace the step again if the plan is new.

        Args:
            proposal: `Proposal` of the plan, or `None` for the default.
        """
        if proposal == self._plan:
            return
        model = self.model
        if model.train_function is not self._active_function:
            # Another callback has replaced the model's `train_function`, so all
            # functions that were traced before are outdated.
            self._functions.clear()
        self._functions[self._plan] = model.train_function
        self._plan = proposal
        self._tune(None if proposal is None else proposal.choice)
        if proposal in self._functions:
            model.train_function = self._functions[proposal]
        else:
            model.make_train_function(force=True)
        self._active_function = model.train_function

    def agree(self, seconds: list[float]) -> list[float]:
        """Return for each plan the longest time of all workers.

        Args:
            seconds: List of floats, this worker's time of a step with each plan.
        """
        worker_group = self._extended.worker_group
        return longest(worker_group.all_gather("times of bucket plans", seconds))

    def _agree_on_begin(self) -> tuple[KeptPlan | None, int | None]:
        """Return the first worker's cached plan and number of steps, on all workers.

        Returns:
            Tuple of a `KeptPlan`, or `None` without a cached one; and an int, or `None`
            if the number of steps is unknown.
        """
        worker_group = self._extended.worker_group
        kept = load_plan(self._key) if worker_group.is_chief else None
        values = [kept and kept.to_json(), self._num_steps]
        text, num_steps = worker_group.all_gather("kept plans", values)[0]
        return (None if text is None else KeptPlan.from_json(text)), num_steps

    @property
    def _key(self) -> str:
        """String, key of this model, cluster and data in the plan cache."""
        extended, model = self._extended, self.model
        cluster = cluster_key(
            extended.algorithm_selector, extended.group, str(extended.hosts)
        )
        options = extended.options
        settings = (
            options.algorithm,
            options.first_bucket_mb,
            options.compression_levels,
            model.jit_compile,
            self._update_steps,
            self._data,
        )
        return plan_key(cluster, model.trainable_variables, settings)

    def _apply(self, kept: KeptPlan) -> None:
        """Apply a plan before the first step; trace the step again if the plan changes.

        Args:
            kept: `KeptPlan` from the cache, or that of the default.
        """
        reducer, variables = self._extended.reducer, self.model.trainable_variables
        options_before = reducer.options_of(variables)
        self._tune(kept.choice, kept.gain)
        if reducer.options_of(variables) != options_before:
            self.model.make_train_function(force=True)

    def _tune(self, choice: PlanChoice | None, gain: str = "") -> None:
        """Set the plan by which the strategy's reducer reduces the model's gradients.

        Args:
            choice: `PlanChoice`, or `None` for the default.
            gain: String, description of the speedup over the default, for messages.
                Defaults to `""`.
        """
        variables = self.model.trainable_variables
        self._extended.reducer.tune(variables, self._options_of(choice), gain)

    def _options_of(self, choice: PlanChoice | None) -> CommunicationOptions | None:
        """Return the strategy's options with a choice applied; `None` for `None`."""
        return None if choice is None else choice.options(self._extended.options)

    def _routes_of(
        self, choice: PlanChoice | None, plan: BucketPlan
    ) -> tuple[AlgorithmChoice, ...]:
        """Return the all-reduce algorithm of each bucket of a plan.

        Args:
            choice: `PlanChoice`, which may set the algorithm, or `None` for the
                default.
            plan: `BucketPlan` that follows from the choice.
        """
        selector = self._extended.algorithm_selector
        options = self._options_of(choice)
        if options is not None:
            selector = selector.with_options(options)
        return selector.select_for(plan, may_compress=True)

    def _end(self, outcome: TrialResult) -> None:
        """Apply the result of a trial; the first worker stores and prints it."""
        self._functions.clear()
        kept = KeptPlan(None)
        if outcome.winner is not None:
            kept = KeptPlan(outcome.winner.choice, str(outcome.gain))
        self._tune(kept.choice, kept.gain)
        if self._extended.worker_group.is_chief:
            store_plan(self._key, kept)
            steps = pluralize(block_steps(self._update_steps), "step")
            print(f"\ntfdp: {_NAME} {outcome.describe(steps)}.")

    def _keep_default(self, reason: str) -> None:
        """Apply the default plan; the first worker warns once, with the reason."""
        self._apply(KeptPlan(None))
        if self._extended.worker_group.is_chief:
            user_code.warn(
                f"{_NAME} stays with the default buckets: {reason}.",
                once_for=self._extended,
            )


class _Tuning(Feature):
    """Hooks of `fit` that add the callback `BucketTuning`, and close it afterwards."""

    def choose_callbacks(self, fit: Fit) -> None:
        """Add `BucketTuning` before other callbacks if the strategy tunes buckets."""
        strategy = fit.strategy
        is_nested = loops.current() is not None
        if strategy is None or strategy.num_replicas_in_sync == 1 or is_nested:
            return
        if strategy.extended.options.tunes_buckets:
            steps, data = num_fit_steps(fit.arguments), describe_batches(fit.arguments)
            tuning = BucketTuning(strategy, steps, data)
            fit.arguments["callbacks"] = prepend_callback(
                fit.model, fit.arguments["callbacks"], tuning
            )

    def after_fit(self, fit: Fit) -> None:
        """Abort a trial that an error in `fit` has interrupted."""
        for callback in callback_list(fit.arguments["callbacks"]):
            if isinstance(callback, BucketTuning):
                callback.close()


register(_Tuning())


def why_not_tunable(model: Any) -> str:
    """Return why the buckets of a model cannot be tuned, or `""` if they can.

    Args:
        model: Keras model, after its callbacks have replaced the optimizer.
    """
    optimizer: Any = model.optimizer
    if model.run_eagerly:
        return "with `run_eagerly=True` there is no traced step to try plans with"
    if is_sharded(optimizer):
        return "the layout of sharded state depends on its buckets, which cannot change"
    if local_steps.enabled(optimizer) is not None:
        return "with local steps, replicas do not communicate in each step"
    if keras_model.overridden(model, ("make_train_function",)):
        return "the model makes its own `train_function`"
    return ""


def why_too_short(num_steps: int | None, update_steps: int) -> str:
    """Return why a `fit` is too short for a trial, or `""` if it is long enough.

    Args:
        num_steps: Int, steps of `fit`, or `None` if unknown.
        update_steps: Int, steps from one update of the weights to the next, as the
            function `update_steps` returns it.

    Example:

    >>> why_too_short(30, 1)
    'a trial of other plans needs a `fit` of 1,578 steps, and this one has 30'
    """
    if num_steps is None:
        return "the number of steps of its data is unknown (set `steps_per_epoch`)"
    least = MIN_TRIALS_PER_FIT * max_trial_steps(update_steps)
    if num_steps < least:
        return (
            f"a trial of other plans needs a `fit` of {pluralize(least, 'step')}, and "
            f"this one has {num_steps:,}"
        )
    return ""


def update_steps(model: Any) -> int:
    """Return the least number of steps after which updates and executions both end.

    An update takes one step for each accumulated micro-batch, or one step without
    accumulation; an execution, a call of the traced function, takes the model's
    `steps_per_execution`. If accumulation changes by epoch, the longest update counts.

    Args:
        model: Compiled Keras model.
    """
    optimizer: Any = model.optimizer
    plan = getattr(getattr(optimizer, "features", None), "plan", None)
    if isinstance(plan, dict):
        # `plan` maps an epoch to the number of micro-batches of an update from that
        # epoch on. A trial must have whole updates in any epoch, so the largest number
        # counts.
        accumulated = max(plan.values())
    else:
        accumulated = batches_per_update(optimizer)
    return math.lcm(accumulated, model.steps_per_execution)


def describe_batches(arguments: dict[str, Any]) -> str:
    """Describe the batches of a `fit` by its arguments.

    Args:
        arguments: Dict, the arguments of `fit` by name.

    Returns:
        String, the batch size and shapes, or the element spec of a dataset.

    Example:

    >>> import numpy as np
    >>> describe_batches({"x": np.zeros([100, 3]), "batch_size": 8})
    '8 of (3,)'
    """
    x = arguments.get("x")
    spec = getattr(x, "element_spec", None)
    if spec is not None:
        return repr(spec)
    shapes = [getattr(part, "shape", None) for part in keras.tree.flatten(x)]
    rows = ", ".join(str(tuple(shape[1:])) for shape in shapes if shape)
    return f"{arguments.get('batch_size')} of {rows}"
