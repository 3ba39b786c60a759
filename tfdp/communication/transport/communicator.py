"""Collectives of a group of worker processes: the interface and its errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class PeerLost(RuntimeError):
    """Another worker's end of a connection is gone.

    Args:
        rank: Int, the worker that was lost. Not always the one at the other end:
            workers pass on whom they have lost.
        cause: String, what was observed, or the reason that the worker gave.
    """

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(f"Worker {rank} has left its collectives: {cause}")
        self.rank = rank
        self.cause = cause


class TransportError(RuntimeError):
    """A failure that is not another worker's end."""


class TransportClosed(TransportError):
    """This worker has closed the connection itself.

    Args:
        reason: String, or `""`.
    """

    def __init__(self, reason: str) -> None:
        because = f": {reason}" if reason else ""
        super().__init__(f"This worker has closed its connections{because}")
        self.reason = reason


class Communicator(Protocol):
    """Collectives of one group of processes, called in the same order by all of them.

    One thread calls them, one after the other; `close` may be called from any
    thread, at any time, and ends a waiting call at once. After an error the
    communicator is closed. No collective has a deadline: whoever watches over the
    workers calls `close`.

    An `array` is a flat, contiguous and writable NumPy array with the same length and
    dtype on all members: float32, float64, int32, int64, float16 or bfloat16 where it
    is summed, any dtype where it is only moved. Sums are the same to the last bit on
    all members and in each run. `bounds` are `len(ranks) + 1` ascending ints:
    `array[bounds[i]:bounds[i + 1]]` is the part of member `i`, which may be empty.
    `tag`, an int of 64 bits, says which collective this is; members that came with
    another one, or with another size, get `TransportError` instead of a wrong sum.

    Attributes:
        ranks: Tuple of int, the member workers in the order of the parts.
        index: Int, this worker's place in `ranks`.
        name: String, `"tcp"` or the like, for plans and messages.
    """

    ranks: tuple[int, ...]
    index: int
    name: str

    def all_reduce(self, array: Array, tag: int, into: Array | None = None) -> None:
        """Sum over all members, into another array or in place."""

    def reduce_scatter(
        self, array: Array, bounds: Sequence[int], tag: int, into: Array | None = None
    ) -> None:
        """Sum over all members the own part, into another array or in place.

        In place the other parts hold anything afterwards.
        """

    def all_gather(self, array: Array, bounds: Sequence[int], tag: int) -> None:
        """Fill the parts of all other members with theirs."""

    def all_to_all(
        self, sent: Sequence[Array], received: Sequence[Array], tag: int
    ) -> None:
        """Send `sent[i]` to member `i`, and fill `received[i]` with what it sends."""

    def broadcast(self, array: Array, source: int, tag: int) -> None:
        """Copy the array of the member with index `source` to all."""

    def barrier(self, tag: int) -> None:
        """Return when all members have called it."""

    def close(self, reason: str = "") -> None:
        """Close the connections; members that wait get `PeerLost` with the reason."""
