"""The step of Keras that finds no data, at the end of data of unknown length.

Plain Keras finds that end by one step more, whose iterator fails. By then it has done
what an update needs no gradients for: weights decay, Nadam's product of momenta moves,
the optimizer counts. Where its own accumulation would make an update, the sums of
gradients are set to zero, and nothing is counted. A replica's step waits for its data,
and this one is taken when the iterator has failed, so that the next epoch begins as it
does on one device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdp import _compat
from tfdp.step.step import Step

# What makes the `Step` of each optimizer of a step, by its id.
Updates = dict[int, Callable[[], Step]]

_recorded: list[Updates] = []


@contextlib.contextmanager
def recording(updates: Updates) -> Iterator[None]:
    """Record the updates that are traced inside.

    Args:
        updates: Dict that they are added to.
    """
    _recorded.append(updates)
    try:
        yield
    finally:
        _recorded.pop()


def note_update(optimizer: Any, make_step: Callable[[], Step]) -> None:
    """Note an update that is traced, unless it depends on a condition.

    Args:
        optimizer: Keras optimizer.
        make_step: Callable that makes its `Step`, in replica context.
    """
    if _recorded and not tf.executing_eagerly() and not _compat.in_branch():
        _recorded[-1][id(optimizer)] = make_step


def take_empty_steps(strategy: Any, updates: Updates) -> None:
    """Do on every replica what Keras's updates do without gradients.

    Args:
        strategy: A tfdp strategy, or `None` on one device.
        updates: Dict, see `recording`.
    """

    def on_replica() -> None:
        for make_step in updates.values():
            _take_empty_step(make_step())

    if strategy is None:
        on_replica()
    elif updates:
        # Not by the strategy's own `run`, which divides a batch.
        tf.distribute.Strategy.run(strategy, on_replica)


def _take_empty_step(step: Step) -> None:
    if step.scale is not None or step.local_steps is not None:
        return  # Whether gradients are finite is known with them only.
    if not step.accumulator.is_due_without_data():
        return
    for group, schedule in zip(step.param_groups, step.schedules, strict=True):
        step.layout.update_without_gradients(
            group, group.of(step.variables), schedule.rate
        )
    if not step.counts_micro_batches:
        for optimizer in step.optimizers:
            _compat.count_update(optimizer, 1)
