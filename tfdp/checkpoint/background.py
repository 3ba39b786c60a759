"""Saves in the background: training continues while a copy of the state is written."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tfdp.checkpoint.copies import copied_state, copy_bytes, copy_to_host
from tfdp.communication.coordination.model_group import worker_group_of
from tfdp.ground import forks, user_code
from tfdp.ground._compat import runtime
from tfdp.ground.base import process_identity
from tfdp.ground.base.feature import Feature, register
from tfdp.ground.base.memory import free_bytes
from tfdp.ground.base.threads import run_on_thread
from tfdp.training.sharding.state_tensors import StateTensor

_log = logging.getLogger("tfdp")
# Fraction of a host's free memory that all its workers' copies of the state may take:
# training and input pipelines need the rest.
MEMORY_SHARE = 0.5
# Niceness of the writing thread, which gets a third of the CPU time of a training
# thread. With the lowest priority, the thread could be suspended for seconds while it
# holds the GIL, and training would wait for the GIL.
_NICENESS = 5
# Fraction of a core that a background save uses until a worker waits for it. Without
# this limit, training steps that use all cores took 1.3 times as long during a save.
_PROCESSOR_SHARE = 0.01
# Most seconds that the pauses for `_PROCESSOR_SHARE` add to a save. If `fit` raises an
# error on one worker, the others keep pausing, so the failed worker may wait this long
# for the save.
_MAX_PAUSED_SECONDS = 10.0
# A save logs a warning only if it has waited more seconds than this for the previous
# save: shorter waits hardly slow training down.
_MIN_REPORTED_SECONDS = 1.0
# `Read` returns the state tensors to write, or raises the error of copying them: an
# error must be raised where workers exchange errors, in the function that writes.
Read = Callable[[], Sequence[StateTensor]]
# `Pause` is called between two files of a save, and may sleep, so that writing does not
# slow training down.
Pause = Callable[[], None]
# `Write` writes the state that its `Read` returns, and calls the `Pause` between files.
# It takes the `WorkerGroup` of its own thread, since the calls of each thread have
# their own order.
Write = Callable[[Read, Any, Pause], None]
# Memory that a worker needs: a key of its host, the bytes to allocate, and the host's
# free bytes. The bytes of workers with the same key are added up.
Need: TypeAlias = tuple[str, int, int]


class PendingSave:
    """Save that `tfdp.checkpoint.save(..., background=True)` has begun.

    Args:
        future: `Future` of the save.
        guard: Callable that returns a context manager, which replaces the error of a
            lost worker by one that names the worker. Defaults to one that does nothing.
        hurry: `threading.Event` that ends the pauses of the writing thread; set when
            this process begins to wait for the save. Defaults to `None`, no such event.

    Example:

    >>> pending = PendingSave(run_on_thread("save", lambda: None))
    >>> pending.wait()
    >>> pending.is_done
    True
    """

    def __init__(
        self,
        future: Future[None],
        guard: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        hurry: threading.Event | None = None,
    ) -> None:
        self._future = future
        self._guard = guard
        self._hurry = hurry or threading.Event()
        self._owner = forks.Owner()
        self._is_raised = False

    @property
    def is_done(self) -> bool:
        """Bool, whether the save has ended on this worker, with or without an error."""
        return self._future.done()

    def wait(self) -> None:
        """Wait until the checkpoint is complete. All workers call it together.

        Raises:
            ValueError: On every worker, if the directory cannot hold a checkpoint.
            OSError: On every worker, if one of them could not write. The earlier
                checkpoint is intact.
        """
        self._owner.check("PendingSave.wait")
        self._hurry.set()
        error = self._future.exception()
        if error is None:
            return
        self._is_raised = True
        # An exact `OSError` or `ValueError` comes from `run_on_all_workers`, which
        # raises it on all workers alike. Any other error may result from the loss of a
        # worker, so the guard replaces it by one that names the worker.
        is_common = type(error) in (OSError, ValueError)
        with contextlib.nullcontext() if is_common else self._guard():
            raise error

    def settle(self) -> None:
        """Wait until the save has ended; raise no error."""
        if self._owner.is_current:
            self._hurry.set()
            concurrent.futures.wait([self._future])

    def finish(self) -> None:
        """Wait as `wait` does, but do not raise an error that `wait` has raised before.

        In a forked process this returns at once.
        """
        if self._owner.is_current and not self._is_raised:
            self.wait()


class BackgroundSaves:
    """Runs the saves of one group of workers in the background, one at a time.

    All workers call each of the methods together.

    Args:
        worker_group: `WorkerGroup` between the workers.
    """

    def __init__(self, worker_group: Any) -> None:
        self._guard = worker_group.guard
        self._group = worker_group.for_other_thread()
        self._buffer = np.empty(0, "uint8")
        self._pending: PendingSave | None = None
        # Monotonic time at which the last save began. At first it is infinitely long
        # ago, so that the pauses of the first save have no limit but
        # `_MAX_PAUSED_SECONDS`.
        self._begin = -math.inf

    def needs(self, state: Sequence[StateTensor]) -> Need:
        """Return the memory that this worker needs to copy its part of the state.

        Args:
            state: Sequence of `StateTensor`.

        Returns:
            `Need`, a tuple of a string, the key of the host; an int, the bytes to
            allocate beyond the buffer of the last copy; and an int, the free bytes of
            the host, or `sys.maxsize` if nothing must be allocated.
        """
        missing = max(copy_bytes(state) - self._buffer.size, 0)
        # `free_bytes` reads system files, which takes time, so it is called only if
        # memory must be allocated.
        free = free_bytes() if missing else sys.maxsize
        return process_identity.machine(), missing, free

    def start(
        self,
        write: Write,
        state: Sequence[StateTensor],
        worker_group: Any,
        needs: Sequence[Need],
    ) -> PendingSave:
        """Copy this worker's part of the state, and write the copy on a thread.

        Before that, wait for earlier saves. If a host lacks memory for the copies of
        its workers, nothing is copied: all workers write the state before this returns.

        Args:
            write: `Write`, which writes the state.
            state: Sequence of `StateTensor`.
            worker_group: `WorkerGroup` of the same workers for the calling thread,
                which writes the state if nothing is copied.
            needs: Sequence of `Need`, gathered from all workers in the order of their
                ranks: a key of the worker's host, the bytes of memory to allocate for
                its copy, and the free bytes of the host.

        Returns:
            `PendingSave`, which is done already if nothing was copied.

        Raises:
            OSError: If the previous save has failed, and no call has raised this yet.
        """
        # Other worker groups may save to the same directory. Their saves must end
        # first, since each save removes the data folders of other saves in its
        # directory.
        for other in _unfinished - {self._pending}:
            other.settle()
        self._wait_for_previous(worker_group.is_chief)
        hurry = threading.Event()
        # The pauses of a save take at most half of the time between the last two saves,
        # so that the save is usually complete before the next one begins.
        begin, self._begin = self._begin, time.monotonic()
        most = min((self._begin - begin) / 2, _MAX_PAUSED_SECONDS)
        if self._has_memory(needs, worker_group.is_chief):
            read = self._copy(state)
            future = run_on_thread(
                "tfdp-save",
                _write_slowly,
                write,
                read,
                self._group,
                _Pauses(hurry, most),
            )
        else:
            write(lambda: state, worker_group, lambda: None)
            future = Future()
            future.set_result(None)
        pending = self._pending = PendingSave(future, self._guard, hurry)
        _unfinished.add(pending)
        return pending

    def finish(self) -> None:
        """Wait until the present save has ended, and free the memory of its copy.

        Before that, wait for the saves of other worker groups, which may write to the
        same directory.

        Raises:
            OSError: If the save has failed, and no call has raised this yet.
        """
        for other in _unfinished - {self._pending}:
            other.settle()
        self.finish_own()

    def finish_own(self) -> None:
        """Wait until this group's save has ended, and free the memory of its copy.

        Unlike `finish`, this does not wait for the saves of other worker groups.
        """
        self._wait()
        self._buffer = np.empty(0, "uint8")

    def _wait(self) -> None:
        """Wait until the present save has ended; raise its error if no call has yet."""
        pending = self._pending
        if pending is None:
            return
        self._group.warns = True
        try:
            pending.finish()
        except Exception:
            self._forget(pending)
            raise
        finally:
            self._group.warns = False
        # The save is not forgotten in `finally`: after Ctrl-C it is still under way,
        # and a later call must wait for it.
        self._forget(pending)

    def _forget(self, pending: PendingSave) -> None:
        """Drop a save that has ended, so that the script's end does not wait for it."""
        self._pending = None
        _unfinished.discard(pending)

    def _wait_for_previous(self, reports: bool) -> None:
        """Wait until the present save has ended; warn once if that takes over a second.

        Args:
            reports: Bool, whether this worker logs the warning.
        """
        begin = time.monotonic()
        self._wait()
        waited = time.monotonic() - begin
        is_long = reports and waited > _MIN_REPORTED_SECONDS
        if is_long and user_code.record_if_new("slow", self):
            _log.warning(
                "tfdp: a save waited %.0f s for the one before: writing takes longer "
                "than the time between two saves. Save less often.",
                waited,
            )

    def _has_memory(self, needs: Sequence[Need], reports: bool) -> bool:
        """Return whether all hosts have memory for the copies of their workers.

        Args:
            needs: Sequence of `Need`, by worker: its host, the bytes to allocate for
                its copy, and the free bytes of the host.
            reports: Bool, whether this worker logs a warning when memory is first
                missing.
        """
        lack = lack_of_memory(needs, MEMORY_SHARE)
        if lack is None:
            return True
        if reports and user_code.record_if_new("memory", self):
            _log.warning(
                "tfdp: training waits for each save: copies of the state of all "
                "workers of a host take %.0f MB, and %.0f MB are free.",
                lack.needed / 1e6,
                lack.free / 1e6,
            )
        return False

    def _copy(self, state: Sequence[StateTensor]) -> Read:
        """Copy this worker's shards; return a function that returns the copy.

        If the copy fails, the returned function raises the error: workers exchange
        errors where they call it, and not in this method.
        """
        error: Exception | None = None
        try:
            needed = copy_bytes(state)
            if self._buffer.size < needed:
                # The old buffer is freed before the new one is allocated, so that the
                # host never holds both.
                self._buffer = np.empty(0, "uint8")
                self._buffer = np.empty(needed, "uint8")
            copy_to_host(state, self._buffer)
        except Exception as caught:  # noqa: BLE001 `read` raises it on another thread
            error = caught

        def read() -> list[StateTensor]:
            """Return the copy of the state, or raise the error of the copy."""
            if error is not None:
                raise error
            return copied_state(state, self._buffer)

        return read


class MemoryLack(NamedTuple):
    """Host that has less memory than its workers need.

    Args:
        rank: Int, rank of the first worker on the host.
        needed: Int, bytes that its workers need.
        free: Int, bytes of memory that are free on the host.
    """

    rank: int
    needed: int
    free: int


def lack_of_memory(answers: Sequence[Need], share: float) -> MemoryLack | None:
    """Return the first host that lacks memory, or `None`.

    Args:
        answers: Sequence of `Need`, by worker: a key of its host, the bytes to allocate
            for its copy, and the free bytes of the host.
        share: Float, the part of the free bytes that the workers may take.

    Example:

    >>> lack_of_memory([("a", 3, 9), ("b", 4, 9), ("b", 2, 9)], 0.5)
    MemoryLack(rank=1, needed=6, free=9)
    """
    for rank, (host, _, free) in enumerate(answers):
        needed = sum(answer[1] for answer in answers if answer[0] == host)
        if needed > share * free:
            return MemoryLack(rank, needed, free)
    return None


def memory_budget(worker_group: Any) -> int:
    """Return the bytes of its host's free memory that this worker may take.

    It is half of the free memory, divided equally among the workers of the host. All
    workers call it together.

    Args:
        worker_group: `WorkerGroup` between the workers.
    """
    host = process_identity.machine()
    hosts = worker_group.all_gather("checkpoint: hosts", host)
    return int(MEMORY_SHARE * free_bytes() / hosts.count(host))


# The keys are weak, so that this dictionary does not keep the groups of workers of
# deleted models alive.
_saves_by_group: weakref.WeakKeyDictionary[Any, BackgroundSaves]
_saves_by_group = weakref.WeakKeyDictionary()
# Saves that no call has waited for yet. `_finish_all` waits for them at the end of the
# script, which would otherwise kill their threads.
_unfinished: set[PendingSave] = set()


def background_saves(worker_group: Any) -> BackgroundSaves:
    """Return the `BackgroundSaves` of a `WorkerGroup`; create it at the first call."""
    if worker_group not in _saves_by_group:
        _saves_by_group[worker_group] = BackgroundSaves(worker_group)
    return _saves_by_group[worker_group]


class _SavesOfCallbacks(Feature):
    """Feature that makes `fit` wait at its end for an unfinished background save."""

    def complete_fit(self, model: Any) -> None:
        """Wait until a background save of the model's workers ends; raise its error."""
        saves = _saves_by_group.get(worker_group_of(model))
        if saves is not None:
            saves.finish_own()


register(_SavesOfCallbacks())


@forks.in_forks
def _forget_all() -> None:
    """Forget all saves in a forked process, which does not have their threads."""
    _saves_by_group.clear()
    _unfinished.clear()


def _write_slowly(write: Write, read: Read, group: Any, pauses: _Pauses) -> None:
    """Write a save on this thread, at a lower priority and with pauses between files.

    So the save slows training down as little as it can.

    Args:
        write: `Write`, which writes the state together with the other workers.
        read: `Read`, returns the state.
        group: `WorkerGroup` between these workers, for this thread.
        pauses: `_Pauses` of this thread, which limit its share of a processor.
    """
    lower_priority()
    pauses.restart()
    write(read, group, pauses)


class _Pauses:
    """Callable that pauses a thread, so that it uses at most 1 % of a processor.

    The thread calls `restart` before it writes, and the object between two files.

    Args:
        hurry: `Event` that ends all pauses.
        most: Float, the longest time in seconds of all pauses together.
    """

    def __init__(self, hurry: threading.Event, most: float) -> None:
        self._hurry = hurry
        self._left = most

    def __call__(self) -> None:
        """Pause so that the thread uses at most 1 % of a processor.

        The pause lasts until the time since the last pause is 100 times the processor
        time that the thread has used in it. All pauses together take at most `most`
        seconds.
        """
        used = time.thread_time() - self._used
        elapsed = time.monotonic() - self._begin
        seconds = min(used / _PROCESSOR_SHARE - elapsed, self._left)
        if seconds > 0:
            self._hurry.wait(seconds)
            self._left -= seconds
        self.restart()

    def restart(self) -> None:
        """Begin to measure the elapsed and the processor time until the next pause."""
        self._used, self._begin = time.thread_time(), time.monotonic()


def lower_priority() -> None:
    """Lower the priority of the calling thread below that of training; Linux only."""
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


@runtime.before_threads_end
def _finish_all() -> None:
    """Wait for all saves at the end of the script, and print their errors."""
    for pending in list(_unfinished):
        try:
            pending.finish()
        except Exception as error:  # noqa: BLE001 no caller is left at the script's end
            print(f"tfdp: {error}", file=sys.stderr, flush=True)
