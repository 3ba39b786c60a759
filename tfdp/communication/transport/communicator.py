"""Interface of collectives of a group of worker processes, and its errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class PeerLost(RuntimeError):
    """Error: another worker has closed its connections, or its process has ended.

    Args:
        rank: Int, the worker that was lost. It may be another worker than the one at
            the connection's other end, which passes on the rank of a worker that it
            lost.
        cause: String, the observed symptom, or the reason from the worker.
    """

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(f"Worker {rank} has left its collectives: {cause}")
        self.rank = rank
        self.cause = cause


class TransportError(RuntimeError):
    """Error of communication without a lost worker, as when collectives differ."""


class TransportClosed(TransportError):
    """Error: this worker has closed the connection itself.

    Args:
        reason: String, the reason, or `""`.
    """

    def __init__(self, reason: str) -> None:
        because = f": {reason}" if reason else ""
        super().__init__(f"This worker has closed its connections{because}")
        self.reason = reason


class Communicator(Protocol):
    """Collectives of one group of processes, called in the same order by all of them.

    One thread calls them, one after another; `close` may be called from any thread, at
    any time, and ends a waiting call at once. After an error the communicator is
    closed. No collective has a timeout: the watchdog calls `close` if a worker is lost.

    An `array` is a flat, contiguous and writable NumPy array with the same length and
    dtype on all members: float32, float64, int32, int64, float16 or bfloat16 for sums,
    any dtype for copies. Sums are bitwise equal on all members and in each run.
    `bounds` are `len(ranks) + 1` ascending ints: `array[bounds[i]:bounds[i + 1]]` is
    the part of member `i`, which may be empty. `tag`, an int of 64 bits, identifies the
    collective; members whose tags or sizes differ get `TransportError` instead of a
    wrong sum.

    Attributes:
        ranks: Tuple of int, the member workers in the order of the parts.
        index: Int, this worker's index in `ranks`.
        name: String, such as `"tcp"`, for plans and messages.
    """

    ranks: tuple[int, ...]
    index: int
    name: str

    def all_reduce(self, array: Array, tag: int, into: Array | None = None) -> None:
        """Sum over all members, into another array or in place.

        Args:
            array: Flat array to sum.
            tag: Int, identity of the collective, the same on all members.
            into: Flat array for the sum, or `None` for `array`. Defaults to `None`.
        """

    def reduce_scatter(
        self, array: Array, bounds: Sequence[int], tag: int, into: Array | None = None
    ) -> None:
        """Sum this member's part over all members, into another array or in place.

        In place, the values of the other parts are undefined afterwards.

        Args:
            array: Flat array to sum.
            bounds: Sequence of ints, the bounds of the members' parts.
            tag: Int, identity of the collective, the same on all members.
            into: Flat array for the sum of the part, or `None` for the part of `array`.
                Defaults to `None`.
        """

    def all_gather(self, array: Array, bounds: Sequence[int], tag: int) -> None:
        """Receive the parts of all other members into `array`.

        Args:
            array: Flat array, with this member's part.
            bounds: Sequence of ints, the bounds of the members' parts.
            tag: Int, identity of the collective, the same on all members.
        """

    def all_to_all(
        self, sent: Sequence[Array], received: Sequence[Array], tag: int
    ) -> None:
        """Send `sent[i]` to member `i`, and receive from it into `received[i]`.

        Args:
            sent: Sequence of flat arrays, one for each member.
            received: Sequence of flat arrays, one for each member.
            tag: Int, identity of the collective, the same on all members.
        """

    def broadcast(self, array: Array, source: int, tag: int) -> None:
        """Copy the array of the member with index `source` to all members.

        Args:
            array: Flat array, sent or received.
            source: Int, index of the member that sends.
            tag: Int, identity of the collective, the same on all members.
        """

    def barrier(self, tag: int) -> None:
        """Wait until all members have called this with the same `tag`, an int."""

    def close(self, reason: str = "") -> None:
        """Close the connections; waiting members get `PeerLost` with the reason."""
