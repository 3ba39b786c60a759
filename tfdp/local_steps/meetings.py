"""When the replicas of a model meet that train alone, and what they then make alike."""

from __future__ import annotations

from typing import Any

from tfdp.base.context import strategy_of
from tfdp.base.loops import steps_alone
from tfdp.replicas.variables import StatisticVariable


def go_to_meeting(model: Any) -> None:
    """Tell workers that are late that this one waits for them, and they not for it.

    Before anything in which all workers of a model take part.

    Args:
        model: Keras model. Without local steps nothing is done.
    """
    if steps_alone(model):
        optimizer: Any = model.optimizer
        local_steps = optimizer.features.local_steps
        if local_steps is not None:
            local_steps.rest()


def average_replicas_of(model: Any) -> None:
    """Average what the replicas of a model have learned alone; on all workers.

    After local steps every replica would evaluate and save its own weights, and the
    moving statistics of its own batches. Averages of these are what averages in every
    step would have led to, since each step moves them by a fraction of its batch's.

    Args:
        model: Keras model. Without local steps nothing is done.
    """
    average = getattr(getattr(model, "optimizer", None), "average_replicas", None)
    if average is not None:
        average()
    strategy = strategy_of(model)
    if strategy is not None and steps_alone(model):
        strategy.extended.average(
            [v.value for v in model.variables if isinstance(v.value, StatisticVariable)]
        )


def batches_between_meetings(model: Any, *, is_delayed: bool = True) -> int | None:
    """Return after how many batches the workers meet at the latest.

    Args:
        model: Keras model in `fit`.
        is_delayed: Bool, whether exchanges that run beside the steps are no meetings.
            Defaults to `True`.

    Returns:
        Int, 1 without local steps; or `None` if they do not within an epoch, as where
        nobody waits for a worker that is late.
    """
    if not steps_alone(model):
        return 1
    optimizer: Any = model.optimizer
    options = optimizer.features.local_options
    if options.delay and (is_delayed or options.outer.min_participants is not None):
        return None
    return options.sync_every * optimizer.accumulation_steps
