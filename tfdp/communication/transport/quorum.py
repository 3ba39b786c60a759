"""Sums of the first contributions of each step, which do not wait for late workers.

Worker 0 leads. A step closes when `least` workers have contributed, or all; every
worker receives the sum of each step, in order. A worker that is late gets the sums of
the steps that closed without it, and its contributions to them do not count. It may be
`most_behind` steps late, since its sums are kept; then the others wait for it.

    worker: contribute -> leader: add to the open step, or drop -> close the step
    leader: send the sum -> worker: keep it until its own step takes it
"""

from __future__ import annotations

import collections
import dataclasses
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from tfdp.communication.transport.arithmetic import is_half, sum_into
from tfdp.communication.transport.communicator import Array, PeerLost
from tfdp.communication.transport.connections import CloseReason, Connection
from tfdp.communication.transport.frames import receive_frame, send_frame
from tfdp.ground.base.threads import start_thread


@dataclasses.dataclass(frozen=True)
class Share:
    """Contribution of one worker to a step's sum.

    Args:
        rows: Float, number of rows of the global batch that it is computed from.
        total: Float, number of rows of the whole global batch.
        arrays: Sequence of arrays, parts of a sum over the global batch; empty from a
            worker that knows that the step has closed.
    """

    rows: float
    total: float
    arrays: Sequence[Array] = ()


@dataclasses.dataclass(frozen=True)
class QuorumSum:
    """Sum of the first contributions to a step, the same on all workers.

    Args:
        absent: Sequence of ints, ranks of the workers whose contributions it lacks.
        arrays: List of arrays, the sums, scaled from the rows of the contributions to
            those of the global batch.
    """

    absent: Sequence[int]
    arrays: list[Array]


class QuorumMember:
    """Endpoint of a worker in sums that close after enough workers have contributed.

    Base class of `QuorumLeader`, on worker 0, and of `QuorumFollower`.

    Args:
        on_change: Callable, called with the number of sums that have arrived and were
            not taken, whenever this number changes.
    """

    def __init__(self, on_change: Callable[[int], None]) -> None:
        self._on_change = on_change
        self._changed = threading.Condition()
        self._sums: collections.deque[QuorumSum] = collections.deque()
        self._error: Exception | None = None

    def exchange(self, share: Share) -> QuorumSum:
        """Contribute to the next step; wait for its sum, and return it.

        Args:
            share: `Share`, which does not count if the step has closed already.

        Raises:
            RuntimeError: If a worker was lost.
        """
        if self._sums:
            share = dataclasses.replace(share, arrays=())
        try:
            self._contribute(share)
        except Exception as error:  # noqa: BLE001 any failure must end all waits
            self._fail(error)
        with self._changed:
            self._changed.wait_for(lambda: self._sums or self._error)
            if not self._sums:
                assert self._error is not None
                raise self._error
            result = self._sums.popleft()
            self._on_change(len(self._sums))
            return result

    def close(self, reason: str = "", close_reason: CloseReason | None = None) -> None:
        """Close the connections to other workers; subclasses implement this.

        Args:
            reason: String, sent to the other ends. Defaults to `""`, a standard text.
            close_reason: `CloseReason` to send instead, if another worker or an error
                is the cause; or `None`, the default.
        """
        raise NotImplementedError

    def _contribute(self, share: Share) -> None:
        """Send a share to the leader, or add it if this worker leads."""
        raise NotImplementedError

    def _receive(self, result: QuorumSum) -> None:
        """Queue the sum of a step, which `exchange` will return."""
        with self._changed:
            self._sums.append(result)
            self._on_change(len(self._sums))
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        """Record the first error, and close the connections, which ends all waits."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        close_reason = None
        if isinstance(error, PeerLost):
            close_reason = CloseReason(error.rank, error.cause)
        self.close(str(error), close_reason)


class QuorumFollower(QuorumMember):
    """Endpoint of a worker other than 0; it sends its contributions to worker 0.

    Args:
        link: `Connection` to worker 0.
        on_change: Callable, as in `QuorumMember`.
    """

    def __init__(self, link: Connection, on_change: Callable[[int], None]) -> None:
        super().__init__(on_change)
        self._link = link
        start_thread("tfdp quorum", self._read)

    def close(self, reason: str = "", close_reason: CloseReason | None = None) -> None:
        """Close the connection to worker 0.

        Args:
            reason: String, sent to worker 0. Defaults to `""`, a standard text.
            close_reason: `CloseReason` to send instead, if another worker or an error
                is the cause; or `None`, the default.
        """
        self._link.close(reason, close_reason)

    def _contribute(self, share: Share) -> None:
        """Send a share to worker 0."""
        head = {"rows": share.rows, "total": share.total}
        send_frame(self._link, head, share.arrays)

    def _read(self) -> None:
        """Receive sums from worker 0 on a thread, until the connection ends."""
        try:
            while True:
                head, arrays = receive_frame(self._link)
                self._receive(QuorumSum(arrays=arrays, **head))
        except Exception as error:  # noqa: BLE001 any failure must end all waits
            self._fail(error)


class QuorumLeader(QuorumMember):
    """Endpoint of worker 0, which sums the contributions of all workers to each step.

    A step closes once it has enough contributions. Later ones to it, which may be those
    of worker 0 itself, are dropped.

    Args:
        links: Mapping from ranks to `Connection`, to all other workers.
        least: Int, number of contributions that are enough to close a step.
        most_behind: Int, number of steps that a worker may be late before others wait.
        joined: Collection of ints, positions of the arrays that are concatenated along
            the first axis, and not summed.
        on_change: Callable, as in `QuorumMember`.
    """

    def __init__(
        self,
        links: Mapping[int, Connection],
        least: int,
        most_behind: int,
        joined: Collection[int],
        on_change: Callable[[int], None],
    ) -> None:
        super().__init__(on_change)
        self._links = links
        self._least, self._most_behind, self._joined = least, most_behind, joined
        self._lock = threading.Lock()
        self._num_closed = 0
        # The number of contributions of each worker so far shows how late the worker
        # is. `_shares` has those to the open step, keyed by rank.
        self._made = dict.fromkeys([0, *links], 0)
        self._shares: dict[int, Share] = {}
        self._unsent: dict[int, queue.SimpleQueue[QuorumSum | None]]
        self._unsent = {rank: queue.SimpleQueue() for rank in links}
        for rank in links:
            start_thread(f"tfdp quorum from {rank}", self._read, rank)
            start_thread(f"tfdp quorum to {rank}", self._write, rank)

    def close(self, reason: str = "", close_reason: CloseReason | None = None) -> None:
        """Close all links, as `Connection.close` does, and end the sending threads."""
        for rank, link in self._links.items():
            link.close(reason, close_reason)
            self._unsent[rank].put(None)

    def _contribute(self, share: Share) -> None:
        """Add worker 0's next contribution, which may close the step."""
        self._add(0, share)

    def _add(self, rank: int, share: Share) -> None:
        """Add a worker's next contribution, or drop it if its step has closed.

        If the open step then has enough contributions, it is closed, and its sum is
        queued for all workers.

        Args:
            rank: Int, rank of the worker.
            share: `Share`, its contribution.
        """
        with self._lock:
            if self._error is not None:
                return
            if self._made[rank] == self._num_closed:
                self._shares[rank] = share
            self._made[rank] += 1
            if not self._is_complete():
                return
            result = self._close_step()
            for unsent in self._unsent.values():
                unsent.put(result)
            # TensorFlow may write to the arrays that it receives while threads still
            # send the sum to the other workers, so it gets copies.
            own = [np.array(array) for array in result.arrays]
            self._receive(dataclasses.replace(result, arrays=own))

    def _is_complete(self) -> bool:
        """Return whether the open step has enough contributions to close.

        It needs those of all workers; or `least` ones, some with rows, if each worker
        is fewer than `most_behind` steps late.
        """
        if len(self._shares) == len(self._made):
            return True
        num_behind = self._num_closed - min(self._made.values())
        has_rows = any(share.rows for share in self._shares.values())
        is_enough = len(self._shares) >= self._least and has_rows
        return is_enough and num_behind < self._most_behind

    def _close_step(self) -> QuorumSum:
        """Sum the contributions to the open step in the order of ranks; begin the next.

        Returns:
            `QuorumSum`.
        """
        shares = [share for _, share in sorted(self._shares.items())]
        absent = sorted(self._made.keys() - self._shares.keys())
        rows, total = sum(share.rows for share in shares), shares[0].total
        arrays = []
        columns = zip(*(share.arrays for share in shares), strict=True)
        for position, column in enumerate(columns):
            if position in self._joined:
                result = np.concatenate(column)
            else:
                result = np.empty_like(column[0])
                sum_into(result, column)
            if rows not in (0.0, total):
                _scale(result, total / rows)
            arrays.append(result)
        self._shares = {}
        self._num_closed += 1
        return QuorumSum(absent, arrays)

    def _read(self, rank: int) -> None:
        """Add the contributions of a worker on a thread, until its connection ends."""
        try:
            while True:
                head, arrays = receive_frame(self._links[rank])
                self._add(rank, Share(arrays=arrays, **head))
        except Exception as error:  # noqa: BLE001 any failure must end all waits
            self._fail(error)

    def _write(self, rank: int) -> None:
        """Send the sums to a worker on a thread, in order of steps, until `close`."""
        try:
            while (result := self._unsent[rank].get()) is not None:
                send_frame(self._links[rank], {"absent": result.absent}, result.arrays)
        except Exception as error:  # noqa: BLE001 any failure must end all waits
            self._fail(error)


def _scale(array: Array, factor: float) -> None:
    """Multiply an array of floats by a factor, in place; integers stay unchanged."""
    if is_half(array.dtype):
        array[...] = array.astype(np.float32) * np.float32(factor)
    elif np.issubdtype(array.dtype, np.floating):
        array *= array.dtype.type(factor)
