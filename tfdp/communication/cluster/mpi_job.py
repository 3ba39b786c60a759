"""This process as a member of an MPI job: what is under way, and small messages.

MPI waits in native code, with a core for itself and the interpreter locked. So nothing
here calls what waits: messages are sent and received without blocking, and asked after
between pauses; the start, which cannot be asked after, has a guard.
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

_WARN_AFTER_SECONDS = 10.0
_EXCHANGE_TAG = 1
LONGEST_PAUSE_SECONDS = 0.01
# The end of a pause takes longer than this.
_SPIN_SECONDS = 30e-6
_SHORTEST_SECONDS = 20e-6
# A pause adds at most this part to what was waited before it.
_PART = 8


class Backoff:
    """Pauses that grow with the time waited, by an eighth of it.

    Never `sched_yield`: where all cores compute it costs a whole time slice, some
    milliseconds, while a thread that slept is run as soon as it wakes.

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
        """Begin again with short pauses: something has come."""
        self._start = time.monotonic()

    def pause(self) -> None:
        """Give the core to others for a while, unless the wait has just begun."""
        waited = self.waited_seconds
        if waited > _SPIN_SECONDS:
            pause = max(_SHORTEST_SECONDS, waited / _PART)
            time.sleep(min(pause, self._longest_seconds))


@dataclasses.dataclass
class _Left:
    """Messages that nobody waits for, and the memory that they are in."""

    sends: list[Any]
    receives: list[Any]
    memory: Any
    is_stopped: bool = False

    def is_over(self) -> bool:
        """Whether all have been sent, received or taken back."""
        done = [request.Test() for request in (*self.sends, *self.receives)]
        return all(done)  # each is asked: MPI frees those that are complete

    def stop_receiving(self) -> None:
        """Take back what has no message yet; the rest comes to its end."""
        if not self.is_stopped:
            self.is_stopped = True
            for request in self.receives:
                if not request.Test():
                    request.Cancel()


@dataclasses.dataclass
class MpiJob:
    """The processes of an MPI job, after all of them have met.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: A communicator of all processes that is tfdp's own.
        lock: Context manager that is entered around each call of MPI.
        world_ranks: Tuple of int, the MPI rank of each worker.
        library: String, name and version of the MPI library.
        is_complete: Bool, whether all processes have met. Defaults to `False`.
    """

    mpi: Any
    comm: Any
    lock: contextlib.AbstractContextManager
    world_ranks: tuple[int, ...]
    library: str
    is_complete: bool = False

    def __post_init__(self) -> None:
        self._communicators: set[Any] = set()
        # No request is asked after by two threads at once, whatever MPI allows.
        self._rest_lock = threading.Lock()
        # What is under way and no longer waited for, and the memory that it is in.
        self._left: list[_Left] = []
        self._old_comms: list[Any] = []

    @property
    def rank(self) -> int:
        """Int, this process's rank in MPI."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """Int, number of processes."""
        return self.comm.size

    def add(self, communicator: Any) -> None:
        """Hold a communicator, whose memory MPI writes to, until it is closed.

        Args:
            communicator: What has `close(reason)`, which `discard`s it.
        """
        with self._rest_lock:
            self._communicators.add(communicator)

    def discard(self, communicator: Any) -> None:
        """Hold a communicator no more.

        Args:
            communicator: The one that was added.
        """
        with self._rest_lock:
            self._communicators.discard(communicator)

    def close_communicators(self, reason: str) -> None:
        """Close all that are still there.

        Args:
            reason: String, for the other processes.
        """
        with self._rest_lock:
            communicators = list(self._communicators)
        for communicator in communicators:
            communicator.close(reason)

    def leave(
        self,
        sends: Sequence[Any],
        receives: Sequence[Any],
        memory: Any,
        comm: Any = None,
    ) -> None:
        """Stop to wait for messages, which MPI moves in its own time.

        Args:
            sends: Sequence of MPI requests.
            receives: Sequence of MPI requests.
            memory: What holds the memory that MPI reads and writes meanwhile.
            comm: MPI communicator or `None`, one that is used no more.
        """
        with self._rest_lock, self.lock:
            self._left = [each for each in self._left if not each.is_over()]
            self._left.append(_Left(list(sends), list(receives), memory))
            if comm is not None:
                self._old_comms.append(comm)

    def finish_rest(self, seconds: float) -> bool:
        """Move what is still under way, when no process sends anything new.

        Args:
            seconds: Float, how long to try.

        Returns:
            Bool, whether nothing of this process is under way any more.
        """
        end, backoff = time.monotonic() + seconds, Backoff(LONGEST_PAUSE_SECONDS)
        while True:
            with self._rest_lock, self.lock:
                for comm in self._old_comms:
                    _drain(self.mpi, comm)
                for each in self._left:
                    each.stop_receiving()
                self._left = [each for each in self._left if not each.is_over()]
            if not self._left or time.monotonic() >= end:
                return not self._left
            backoff.pause()

    def exchange(
        self,
        facts: Mapping[str, Any],
        timeout_seconds: float | None = None,
        ranks: Sequence[int] | None = None,
        tag: int = _EXCHANGE_TAG,
    ) -> list[dict[str, Any]]:
        """Give facts to all processes and take theirs.

        Args:
            facts: Mapping, of what JSON holds.
            timeout_seconds: Float or `None`, for ever. Defaults to `None`.
            ranks: Sequence of int, the MPI ranks that take part. Defaults to `None`,
                all.
            tag: Int, of MPI's tags. Defaults to that of all ranks.

        Returns:
            List of dicts, in the order of `ranks`.

        Raises:
            TimeoutError: If a process does not come in time.
        """
        members = range(self.size) if ranks is None else ranks
        text = json.dumps(dict(facts)).encode()
        others = [rank for rank in members if rank != self.rank]
        with self.lock:
            sends = [self.comm.Isend(text, dest=r, tag=tag) for r in others]
        self.leave(sends, (), text)
        found = _Inbox(self, tag).wait(others, timeout_seconds)
        return [
            dict(facts) if rank == self.rank else json.loads(found[rank])
            for rank in members
        ]


class _Inbox:
    """Messages of any length with one tag, received as they come.

    Args:
        job: `MpiJob`.
        tag: Int, of MPI's tags.
    """

    def __init__(self, job: MpiJob, tag: int) -> None:
        self._job, self._tag = job, tag
        self._begun: dict[int, tuple[Any, bytearray]] = {}
        self._texts: dict[int, bytes] = {}

    def wait(
        self, ranks: Sequence[int], timeout_seconds: float | None
    ) -> dict[int, bytes]:
        """Wait for a message of each rank, with a warning that names who is late."""
        backoff = Backoff(LONGEST_PAUSE_SECONDS)
        begin = time.monotonic()
        while missing := [rank for rank in ranks if not self._has(rank)]:
            waited = time.monotonic() - begin
            if timeout_seconds is not None and waited >= timeout_seconds:
                raise TimeoutError(
                    f"Waited {timeout_seconds:.0f} s for {_names(missing)} of the MPI "
                    "job, which did not come to make a strategy. Start the same script "
                    "on all ranks, and see how the output of those ends."
                )
            if waited >= _WARN_AFTER_SECONDS:
                user_code.warn(
                    f"Waiting for {_names(missing)} of the MPI job to make a strategy.",
                    once_for=self,
                    topic="waiting",
                )
            backoff.pause()
        return self._texts

    def _has(self, rank: int) -> bool:
        """Move on with the message of a rank; return whether it is there."""
        if rank in self._texts:
            return True
        with self._job.lock:
            if rank not in self._begun:
                status = self._job.mpi.Status()
                message = self._job.comm.Improbe(rank, self._tag, status)
                if message is None:
                    return False
                text = bytearray(status.Get_count(self._job.mpi.BYTE))
                self._begun[rank] = (message.Irecv(text), text)
            request, text = self._begun[rank]
            if not request.Test():
                return False
        self._texts[rank] = bytes(text)
        return True


def _names(ranks: Sequence[int]) -> str:
    few = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {few}{more}"


def _drain(mpi: Any, comm: Any) -> None:
    """Receive what was sent to this process after its last call."""
    status = mpi.Status()
    while comm.Iprobe(status=status):
        waste = bytearray(status.Get_count(mpi.BYTE))
        comm.Recv(waste, source=status.source, tag=status.tag)
