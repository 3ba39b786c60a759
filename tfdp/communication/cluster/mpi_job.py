"""This process as a member of an MPI job: pending requests and small messages.

Blocking calls of MPI keep a core busy and hold the GIL. So this module makes only
non-blocking calls and tests the requests between pauses; the start of MPI, which has no
non-blocking form, has a guard process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tfdp.ground import user_code
from tfdp.ground.text import list_ranks

_WARN_AFTER_SECONDS = 10.0
_EXCHANGE_TAG = 1
# Longest pause between two tests of requests in waits that are not time-critical, where
# saving CPU time matters more.
MAX_PAUSE_SECONDS = 0.01
# Time at the start of a wait in which a loop polls without pauses, because waking from
# a pause would take longer.
_SPIN_SECONDS = 30e-6
_SHORTEST_SECONDS = 20e-6
# A pause lasts the time waited so far, divided by this number: to wake late by one
# pause then lengthens the wait by only about an eighth.
_WAITED_PER_PAUSE = 8


class Backoff:
    """Pauses of a polling loop, each an eighth of the time waited.

    `sched_yield` is not used: if all cores compute, it costs a whole time slice, some
    milliseconds, while a thread that has slept runs as soon as it wakes.

    Args:
        longest_seconds: Float, the longest pause. Defaults to a millisecond.

    Example:

    >>> backoff = Backoff(longest_seconds=0.01)
    >>> backoff.pause()
    >>> backoff.waited_seconds > 0
    True
    """

    def __init__(self, longest_seconds: float = 1e-3) -> None:
        self._longest_seconds = longest_seconds
        self._start = time.monotonic()

    @property
    def waited_seconds(self) -> float:
        """Float, seconds since the last `reset`."""
        return time.monotonic() - self._start

    def reset(self) -> None:
        """Begin the wait anew, with short pauses; called after progress."""
        self._start = time.monotonic()

    def pause(self) -> None:
        """Sleep for an eighth of the time waited, unless the wait has just begun."""
        waited = self.waited_seconds
        if waited > _SPIN_SECONDS:
            pause = max(_SHORTEST_SECONDS, waited / _WAITED_PER_PAUSE)
            time.sleep(min(pause, self._longest_seconds))


@dataclasses.dataclass
class _Pending:
    """MPI requests that no call waits for any more, and their buffers.

    Args:
        sends: List of MPI requests.
        receives: List of MPI requests.
        memory: Object that keeps the buffers of the requests alive.
        is_stopped: Bool, whether receives were cancelled. Defaults to `False`.
    """

    sends: list[Any]
    receives: list[Any]
    memory: Any
    is_stopped: bool = False

    def is_over(self) -> bool:
        """Test whether all requests have completed or been cancelled."""
        # Every request is tested, even after a pending one, since MPI frees a request
        # only when its `Test` succeeds.
        done = [request.Test() for request in (*self.sends, *self.receives)]
        return all(done)

    def stop_receiving(self) -> None:
        """Cancel the receives whose message has not arrived, but no sends."""
        if not self.is_stopped:
            self.is_stopped = True
            for request in self.receives:
                if not request.Test():
                    request.Cancel()


@dataclasses.dataclass
class MpiJob:
    """The processes of an MPI job, connected by MPI.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: MPI communicator of all processes, used only by tfdp.
        lock: Context manager that is entered around each call of MPI.
        world_ranks: Tuple of int, the MPI rank of each worker.
        library: String, name and version of the MPI library.
        is_complete: Bool, whether all processes have joined. Defaults to `False`.
    """

    mpi: Any
    comm: Any
    lock: contextlib.AbstractContextManager
    world_ranks: tuple[int, ...]
    library: str
    is_complete: bool = False

    def __post_init__(self) -> None:
        self._communicators: set[Any] = set()
        # Two threads must never test the same request, whatever level of threads MPI
        # allows, so this lock guards the kept requests.
        self._pending_lock = threading.Lock()
        # MPI uses the buffers of a request until it is complete, so requests whose
        # caller has stopped waiting are kept until then.
        self._pending: list[_Pending] = []
        self._unused_comms: list[Any] = []

    @property
    def rank(self) -> int:
        """Int, this process's rank in MPI."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """Int, number of processes."""
        return self.comm.size

    def add(self, communicator: Any) -> None:
        """Keep a communicator alive until `discard`, since MPI may write to its memory.

        Args:
            communicator: Object whose `close(reason)` calls `discard` with it.
        """
        with self._pending_lock:
            self._communicators.add(communicator)

    def discard(self, communicator: Any) -> None:
        """Release a communicator that has been closed.

        Args:
            communicator: Object that was passed to `add`.
        """
        with self._pending_lock:
            self._communicators.discard(communicator)

    def close_communicators(self, reason: str) -> None:
        """Close all communicators that are open.

        Args:
            reason: String, sent to the other processes.
        """
        with self._pending_lock:
            communicators = list(self._communicators)
        for communicator in communicators:
            communicator.close(reason)

    def keep_requests(
        self,
        sends: Sequence[Any],
        receives: Sequence[Any],
        memory: Any,
        comm: Any = None,
    ) -> None:
        """Keep MPI requests, which no call waits for any more, until they are complete.

        Args:
            sends: Sequence of MPI requests.
            receives: Sequence of MPI requests.
            memory: Object that keeps the buffers of the requests alive.
            comm: MPI communicator that is no longer used, or `None`. It is not freed;
                `finish_kept_requests` receives what arrives on it.
        """
        with self._pending_lock, self.lock:
            self._pending = [each for each in self._pending if not each.is_over()]
            self._pending.append(_Pending(list(sends), list(receives), memory))
            if comm is not None:
                self._unused_comms.append(comm)

    def finish_kept_requests(self, seconds: float) -> bool:
        """Complete or cancel the requests that `keep_requests` has kept.

        All processes must have stopped sending new messages.

        Args:
            seconds: Float, longest time to try.

        Returns:
            Bool, whether this process has no pending requests left.
        """
        end, backoff = time.monotonic() + seconds, Backoff(MAX_PAUSE_SECONDS)
        while True:
            with self._pending_lock, self.lock:
                for comm in self._unused_comms:
                    _drain(self.mpi, comm)
                for each in self._pending:
                    each.stop_receiving()
                self._pending = [each for each in self._pending if not each.is_over()]
            if not self._pending or time.monotonic() >= end:
                return not self._pending
            backoff.pause()

    def exchange(
        self,
        facts: Mapping[str, Any],
        timeout_seconds: float | None = None,
        ranks: Sequence[int] | None = None,
        tag: int = _EXCHANGE_TAG,
    ) -> list[dict[str, Any]]:
        """All-gather a small dict between processes, as JSON.

        Args:
            facts: Mapping of values that JSON supports, from this process.
            timeout_seconds: Float or `None`, the longest wait for the others. Defaults
                to `None`, no limit.
            ranks: Sequence of int, the MPI ranks that take part. Defaults to `None`,
                all.
            tag: Int, MPI tag of the messages. Defaults to the one that all ranks use.

        Returns:
            List of dicts, in the order of `ranks`.

        Raises:
            TimeoutError: If a process does not send its dict in time.
        """
        members = range(self.size) if ranks is None else ranks
        text = json.dumps(dict(facts)).encode()
        others = [rank for rank in members if rank != self.rank]
        with self.lock:
            sends = [self.comm.Isend(text, dest=r, tag=tag) for r in others]
        self.keep_requests(sends, (), text)
        texts = _Inbox(self, tag).wait(others, timeout_seconds)
        return [
            dict(facts) if rank == self.rank else json.loads(texts[rank])
            for rank in members
        ]


class _Inbox:
    """Receiver of one message, of a length not known before, from each rank.

    Args:
        job: `MpiJob`.
        tag: Int, MPI tag of the messages.
    """

    def __init__(self, job: MpiJob, tag: int) -> None:
        self._job, self._tag = job, tag
        self._incoming: dict[int, tuple[Any, bytearray]] = {}
        self._texts: dict[int, bytes] = {}

    def wait(
        self, ranks: Sequence[int], timeout_seconds: float | None
    ) -> dict[int, bytes]:
        """Wait for a message of each rank, with a warning that names the late ranks.

        Args:
            ranks: Sequence of ints, MPI ranks of the senders.
            timeout_seconds: Float or `None`, the longest wait. `None` means no limit.

        Returns:
            Dict from rank to message.

        Raises:
            TimeoutError: If a message has not arrived in time.
        """
        backoff = Backoff(MAX_PAUSE_SECONDS)
        begin = time.monotonic()
        while missing := [rank for rank in ranks if not self._has_received(rank)]:
            waited = time.monotonic() - begin
            if timeout_seconds is not None and waited >= timeout_seconds:
                raise TimeoutError(
                    f"{list_ranks(missing, 'rank').capitalize()} of the MPI job did "
                    f"not create a strategy within {timeout_seconds:.0f} s. Start the "
                    "same script on all ranks, and check the end of their output."
                )
            if waited >= _WARN_AFTER_SECONDS:
                user_code.warn(
                    f"Waiting for {list_ranks(missing, 'rank')} of the MPI job to "
                    "create a strategy.",
                    once_for=self,
                    topic="waiting",
                )
            backoff.pause()
        return self._texts

    def _has_received(self, rank: int) -> bool:
        """Advance the receive from a rank; return whether its message is complete."""
        if rank in self._texts:
            return True
        with self._job.lock:
            if rank not in self._incoming:
                status = self._job.mpi.Status()
                message = self._job.comm.Improbe(rank, self._tag, status)
                if message is None:
                    return False
                text = bytearray(status.Get_count(self._job.mpi.BYTE))
                self._incoming[rank] = (message.Irecv(text), text)
            request, text = self._incoming[rank]
            if not request.Test():
                return False
        self._texts[rank] = bytes(text)
        return True


def _drain(mpi: Any, comm: Any) -> None:
    """Receive and drop the messages that have arrived here on a communicator.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: MPI communicator.
    """
    status = mpi.Status()
    while comm.Iprobe(status=status):
        dropped = bytearray(status.Get_count(mpi.BYTE))
        comm.Recv(dropped, source=status.source, tag=status.tag)
