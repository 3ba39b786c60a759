"""The feature of `fit`: synchronization of replicas, and steps that are skipped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tfdp.features.local_steps.local_steps import OUTER_PREFIX, active
from tfdp.ground.base.context import strategy_of
from tfdp.ground.base.feature import Feature
from tfdp.training.replicas.variables import StatisticVariable


class LocalStepsFeature(Feature):
    """Hooks of local steps in Keras's loops.

    Before workers synchronize, exchanges with `min_participants` are paused, and
    replicas get the same weights, slots and statistics. In `fit` slow workers may skip
    steps, and workers synchronize only as often as they exchange.
    """

    def before_sync(self, model: Any) -> None:
        """Pause exchanges with `min_participants`, before all workers synchronize.

        This worker ends its running exchange and joins no other until the workers have
        synchronized, so that exchanges of late workers do not wait for it.
        """
        if (local_steps := active(model)) is not None:
            local_steps.before_sync()

    before_loop = before_sync

    def equalize_replicas(self, model: Any) -> None:
        """Average weights, slots and moving statistics over the replicas of a model.

        Without it each replica would evaluate and save its own weights and statistics.
        Averaging moving statistics once gives the same values as averaging them in each
        step, since a step changes them linearly.
        """
        equalize = getattr(getattr(model, "optimizer", None), "equalize_replicas", None)
        if equalize is not None:
            equalize()
        strategy = strategy_of(model)
        if strategy is not None and active(model) is not None:
            values = [variable.value for variable in model.variables]
            strategy.extended.average(
                [value for value in values if isinstance(value, StatisticVariable)]
            )

    def wrap_step(self, model: Any, step: Callable) -> Callable:
        """Return a function like `step` that skips some steps, with `dynamic_steps`."""

        @functools.wraps(step)
        def paced(iterator: Any) -> Any:
            """Run the step, or skip it by the pace of this worker; return logs.

            Batches of a skipped step are taken from the iterator and dropped; the logs
            of the last step that was made are returned.
            """
            local_steps = active(model)
            if local_steps is None or local_steps.pace is None:
                return step(iterator)
            return local_steps.pace.step(model, step, iterator)

        return paced

    def optional_tensors(self) -> dict[str, str]:
        """Return which tensors of a checkpoint a model need not restore.

        These are the outer optimizer's, since the model may not use `DiLoCo`.

        Returns:
            Dict from the prefix of the names of these tensors to the text of a warning
            that they were not restored.
        """
        return {
            OUTER_PREFIX: "The outer optimizer of `DiLoCo` in the checkpoint was not "
            "restored: the model does not use `DiLoCo`."
        }

    def batches_between_syncs(
        self, model: Any, *, is_delayed: bool = True
    ) -> int | None:
        """Return the largest number of batches between synchronizations of workers.

        Args:
            model: Keras model in `fit`.
            is_delayed: Bool, whether delayed exchanges, which run during the steps, do
                not count as synchronizations. Defaults to `True`.

        Returns:
            Int, 1 without local steps; or `None` if workers do not synchronize within
            an epoch, such as with `min_participants`.
        """
        local_steps = active(model)
        if local_steps is None:
            return 1
        options, outer = local_steps.options, local_steps.options.outer
        if options.delay and (is_delayed or (outer and outer.min_participants)):
            return None
        return options.sync_every * model.optimizer.accumulation_steps
