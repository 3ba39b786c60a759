"""Rounds: means over the workers that come in time, without those that are late.

Worker 0 leads, and makes a round whenever it has something to give. It waits for those
that were there in the last one, but only so long. Whoever comes later gets the state
that the leader had before its last round, and that round's mean: both make the state of
now. What it brings counts in the next round, if it has missed no more than one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from tfdp.cluster.words import counted
from tfdp.transport.communicator import Array, PeerLost, TransportError
from tfdp.transport.schedules import bytes_of

# Generation, version and samples of what a follower brings.
_PARCEL = struct.Struct("!qqd")
# Version, and whether a round was made and the state follows.
_REPLY = struct.Struct("!q??")
# The version of a follower that makes no more rounds until all meet.
_RESTS = -1


class Link(Protocol):
    """A connection to another worker."""

    def send(self, *buffers: bytes | memoryview) -> None:
        """Send buffers, one after the other."""

    def receive_into(self, view: bytearray | memoryview) -> None:
        """Fill a buffer."""


@dataclasses.dataclass(frozen=True)
class Reply:
    """The end of a round for one worker.

    Args:
        version: Int, rounds that have been made since all met.
        is_made: Bool, whether there was a round: not while the leader rests.
        is_behind: Bool, whether the worker has missed rounds before.
        mean: List of arrays, the mean of those who came, by samples.
        state: List of arrays, the state before the round, for whoever is behind.
    """

    version: int
    is_made: bool = False
    is_behind: bool = False
    mean: list[Array] = dataclasses.field(default_factory=list)
    state: list[Array] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Parcel:
    """What a follower brings to a round, and the reply once there is one."""

    generation: int
    version: int
    samples: float
    arrays: list[Array]
    reply: Reply | None = None


class RoundLeader:
    """The end of worker 0.

    Args:
        links: Mapping from ranks to `Link`, to all other workers.
        shapes: Sequence of arrays like those that a follower brings.
        least: Int, how many workers make a round, this one among them.
        patience_seconds: Float, how long a round waits for more.
    """

    def __init__(
        self,
        links: Mapping[int, Link],
        shapes: Sequence[Array],
        least: int,
        patience_seconds: float,
    ) -> None:
        self._links = dict(links)
        self._shapes = list(shapes)
        self._least, self._patience = least, patience_seconds
        self._generation = self._version = 0
        self._is_open = True
        self._waiting: dict[int, _Parcel] = {}
        self._late: list[_Parcel] = []
        self._last: tuple[list[Array], list[Array]] = [], []
        # Who has missed the last round, makes none until all meet, or has gone.
        self._away: set[int] = set()
        self._resting: set[int] = set()
        self._gone: dict[int, str] = {}
        self._changed = threading.Condition()
        # Held during a round: what rests begins after it.
        self._lock = threading.Lock()
        for rank, link in links.items():
            threading.Thread(
                target=self._serve,
                args=(rank, link),
                name=f"tfdp rounds {rank}",
                daemon=True,
            ).start()

    def exchange(
        self, samples: float, arrays: Sequence[Array], state: Sequence[Array]
    ) -> Reply:
        """Make a round with those who come.

        Args:
            samples: Float, by which this worker counts.
            arrays: Sequence of arrays.
            state: Sequence of arrays, the state before the round.

        Returns:
            `Reply`.

        Raises:
            TransportError: If fewer workers are left than make a round.
        """
        with self._lock, self._changed:
            self._wait_for_parcels()
            parcels = [*self._waiting.values(), *self._late]
            mean = _mean([(samples, arrays)] + [(p.samples, p.arrays) for p in parcels])
            self._version += 1
            self._last = mean, [np.array(array) for array in state]
            self._away = set(self._links) - set(self._waiting)
            reply = Reply(self._version, is_made=True, mean=mean)
            self._answer(reply)
            self._late = []
            return reply

    def rest(self) -> None:
        """Make no more rounds until all have met; those who come go on without."""
        with self._lock, self._changed:
            self._is_open = False
            self._answer(Reply(self._version))

    def meet(self) -> None:
        """Begin anew, once all have met and have one state."""
        with self._changed:
            self._generation += 1
            self._version = 0
            self._is_open = True
            self._late = []
            self._away, self._resting = set(), set()
            self._changed.notify_all()

    def _answer(self, reply: Reply) -> None:
        for parcel in self._waiting.values():
            parcel.reply = reply
        self._waiting = {}
        self._changed.notify_all()

    def _wait_for_parcels(self) -> None:
        deadline = time.monotonic() + self._patience
        while True:
            can_come = set(self._links) - self._resting - set(self._gone)
            if len(self._links) - len(self._gone) + 1 < self._least:
                reasons = "; ".join(self._gone.values())
                raise TransportError(
                    f"A round needs {counted(self._least, 'worker')}. {reasons}"
                )
            least = min(self._least, len(can_come) + 1)
            is_enough = len(self._waiting) + 1 >= least
            left = deadline - time.monotonic()
            if is_enough and (left <= 0 or can_come - self._away <= set(self._waiting)):
                return
            self._changed.wait(left if left > 0 else None)

    def _serve(self, rank: int, link: Link) -> None:
        """Answer one follower, parcel by parcel, until it has gone."""
        try:
            while True:
                parcel = _receive_parcel(link, self._shapes)
                reply = self._reply_to(rank, parcel)
                if reply is not None:
                    _send_reply(link, reply)
        except (PeerLost, TransportError) as error:
            with self._changed:
                self._gone[rank] = str(error)
                self._changed.notify_all()

    def _reply_to(self, rank: int, parcel: _Parcel) -> Reply | None:
        with self._changed:
            # It may be through with a meeting that this worker is still in.
            self._changed.wait_for(lambda: parcel.generation <= self._generation)
            if parcel.version == _RESTS:
                # Read late, it is of a meeting that is over.
                if parcel.generation == self._generation:
                    self._resting.add(rank)
                    self._changed.notify_all()
                return None
            missed = self._version - parcel.version
            if missed:
                self._away.discard(rank)
                if missed == 1 and self._is_open:
                    self._late.append(parcel)
                mean, state = self._last
                return Reply(self._version, True, True, mean, state)
            if not self._is_open:
                return Reply(self._version)
            self._waiting[rank] = parcel
            self._changed.notify_all()
            self._changed.wait_for(lambda: parcel.reply is not None)
            return parcel.reply


class RoundFollower:
    """The end of any other worker.

    Args:
        link: `Link` to worker 0.
        shapes: Sequence of arrays like those that it brings.
        state_shapes: Sequence of arrays like those of the state.
    """

    def __init__(
        self, link: Link, shapes: Sequence[Array], state_shapes: Sequence[Array]
    ) -> None:
        self._link = link
        self._shapes, self._state_shapes = list(shapes), list(state_shapes)
        self._generation = self._version = 0
        self._lock = threading.Lock()

    def exchange(
        self, samples: float, arrays: Sequence[Array], state: Sequence[Array]
    ) -> Reply:
        """Bring arrays to a round, see `RoundLeader.exchange`."""
        del state
        with self._lock:
            head = _PARCEL.pack(self._generation, self._version, samples)
            self._link.send(head, *map(_view, arrays))
            reply = _receive_reply(self._link, self._shapes, self._state_shapes)
            self._version = reply.version
            return reply

    def rest(self) -> None:
        """Tell the leader that this worker makes no more rounds until all have met."""
        with self._lock, contextlib.suppress(PeerLost, TransportError):
            self._link.send(_PARCEL.pack(self._generation, _RESTS, 0.0))

    def meet(self) -> None:
        """Begin anew, once all have met and have one state."""
        with self._lock:
            self._generation += 1
            self._version = 0


def _mean(parts: Sequence[tuple[float, Sequence[Array]]]) -> list[Array]:
    """Mean of arrays, each by its samples."""
    total = sum(samples for samples, _ in parts) or 1.0
    shares = [samples / total for samples, _ in parts]
    means = []
    for column in zip(*(arrays for _, arrays in parts), strict=True):
        mean = np.zeros_like(column[0])
        for share, array in zip(shares, column, strict=True):
            mean += share * array
        means.append(mean)
    return means


def _receive_parcel(link: Link, shapes: Sequence[Array]) -> _Parcel:
    head = bytearray(_PARCEL.size)
    link.receive_into(head)
    generation, version, samples = _PARCEL.unpack(head)
    arrays = [] if version == _RESTS else _receive_arrays(link, shapes)
    return _Parcel(generation, version, samples, arrays)


def _send_reply(link: Link, reply: Reply) -> None:
    head = _REPLY.pack(reply.version, reply.is_made, reply.is_behind)
    mean = reply.mean if reply.is_made else []
    state = reply.state if reply.is_behind else []
    link.send(head, *map(_view, [*mean, *state]))


def _receive_reply(
    link: Link, shapes: Sequence[Array], state_shapes: Sequence[Array]
) -> Reply:
    head = bytearray(_REPLY.size)
    link.receive_into(head)
    version, is_made, is_behind = _REPLY.unpack(head)
    mean = _receive_arrays(link, shapes if is_made else [])
    state = _receive_arrays(link, state_shapes if is_behind else [])
    return Reply(version, is_made, is_behind, mean, state)


def _receive_arrays(link: Link, shapes: Sequence[Array]) -> list[Array]:
    arrays = [np.empty_like(shape) for shape in shapes]
    for array in arrays:
        link.receive_into(_view(array))
    return arrays


def _view(array: Array) -> memoryview:
    return bytes_of(np.ascontiguousarray(array).reshape(-1))
