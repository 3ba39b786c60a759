"""Updates that were left out, for messages, and for the table at the end of `fit`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from tfdp.features.spikes.step_guard import MAX_LOGGED, StepGuard
from tfdp.ground._compat import keras_optimizer
from tfdp.ground.base.param_groups import path_of
from tfdp.ground.text import pluralize

# Largest number of rows in the table of skipped updates, which is printed when `fit`
# ends: a run that diverges may skip hundreds.
_MAX_ROWS = 50
NAMES = {"loss": "loss", "gradient_norm": "norm of the gradient"}


class SkippedUpdate(NamedTuple):
    """An update that `SpikeGuard` skipped: a spike, or excluded by a rollback.

    Args:
        step: Int, number of its last batch, from 1, counted over all epochs.
        epoch: Int, number of its epoch, from 1.
        batch: Int, number of its last batch within the epoch, from 1.
        value: Float, the loss or the norm of the gradient.
        median: Float, median of the previous accepted values; infinite without any.
    """

    step: int
    epoch: int
    batch: int
    value: float
    median: float

    @property
    def median_text(self) -> str:
        """String, the median to five digits, or `"none"` if it is infinite."""
        return f"{self.median:.5g}" if math.isfinite(self.median) else "none"


def read_skipped_updates(
    guard: StepGuard, numbers: range, epoch: int, batches_before: int
) -> list[SkippedUpdate]:
    """Return the updates of an epoch that were skipped, read from the device.

    Args:
        guard: `StepGuard`.
        numbers: Range of ints, the epoch's part of all skipped updates, which are
            numbered from 0. The step keeps only the last `MAX_LOGGED` (256).
        epoch: Int, the epoch, from 0.
        batches_before: Int, number of batches before that epoch.
    """
    batches, values = guard.skipped_batches.numpy(), guard.skipped_values.numpy()
    places = [number % MAX_LOGGED for number in numbers[-MAX_LOGGED:]]
    return [
        SkippedUpdate(
            int(batches[place]),
            epoch + 1,
            int(batches[place]) - batches_before,
            float(values[place, 0]),
            float(values[place, 1]),
        )
        for place in places
    ]


def table(rows: Sequence[SkippedUpdate], on: str) -> str:
    """Return a table of the updates that were left out, as lines of text.

    Args:
        rows: Sequence of `SkippedUpdate`.
        on: String, `"loss"` or `"gradient_norm"`.

    Example:

    >>> print(table([SkippedUpdate(14, 2, 4, 1.2e4, 0.3125)], "loss"))
      step  epoch  batch         loss  median before
        14      2      4        12000         0.3125
    """
    lines = [f"{'step':>6}  {'epoch':>5}  {'batch':>5}  {on:>11}  median before"]
    lines += [
        f"{row.step:6}  {row.epoch:5}  {row.batch:5}  {row.value:11.5g}  "
        f"{row.median_text:>13}"
        for row in rows[:_MAX_ROWS]
    ]
    if len(rows) > _MAX_ROWS:
        lines.append(f"and {len(rows) - _MAX_ROWS} more")
    return "\n".join(lines)


def failure(optimizer: Any, guard: StepGuard, last: SkippedUpdate) -> str:
    """Return the error message after too many skipped updates in a row.

    Args:
        optimizer: `DistributedOptimizer`.
        guard: `StepGuard`.
        last: `SkippedUpdate`, the last of these updates.
    """
    trained = keras_optimizer.trained_by(optimizer)
    paths = [path_of(trained[int(i) - 1]) for i in guard.largest.numpy() if i > 0]
    number = pluralize(int(guard.num_in_a_row.numpy()), "update")
    return (
        f"`SpikeGuard` left out {number} in a row, up to batch {last.batch} of epoch "
        f"{last.epoch}, where the {NAMES[guard.on]} was {last.value:.5g} (median "
        f"before: {last.median_text}), so that nothing is learned. Variables with the "
        f"largest gradients, infinite and NaN ones first: {', '.join(paths)}. Look for "
        "bad values in the data, or for a learning rate that is too high."
    )
