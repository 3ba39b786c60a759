"""Local steps in a loop of Keras's: when the replicas meet, and what is made alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdp.features.local_steps.pace import paced
from tfdp.ground.base.context import strategy_of
from tfdp.ground.base.feature import Feature
from tfdp.ground.base.loops import steps_alone
from tfdp.training.replicas.variables import StatisticVariable


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
        return paced(model, step)

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
        options = model.optimizer.features.local_options
        if options.delay and (is_delayed or options.outer.min_participants is not None):
            return None
        return options.sync_every * model.optimizer.accumulation_steps
