"""Rounds: means over the workers that come in time, without those that are late.

Worker 0 leads, and makes a round whenever it has something to give. It waits for those
that were there in the last one, but only so long. Whoever comes later gets the state
that the leader had before its last round, and that round's mean: both make the state of
now. What it brings counts in the next round, if it has missed no more than one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np

from tfdp.communication.transport.arithmetic import mean_by_samples
from tfdp.communication.transport.communicator import Array, PeerLost, TransportError
from tfdp.communication.transport.frames import Link, receive_frame, send_frame
from tfdp.ground.text import pluralize

# The version of a follower that makes no more rounds until all meet.
_RESTS = -1


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
        least: Int, how many workers make a round, this one among them.
        patience_seconds: Float, how long a round waits for more.
    """

    def __init__(
        self,
        links: Mapping[int, Link],
        least: int,
        patience_seconds: float,
    ) -> None:
        self._links = dict(links)
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
            brought = [(parcel.samples, parcel.arrays) for parcel in parcels]
            mean = mean_by_samples([(samples, arrays), *brought])
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
                    f"A round needs {pluralize(self._least, 'worker')}. {reasons}"
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
                head, arrays = receive_frame(link)
                reply = self._reply_to(rank, _Parcel(**head, arrays=arrays))
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
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._generation = self._version = 0
        self._lock = threading.Lock()

    def exchange(
        self, samples: float, arrays: Sequence[Array], state: Sequence[Array]
    ) -> Reply:
        """Bring arrays to a round, see `RoundLeader.exchange`."""
        del state
        with self._lock:
            self._send(self._version, samples, arrays)
            reply = _receive_reply(self._link)
            self._version = reply.version
            return reply

    def rest(self) -> None:
        """Tell the leader that this worker makes no more rounds until all have met."""
        with self._lock, contextlib.suppress(PeerLost, TransportError):
            self._send(_RESTS, 0.0, [])

    def meet(self) -> None:
        """Begin anew, once all have met and have one state."""
        with self._lock:
            self._generation += 1
            self._version = 0

    def _send(self, version: int, samples: float, arrays: Sequence[Array]) -> None:
        head = {
            "generation": self._generation,
            "version": version,
            "samples": samples,
        }
        send_frame(self._link, head, arrays)


def _send_reply(link: Link, reply: Reply) -> None:
    head = {
        "version": reply.version,
        "is_made": reply.is_made,
        "is_behind": reply.is_behind,
        "num_mean": len(reply.mean),
    }
    send_frame(link, head, [*reply.mean, *reply.state])


def _receive_reply(link: Link) -> Reply:
    head, arrays = receive_frame(link)
    size = head.pop("num_mean")
    return Reply(**head, mean=arrays[:size], state=arrays[size:])
