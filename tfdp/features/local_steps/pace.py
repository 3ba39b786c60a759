"""Inner steps that a slow worker leaves out, so that the others wait less for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.features.local_steps.options import LocalStepsOptions
from tfdp.ground import _compat

# A worker that is not slower than this is as fast as the fastest one: times vary.
_AS_FAST = 0.9


class Pace:
    """Which batches of a worker are inner steps, and how long one takes.

    Args:
        options: `LocalStepsOptions`.

    Source: Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling",
    https://arxiv.org/abs/2401.09135, dynamic local updates.
    """

    def __init__(self, options: LocalStepsOptions) -> None:
        every = options.sync_every
        later = [offset + options.delay for offset in options.offsets]
        self._places = {place % every for place in [*options.offsets, *later]}
        self._every = every
        self.share = 1.0
        self._logs: Any = None
        self._passed = self._made = 0
        # Of inner steps that no exchange is a part of.
        self._since: float | None = None
        self._ended = self._seconds = self._left_out_seconds = 0.0
        self._num_timed = self._num_on_clock = 0
        self._is_first = True

    def restart(self) -> None:
        """Begin again with the first update after a meeting."""
        self._passed = self._made = 0
        self._since, self._is_first = None, True

    def take_seconds(self) -> float | None:
        """Return the mean time of an inner step, if one was measured, and forget it."""
        mean = self._seconds / self._num_timed if self._num_timed else None
        self._seconds, self._num_timed = 0.0, 0
        return mean

    def step(self, model: Any, compute: Callable[..., Any], iterator: Any) -> Any:
        """Make the next updates of a model, or leave them out.

        Args:
            model: Keras model in `fit`.
            compute: Callable that takes an iterator and makes them.
            iterator: Iterator of batches.

        Returns:
            Dict, the logs: those before, where the updates are left out.
        """
        # An exchange is waited for, and is not a part of what an inner step takes.
        count = int(model.steps_per_execution)
        meets = self._holds_exchange(count)
        # One after an exchange is always made, and timed.
        is_made = meets or self._is_first or self._is_owed(count)
        if meets:
            self._stop_clock(model)
        if is_made:
            self._logs = compute(iterator)
            self._made += count
            self._num_on_clock += count
        else:
            self._leave_out(model, iterator, count)
        if meets or not self._passed:
            self._start_clock(model)
        self._is_first = meets
        self._passed += count
        self._ended = time.perf_counter()
        return self._logs

    def _holds_exchange(self, count: int) -> bool:
        updates = range(self._passed + 1, self._passed + count + 1)
        return any(update % self._every in self._places for update in updates)

    def _is_owed(self, count: int) -> bool:
        return self._made < self.share * (self._passed + count)

    def _leave_out(self, model: Any, iterator: Any, count: int) -> None:
        """Pass batches over; schedules and exchanges count them as the others do."""
        for number in range(count):
            try:
                next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if not number:
                    raise
                count = number  # the last execution of an epoch may be a part of one
                break
        optimizer = model.optimizer
        for variable in optimizer.iterations, optimizer.features.local_steps.updates:
            for replica in range(model.distribute_strategy.extended.num_local):
                part = _compat.local_value(variable, replica)
                part.assign_add(tf.cast(count, part.dtype), read_value=False)
        self._left_out_seconds += time.perf_counter() - self._ended

    def _start_clock(self, model: Any) -> None:
        _wait_for_step(model)
        self._since = time.perf_counter()
        self._left_out_seconds, self._num_on_clock = 0.0, 0

    def _stop_clock(self, model: Any) -> None:
        if self._since is not None and self._num_on_clock:
            _wait_for_step(model)
            elapsed = time.perf_counter() - self._since - self._left_out_seconds
            self._seconds += elapsed
            self._num_timed += self._num_on_clock


def shares(
    seconds: Sequence[float | None], nodes: Sequence[Sequence[int]]
) -> list[float] | None:
    """Return which part of the inner steps each worker makes.

    Args:
        seconds: Sequence of floats, how long one takes on each worker, or `None`.
        nodes: Sequence of sequences of ints, workers that make the same steps.

    Returns:
        List of floats, by worker; or `None` if one has measured nothing.

    Example:

    >>> shares([0.1, 0.2, 0.104], [[0], [1], [2]])
    [1.0, 0.5, 1.0]
    """
    measured = [value for value in seconds if value is not None]
    if len(measured) < len(seconds):
        return None
    slowest = [max(measured[worker] for worker in node) for node in nodes]
    result = [1.0] * len(measured)
    for node, own in zip(nodes, slowest, strict=True):
        share = min(slowest) / own
        if share < _AS_FAST:
            for worker in node:
                result[worker] = share
    return result


def workers_by_node(strategy: Any, scope: str) -> list[list[int]]:
    """Return the workers that make their inner steps together.

    Those of a node, whose replicas communicate in each of them; and of several nodes
    where a worker is a part of more than one.

    Args:
        strategy: A tfdp strategy.
        scope: String, `"node"` or `"replica"`.

    Returns:
        List of lists of ints, each worker in one of them.
    """
    extended = strategy.extended
    group = extended.group
    if scope == "replica" or not group.nodes or group.workers is None:
        return [[worker] for worker in range(extended.worker_group.num_workers)]
    together: list[set[int]] = []
    for node in group.nodes:
        workers = {group.workers[place] for place in node}
        joined = [other for other in together if other & workers]
        together = [other for other in together if not other & workers]
        together.append(workers.union(*joined))
    return [sorted(workers) for workers in together]


def _wait_for_step(model: Any) -> None:
    """Wait for the devices, which may be behind this process."""
    model.optimizer.features.local_steps.updates.numpy()
