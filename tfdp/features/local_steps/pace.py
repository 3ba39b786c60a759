"""Inner steps that a slow worker skips, so that the others wait less for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.features.local_steps.options import LocalStepsOptions
from tfdp.ground._compat import tf_distribute
from tfdp.ground.plans.topology import join_overlapping

# A worker skips steps only if its speed is below this fraction of the fastest worker's,
# since smaller differences are noise.
_MAX_SLOW_SHARE = 0.9


class Pace:
    """Decides which batches a slow worker skips, and times its inner steps.

    Args:
        options: `LocalStepsOptions`.

    Attributes:
        share: Float, the fraction of its updates that the worker makes, 1 at first.

    Source: Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling",
    https://arxiv.org/abs/2401.09135, dynamic local updates.
    """

    def __init__(self, options: LocalStepsOptions) -> None:
        every = options.sync_every
        self._exchange_positions = {
            (offset + late) % every
            for offset in options.offsets
            for late in (0, options.delay)
        }
        self._every = every
        self.share = 1.0
        self._logs: Any = None
        self._num_passed = self._num_made = 0
        # The clock runs between two exchanges only, since a worker waits for others in
        # an exchange, which is no sign of its own speed.
        self._clock_started: float | None = None
        self._ended = self._seconds = self._skipped_seconds = 0.0
        self._num_timed = self._num_on_clock = 0
        self._is_first = True

    def restart(self) -> None:
        """Reset the counts and the clock, after all workers have synchronized."""
        self._num_passed = self._num_made = 0
        self._clock_started, self._is_first = None, True

    def pop_mean_seconds(self) -> float | None:
        """Return the mean seconds of the inner steps timed since the last call.

        Returns:
            Float, or `None` if no step was timed.
        """
        mean = self._seconds / self._num_timed if self._num_timed else None
        self._seconds, self._num_timed = 0.0, 0
        return mean

    def step(self, model: Any, compute: Callable[..., Any], iterator: Any) -> Any:
        """Make the next `steps_per_execution` updates of a model, or skip them.

        They are skipped if this worker has made at least the fraction `share` of its
        updates since `restart`, except at an exchange and right after it. The batches
        of skipped updates are taken from the iterator and dropped.

        Args:
            model: Keras model in `fit`.
            compute: Callable that takes an iterator and makes the updates.
            iterator: Iterator of batches.

        Returns:
            Dict, the logs; those of the last update if these are skipped.
        """
        count = int(model.steps_per_execution)
        first = self._num_passed + 1
        positions = {number % self._every for number in range(first, first + count)}
        has_exchange = bool(positions & self._exchange_positions)
        # The first updates after an exchange are never skipped, so that the time of an
        # inner step is measured between any two exchanges.
        is_due = self._num_made < self.share * (self._num_passed + count)
        is_made = has_exchange or self._is_first or is_due
        if has_exchange:
            self._stop_clock(model)
        if is_made:
            self._logs = compute(iterator)
            self._num_made += count
            self._num_on_clock += count
        else:
            self._skip(model, iterator, count)
        if has_exchange or not self._num_passed:
            self._start_clock(model)
        self._is_first = has_exchange
        self._num_passed += count
        self._ended = time.perf_counter()
        return self._logs

    def _skip(self, model: Any, iterator: Any, count: int) -> None:
        """Skip batches, but count their updates, for schedules and exchanges.

        The batches are taken from the iterator and dropped. If the data ends within
        them, only the updates of the dropped ones are counted.

        Args:
            model: Keras model in `fit`.
            iterator: Iterator of batches.
            count: Int, number of updates to skip, each of one batch.
        """
        for number in range(count):
            try:
                next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if not number:
                    raise
                # The data has ended within this execution: the last one of an epoch may
                # have fewer steps. Only the batches that were dropped are counted.
                count = number
                break
        optimizer = model.optimizer
        groups = optimizer.features.independent_groups
        for variable in optimizer.iterations, groups.updates:
            for replica in range(model.distribute_strategy.extended.num_local):
                part = tf_distribute.local_value(variable, replica)
                part.assign_add(tf.cast(count, part.dtype), read_value=False)
        self._skipped_seconds += time.perf_counter() - self._ended

    def _start_clock(self, model: Any) -> None:
        """Start timing inner steps, after the devices have finished the last one."""
        _wait_for_step(model)
        self._clock_started = time.perf_counter()
        self._skipped_seconds, self._num_on_clock = 0.0, 0

    def _stop_clock(self, model: Any) -> None:
        """Add the steps since `_start_clock`, and their time, to those timed so far.

        The time of skipped steps is left out.

        Args:
            model: Keras model in `fit`, for whose last step this waits first.
        """
        if self._clock_started is not None and self._num_on_clock:
            _wait_for_step(model)
            elapsed = time.perf_counter() - self._clock_started - self._skipped_seconds
            self._seconds += elapsed
            self._num_timed += self._num_on_clock


def step_fractions(
    seconds: Sequence[float | None], nodes: Sequence[Sequence[int]]
) -> list[float] | None:
    """Return the fraction of the inner steps that each worker makes.

    Args:
        seconds: Sequence of floats, duration of an inner step on each worker, or `None`
            if a worker has measured none.
        nodes: Sequence of sequences of ints, workers that make the same steps.

    Returns:
        List of floats, by worker: the time of a step on the fastest node, divided by
        that on the worker's node; 1 where it is at least 0.9, as smaller differences
        are noise. A node is as slow as its slowest worker. `None` if a worker has
        measured no step.

    Example:

    >>> step_fractions([0.1, 0.2, 0.104], [[0], [1], [2]])
    [1.0, 0.5, 1.0]
    """
    measured = [value for value in seconds if value is not None]
    if len(measured) < len(seconds):
        return None
    slowest = [max(measured[worker] for worker in node) for node in nodes]
    result = [1.0] * len(measured)
    for node, node_seconds in zip(nodes, slowest, strict=True):
        share = min(slowest) / node_seconds
        if share < _MAX_SLOW_SHARE:
            for worker in node:
                result[worker] = share
    return result


def workers_by_node(strategy: Any, scope: str) -> list[list[int]]:
    """Return the groups of workers that make their inner steps together.

    With the scope `"replica"`, each worker is a group. With `"node"`, a group is the
    workers of one node, whose replicas communicate in each inner step. If a worker has
    replicas on two nodes, the workers of both nodes are one group.

    Args:
        strategy: A tfdp strategy. Without nodes each worker is a group.
        scope: String, `"node"` or `"replica"`: what trains alone between exchanges.

    Returns:
        List of lists of ints, each worker in one of them.
    """
    extended = strategy.extended
    group = extended.group
    if scope == "replica" or not group.nodes or group.workers is None:
        return [[worker] for worker in range(extended.worker_group.num_workers)]
    together = join_overlapping(
        {group.workers[place] for place in node} for node in group.nodes
    )
    return [sorted(workers) for workers in together]


def _wait_for_step(model: Any) -> None:
    """Wait until the devices have finished the step that was launched last."""
    model.optimizer.features.independent_groups.updates.numpy()
