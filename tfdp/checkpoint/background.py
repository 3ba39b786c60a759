"""Saves in the background: training goes on while a copy of the state is written."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from tfdp.checkpoint import files
from tfdp.ground import forks, user_code
from tfdp.ground.base.memory import free_bytes
from tfdp.ground.base.threads import run_on_thread
from tfdp.training.sharding.state_tensors import StateTensor

_log = logging.getLogger("tfdp")
# Part of the free memory that a copy may take.
_MEMORY_SHARE = 0.5
# Alignment of a shard in the copy, in bytes: a cache line.
_ALIGNMENT = 64
# Priority of the thread that writes: it takes what training leaves of the processor.
_NICENESS = 19
# Shorter waits of a save for the one before are not reported.
_LEAST_REPORTED_SECONDS = 1.0
# Function that writes state tensors together with the other workers of a `WorkerGroup`.
Write = Callable[[Sequence[StateTensor], Any], None]


class PendingSave:
    """Save that `tfdp.checkpoint.save(..., background=True)` has begun.

    Args:
        future: `Future` of the save.
        guard: Callable that returns a context for waits, which replaces the error of a
            lost worker by one that names it. Defaults to one that does nothing.

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
    ) -> None:
        self._future = future
        self._guard = guard
        self._is_raised = False

    @property
    def is_done(self) -> bool:
        """Bool, whether the save has ended, with or without an error."""
        return self._future.done()

    def wait(self) -> None:
        """Wait until the checkpoint is complete.

        Raises:
            ValueError: On every worker, if the directory cannot hold a checkpoint.
            OSError: On every worker, if one of them could not write. The earlier
                checkpoint is intact.
        """
        with self._guard():
            try:
                self._future.result()
            except Exception:
                self._is_raised = True
                raise

    def finish(self) -> None:
        """Wait as `wait` does, but do not raise an error that it has raised before."""
        if not self._is_raised:
            self.wait()


class BackgroundSaves:
    """Saves of one group of workers, one at a time.

    All workers call each method together.

    Args:
        worker_group: `WorkerGroup` between the workers.
    """

    def __init__(self, worker_group: Any) -> None:
        self._guard = worker_group.guard
        self._group = worker_group.beside()
        self._buffer = np.empty(0, "uint8")
        self._pending: PendingSave | None = None

    def start(self, write: Write, state: Sequence[StateTensor]) -> PendingSave:
        """Copy this worker's part of the state, and write the copy on a thread.

        Without memory for the copy, the state is written before this returns.

        Args:
            write: Callable, see `Write`.
            state: Sequence of `StateTensor`.

        Returns:
            `PendingSave`, which also has the error of a save that is over.

        Raises:
            OSError: If the save before has failed, and no call has raised this yet.
        """
        self._wait_for_previous()
        copied = self._copy(state)
        if copied is not None:
            future = run_on_thread("tfdp-save", _write_idly, write, copied, self._group)
        else:
            # Its error is raised when the other workers raise it: after the next steps.
            future = _done(write, state, self._group)
        self._pending = PendingSave(future, self._guard)
        _unfinished.add(self._pending)
        forks.at_exit(_finish_all)
        return self._pending

    def finish(self) -> None:
        """Wait for the save that is under way.

        Raises:
            OSError: As for `start`.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            _unfinished.discard(pending)
            pending.finish()

    def release(self) -> None:
        """Free the memory of the copy, once no save is under way."""
        self._buffer = np.empty(0, "uint8")

    def _wait_for_previous(self) -> None:
        """Wait for the save that is under way; report the first long wait."""
        begin = time.monotonic()
        self.finish()
        waited = time.monotonic() - begin
        if waited > _LEAST_REPORTED_SECONDS and user_code.is_new("slow", self):
            _log.warning(
                "tfdp: a save waited %.0f s for the one before: writing takes longer "
                "than the time between two saves. Save less often.",
                waited,
            )

    def _copy(self, state: Sequence[StateTensor]) -> list[StateTensor] | None:
        """Return a copy of the state, or `None` without memory for it; say so once."""
        needed, free = _num_bytes(state), free_bytes()
        if needed <= max(self._buffer.size, _MEMORY_SHARE * free):
            with contextlib.suppress(MemoryError):  # a limit of this process
                copied, self._buffer = copy_to_host(state, self._buffer)
                return copied
        if user_code.is_new("memory", self):
            _log.warning(
                "tfdp: training waits for each save: a copy of this worker's state has "
                "%.0f MB, and %.0f MB are free.",
                needed / 1e6,
                free / 1e6,
            )
        return None


# By worker group; and the saves that the end of the script waits for.
_all: weakref.WeakKeyDictionary[Any, BackgroundSaves] = weakref.WeakKeyDictionary()
_unfinished: set[PendingSave] = set()


def background_saves(worker_group: Any) -> BackgroundSaves:
    """Return the `BackgroundSaves` of a group, made at the first call."""
    if worker_group not in _all:
        _all[worker_group] = BackgroundSaves(worker_group)
    return _all[worker_group]


@forks.in_forks
def _forget() -> None:
    """Forget all saves in a forked process, which does not have their threads."""
    _all.clear()
    _unfinished.clear()


def copy_to_host(
    state: Sequence[StateTensor], buffer: np.ndarray
) -> tuple[list[StateTensor], np.ndarray]:
    """Copy the shards that this process owns into one array.

    Args:
        state: Sequence of `StateTensor`.
        buffer: Array of bytes, which is used if it is large enough.

    Returns:
        Tuple of the tensors, whose owned shards are parts of the copy, and the array.

    Example:

    >>> from tfdp.training.sharding.state_tensors import LocalShard
    >>> weights = np.ones(3, "float32")
    >>> shard = LocalShard(0, 3, lambda: weights, weights.put)
    >>> state = [StateTensor("weights", (3,), "float32", (shard,), (shard,))]
    >>> copied, buffer = copy_to_host(state, np.empty(0, "uint8"))
    >>> weights[:] = 2
    >>> copied[0].owned_shards[0].read()
    array([1., 1., 1.], dtype=float32)
    """
    needed = _num_bytes(state)
    if buffer.size < needed:
        del buffer  # frees its memory before the new one is allocated
        buffer = np.empty(needed, "uint8")
    offset, copied = 0, []
    for tensor in state:
        shards = []
        for shard in tensor.owned_shards:
            size = (shard.stop - shard.start) * files.dtype_of(tensor).size
            part = buffer[offset : offset + size]
            part = part.view(files.dtype_of(tensor).as_numpy_dtype)
            np.copyto(part, np.asarray(shard.read()).reshape(-1))
            read = functools.partial(np.asarray, part)
            shards.append(dataclasses.replace(shard, read=read, read_range=None))
            offset += _aligned(size)
        copied.append(dataclasses.replace(tensor, owned_shards=tuple(shards)))
    return copied, buffer


def _num_bytes(state: Sequence[StateTensor]) -> int:
    """Return the size in bytes of a copy of the shards that this process owns."""
    return sum(
        _aligned((shard.stop - shard.start) * files.dtype_of(tensor).size)
        for tensor in state
        for shard in tensor.owned_shards
    )


def _aligned(size: int) -> int:
    """Return a size rounded up to the alignment of shards, in bytes."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _write_idly(write: Write, state: Sequence[StateTensor], group: Any) -> None:
    """Write with the processor time that training leaves; arguments as for `start`."""
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    write(state, group)


def _done(write: Write, state: Sequence[StateTensor], group: Any) -> Future[None]:
    """Return a future with the result of writing; arguments as for `start`."""
    future: Future[None] = Future()
    try:
        write(state, group)
        future.set_result(None)
    except Exception as error:  # noqa: BLE001 the future raises it
        future.set_exception(error)
    return future


def _finish_all() -> None:
    """Wait for all saves when the script ends, and print the error of one."""
    for pending in list(_unfinished):
        try:
            pending.finish()
        except Exception as error:  # noqa: BLE001 the script has ended
            print(f"tfdp: {error}", file=sys.stderr, flush=True)
