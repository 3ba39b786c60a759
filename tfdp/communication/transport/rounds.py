"""Rounds: means over those that come in time, without those that are late.

A round is over when all that are there have come; or, with `least`, when as many have
come and `patience_seconds` are over. One that comes later is behind: it gets the state
after some round, and the means since, and so makes the updates that it has missed. What
it brings counts in the next round, if it has missed no more than one.

Between workers, worker 0 leads: it makes a round whenever it has something to give, and
its state before the last round is what those who are behind get.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdp.communication.transport.arithmetic import mean_by_samples
from tfdp.communication.transport.communicator import Array, PeerLost, TransportError
from tfdp.communication.transport.frames import Link, receive_frame, send_frame
from tfdp.ground.text import pluralize

# The version of a follower that makes no more rounds until all meet.
_RESTS = -1
# Samples, by which it counts, and arrays.
Brought = tuple[float, Sequence[Array]]


@dataclasses.dataclass(frozen=True)
class Reply:
    """The end of a round for one participant.

    Args:
        version: Int, rounds so far.
        is_made: Bool, whether there was a round: not while the leader rests.
        keeps: Bool, whether the participant is to hand in the state that follows.
        participants: Int, who came in time; 0 for one that is behind.
        means: List of lists of arrays: the mean of this round; for one that is behind
            those of all rounds since `state`.
        state: List of arrays, the state after some round, for one that is behind or
            joins, whose own it replaces.
        error: String, why a participant cannot join.
    """

    version: int
    is_made: bool = True
    keeps: bool = False
    participants: int = 0
    means: list[list[Array]] = dataclasses.field(default_factory=list)
    state: list[Array] = dataclasses.field(default_factory=list)
    error: str = ""

    @property
    def mean(self) -> list[Array]:
        """List of arrays, the mean of the last round."""
        return self.means[-1]

    @property
    def is_behind(self) -> bool:
        """Bool, whether the participant has missed rounds."""
        return bool(self.state)

    def send(self, link: Link) -> None:
        """Send it to the participant."""
        head = {field.name: getattr(self, field.name) for field in _HEAD}
        head |= {"num_means": len(self.means), "num_state": len(self.state)}
        send_frame(link, head, [*self.state, *itertools.chain(*self.means)])

    @classmethod
    def from_frame(cls, head: dict[str, Any], arrays: list[Array]) -> Reply:
        """Read what `send` has sent."""
        num_means, num_state = head.pop("num_means"), head.pop("num_state")
        size = (len(arrays) - num_state) // max(1, num_means)
        begins = [num_state + size * number for number in range(num_means)]
        means = [arrays[begin : begin + size] for begin in begins]
        return cls(**head, means=means, state=arrays[:num_state])


_HEAD = [f for f in dataclasses.fields(Reply) if f.name not in ("means", "state")]


@dataclasses.dataclass(eq=False)
class Participant:
    """Who makes rounds while it is there; one that comes back is another.

    Args:
        index: Int.
        has_begun: Bool, whether it is waited for.
        is_away: Bool, whether it has missed the last round.
        brought: Tuple of samples and arrays that waits for the end of a round, or
            `None`.
        reply: `Reply`, once there is one to what it has brought last.
    """

    index: int
    has_begun: bool = True
    is_away: bool = False
    brought: Brought | None = None
    reply: Reply | None = None


class Rounds:
    """The rounds of those that are there; each is called on a thread of its own.

    Args:
        indices: Sequence of ints, who may come.
        least: Int, how many make a round, or `None`: all that are there.
        patience_seconds: Float, how long a round waits for more.
        leader: `Participant` without whom there is no round, or `None`.
    """

    def __init__(
        self,
        indices: Sequence[int],
        least: int | None = None,
        patience_seconds: float = 0.0,
        leader: Participant | None = None,
    ) -> None:
        self._least, self._patience, self._leader = least, patience_seconds, leader
        self._changed = threading.Condition()
        self._members: dict[int, Participant] = {}
        self._may_come = set(indices)
        # Rounds so far; the state after one of them, and the means since.
        self._version = 0
        self._state: tuple[int, list[Array]] | None = None
        self._means: list[tuple[int, list[Array]]] = []
        self._late: list[Brought] = []
        self._is_open = True
        self._deadline = 0.0

    def expect_no_more(self, index: int) -> None:
        """Take note that a participant does not come any more.

        Args:
            index: Int.
        """
        with self._changed:
            self._may_come.discard(index)
            self._members.pop(index, None)
            self._changed.notify_all()

    def bring(self, member: Participant, version: int, brought: Brought) -> Reply:
        """Return the mean over those that come, or what a late one has missed.

        Args:
            member: `Participant`.
            version: Int, rounds that it has made.
            brought: Tuple of a float, the samples by which it counts, and arrays.

        Raises:
            EOFError: If `member` is not waited for any more.
        """
        with self._changed:
            if missed := self._version - version:
                member.is_away = False
                if missed == 1 and self._is_open:
                    self._late.append(brought)
                return self._standing()
            if not self._is_open:
                return Reply(self._version, is_made=False)
            if member is self._leader or not (self._leader or self._waiting()):
                self._deadline = time.monotonic() + self._patience
            member.brought, member.reply = brought, None
            self._changed.notify_all()
            while member.reply is None:
                self._check(member)
                left = self._deadline - time.monotonic()
                if self._is_complete(is_late=left <= 0):
                    self._end_round()
                else:
                    self._changed.wait(left if left > 0 else None)
            return member.reply

    def _check(self, member: Participant) -> None:
        """Raise an error where a participant would wait in vain."""
        if self._members.get(member.index) is not member:
            raise EOFError

    def _standing(self) -> Reply:
        """The state that is kept, and the means since: together the state of now."""
        assert self._state is not None
        version, state = self._state
        means = [mean for number, mean in self._means if number > version]
        return Reply(self._version, means=means, state=state)

    def _waiting(self) -> list[Participant]:
        return [m for m in self._members.values() if m.brought is not None]

    def _is_complete(self, *, is_late: bool) -> bool:
        if self._leader is not None and self._leader.brought is None:
            return False
        missing = [
            m for m in self._members.values() if m.has_begun and m.brought is None
        ]
        if self._least is None:
            return not missing
        # Fewer where no more will come.
        is_enough = len(self._waiting()) >= min(self._least, len(self._may_come))
        return is_enough and (is_late or all(m.is_away for m in missing))

    def _end_round(self) -> None:
        waiting = self._waiting()
        brought = [m.brought for m in waiting if m.brought is not None]
        mean = mean_by_samples([*brought, *self._late])
        self._version += 1
        self._means.append((self._version, mean))
        self._late = []
        keeper = min(member.index for member in waiting)
        for member in self._members.values():
            member.is_away = member.brought is None
            keeps, count = member.index == keeper, len(waiting)
            self._answer(member, Reply(self._version, True, keeps, count, [mean]))

    def _answer(self, member: Participant, reply: Reply) -> None:
        if member.brought is not None:
            member.reply, member.brought = reply, None
            self._changed.notify_all()


class RoundLeader(Rounds):
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
        self._own = Participant(0)
        super().__init__([0, *links], least, patience_seconds, self._own)
        self._members = {0: self._own, **{rank: Participant(rank) for rank in links}}
        self._generation = 0
        self._own_state: list[Array] = []
        self._reasons: list[str] = []
        # Held during a round: what rests begins after it.
        self._lock = threading.Lock()
        for rank, link in links.items():
            threading.Thread(
                target=self._serve,
                args=(self._members[rank], link),
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
            self._own_state = [np.array(array) for array in state]
            return self.bring(self._own, self._version, (samples, arrays))

    def rest(self) -> None:
        """Make no more rounds until all have met; those who come go on without."""
        with self._lock, self._changed:
            self._is_open = False
            for member in self._waiting():
                self._answer(member, Reply(self._version, is_made=False))

    def meet(self) -> None:
        """Begin anew, once all have met and have one state."""
        with self._changed:
            self._generation += 1
            self._version = 0
            self._is_open = True
            self._late = []
            self._may_come = set(self._members)
            for member in self._members.values():
                member.has_begun, member.is_away = True, False
            self._changed.notify_all()

    def _is_complete(self, *, is_late: bool) -> bool:
        # A follower's thread ends no round of too few: the leader's raises.
        assert self._least is not None
        is_enough = len(self._members) >= self._least
        return is_enough and super()._is_complete(is_late=is_late)

    def _check(self, member: Participant) -> None:
        assert self._least is not None
        if member is self._own and len(self._members) < self._least:
            reasons = "; ".join(self._reasons)
            raise TransportError(
                f"A round needs {pluralize(self._least, 'worker')}. {reasons}"
            )

    def _end_round(self) -> None:
        self._state, self._means = (self._version, self._own_state), []
        super()._end_round()

    def _serve(self, member: Participant, link: Link) -> None:
        """Answer one follower, round by round, until it has gone."""
        try:
            while True:
                head, arrays = receive_frame(link)
                reply = self._reply_to(member, **head, arrays=arrays)
                if reply is not None:
                    reply.send(link)
        except (PeerLost, TransportError) as error:
            self._reasons.append(str(error))
            self.expect_no_more(member.index)

    def _reply_to(
        self,
        member: Participant,
        generation: int,
        version: int,
        samples: float,
        arrays: list[Array],
    ) -> Reply | None:
        with self._changed:
            # It may be through with a meeting that this worker is still in.
            self._changed.wait_for(lambda: generation <= self._generation)
            if version != _RESTS:
                return self.bring(member, version, (samples, arrays))
            # Read late, it is of a meeting that is over.
            if generation == self._generation:
                member.has_begun = False
                self._may_come.discard(member.index)
                self._changed.notify_all()
            return None


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
            reply = Reply.from_frame(*receive_frame(self._link))
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
