"""Rounds: means over the participants that arrive in time.

A round ends when all participants have contributed; or, with `least`, when that many
have contributed and `patience_seconds` are over. A participant that contributes later
is behind: it gets the state after an earlier round and all means since then, to make up
for the updates that it has missed. Its contribution counts in the next round if it has
missed only one.

Between workers, worker 0 leads: each of its contributions starts a round, and workers
that are behind get its state before the last round.
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
from tfdp.ground.base.threads import start_thread
from tfdp.ground.text import pluralize

# A follower sends this version, which no round has, to pause its rounds until all
# workers synchronize.
_PAUSE_VERSION = -1
# Number of samples and arrays of one participant. The number is the weight of the
# arrays in the mean of a round.
Contribution = tuple[float, Sequence[Array]]


@dataclasses.dataclass(frozen=True)
class Reply:
    """Result of a round for one participant.

    Args:
        version: Int, number of rounds so far.
        is_made: Bool, false if the leader pauses, and there was no round.
        keeps: Bool, whether the participant should send its state after this round, to
            be passed on to participants that are behind or join.
        participants: Int, number of participants that contributed in time; 0 for one
            that is behind.
        means: List of lists of arrays: the mean of this round; for a participant that
            is behind, the means of all rounds since `state`.
        state: List of arrays, the state after some round, for a participant that is
            behind or joins: it replaces the participant's state.
        error: String, reason that a participant cannot join, or `""`.
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
        """Send this reply to the participant over a link."""
        head = {field.name: getattr(self, field.name) for field in _HEAD}
        head |= {"num_means": len(self.means), "num_state": len(self.state)}
        send_frame(link, head, [*self.state, *itertools.chain(*self.means)])

    @classmethod
    def from_frame(cls, head: dict[str, Any], arrays: list[Array]) -> Reply:
        """Create a reply from the frame that `send` has sent.

        Args:
            head: Dict, the head of the frame.
            arrays: List of arrays, those of the frame.
        """
        num_means, num_state = head.pop("num_means"), head.pop("num_state")
        size = (len(arrays) - num_state) // max(1, num_means)
        begins = [num_state + size * number for number in range(num_means)]
        means = [arrays[begin : begin + size] for begin in begins]
        return cls(**head, means=means, state=arrays[:num_state])


_HEAD = [f for f in dataclasses.fields(Reply) if f.name not in ("means", "state")]


@dataclasses.dataclass(eq=False)
class Participant:
    """Participant in rounds of averaging; a process that reconnects is a new one.

    Args:
        index: Int, index among all processes that may participate.
        has_begun: Bool, whether rounds wait for it. Defaults to `True`.
        is_away: Bool, whether it has missed the last round. Defaults to `False`.
        contribution: Tuple of samples and arrays, its contribution to the present
            round, or `None`.
        reply: `Reply` to its last contribution, or `None` before the end of the round.
    """

    index: int
    has_begun: bool = True
    is_away: bool = False
    contribution: Contribution | None = None
    reply: Reply | None = None


class Rounds:
    """Rounds that average the contributions of the connected participants.

    Each participant calls `contribute` on its own thread.

    Args:
        indices: Sequence of ints, indices of the processes that may participate.
        least: Int, least number of contributions of a round, or `None` for one from
            each connected participant.
        patience_seconds: Float, time that a round waits for more contributions.
        leader: `Participant` without whose contribution no round ends, or `None`.
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
        # `_version` counts the rounds. A participant that has missed rounds catches up
        # by `_state`, the state after some round with the number of that round, and
        # `_means`, the means of later rounds with their numbers.
        self._version = 0
        self._state: tuple[int, list[Array]] | None = None
        self._means: list[tuple[int, list[Array]]] = []
        # Contributions of participants that have missed only the previous round. They
        # count in the present round, so that their work is not lost.
        self._late: list[Contribution] = []
        self._is_open = True
        self._deadline = 0.0

    def stop_waiting_for(self, index: int) -> None:
        """Remove a participant that will take part in no further round.

        Args:
            index: Int, index of the participant.
        """
        with self._changed:
            self._may_come.discard(index)
            self._members.pop(index, None)
            self._changed.notify_all()

    def contribute(
        self, member: Participant, version: int, contribution: Contribution
    ) -> Reply:
        """Contribute to a round; return its mean, or the rounds that were missed.

        A contribution that is late by one round counts in the present round.

        Args:
            member: `Participant`.
            version: Int, number of rounds that the participant knows.
            contribution: Tuple of a float, the number of samples, and arrays.

        Returns:
            `Reply`, after the round has ended; or at once if the participant has missed
            rounds, or rounds are paused.

        Raises:
            EOFError: If `member` was removed.
        """
        with self._changed:
            if missed := self._version - version:
                member.is_away = False
                if missed == 1 and self._is_open:
                    self._late.append(contribution)
                return self._catch_up_reply()
            if not self._is_open:
                return Reply(self._version, is_made=False)
            if member is self._leader or not (self._leader or self._waiting()):
                self._deadline = time.monotonic() + self._patience
            member.contribution, member.reply = contribution, None
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
        """Raise `EOFError` if a participant that waits was removed."""
        if self._members.get(member.index) is not member:
            raise EOFError

    def _catch_up_reply(self) -> Reply:
        """Return the reply for a late participant: a state, and the means since it."""
        assert self._state is not None
        version, state = self._state
        means = [mean for number, mean in self._means if number > version]
        return Reply(self._version, means=means, state=state)

    def _waiting(self) -> list[Participant]:
        """Return the participants with a contribution to the present round."""
        return [m for m in self._members.values() if m.contribution is not None]

    def _is_complete(self, *, is_late: bool) -> bool:
        """Return whether the present round can end.

        It needs the leader's contribution, if there is a leader. Without `least` it
        also needs those of all other participants that have begun. With `least`, that
        many contributions (or one from each participant that is left, if they are
        fewer) are enough once the time is over, or if each participant that is missing
        has also missed the previous round.

        Args:
            is_late: Bool, whether the time for further contributions is over.
        """
        if self._leader is not None and self._leader.contribution is None:
            return False
        missing = [
            m for m in self._members.values() if m.has_begun and m.contribution is None
        ]
        if self._least is None:
            return not missing
        # If fewer than `least` participants are left, a round would never get `least`
        # contributions, so one from each of them is enough.
        is_enough = len(self._waiting()) >= min(self._least, len(self._may_come))
        return is_enough and (is_late or all(m.is_away for m in missing))

    def _end_round(self) -> None:
        """Compute the mean of the round, and answer its participants.

        Participants that have not contributed are marked as away.
        """
        waiting = self._waiting()
        in_time = [m.contribution for m in waiting if m.contribution is not None]
        mean = mean_by_samples([*in_time, *self._late])
        self._version += 1
        self._means.append((self._version, mean))
        self._late = []
        keeper = min(member.index for member in waiting)
        for member in self._members.values():
            member.is_away = member.contribution is None
            keeps, count = member.index == keeper, len(waiting)
            self._answer(member, Reply(self._version, True, keeps, count, [mean]))

    def _answer(self, member: Participant, reply: Reply) -> None:
        """Set the reply of a participant if it waits for one, and wake its thread."""
        if member.contribution is not None:
            member.reply, member.contribution = reply, None
            self._changed.notify_all()


class RoundLeader(Rounds):
    """Rounds of averaging between workers, led by this worker, which is worker 0.

    A separate thread answers each other worker.

    Args:
        links: Mapping from ranks to `Link`, to all other workers.
        least: Int, least number of workers of a round, including this one.
        patience_seconds: Float, time that a round waits for more workers.
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
        self._error: Exception | None = None
        # `exchange` holds this lock during a round, so that `pause` begins only after
        # it: a pause within a round would leave its participants without a mean.
        self._lock = threading.Lock()
        for rank, link in links.items():
            name, member = f"tfdp rounds {rank}", self._members[rank]
            start_thread(name, self._serve, member, link)

    def exchange(
        self, samples: float, arrays: Sequence[Array], state: Sequence[Array]
    ) -> Reply:
        """Average arrays with those of the workers that contribute in time.

        Args:
            samples: Float, number of samples, the weight of this worker.
            arrays: Sequence of arrays to average.
            state: Sequence of arrays, this worker's state before the round, which a
                worker that has missed rounds receives.

        Returns:
            `Reply`.

        Raises:
            TransportError: If fewer workers are left than a round needs, or the answer
                to a worker has failed.
        """
        with self._lock, self._changed:
            self._own_state = [np.array(array) for array in state]
            return self.contribute(self._own, self._version, (samples, arrays))

    def pause(self) -> None:
        """Pause rounds until all workers synchronize; waiting workers get no mean."""
        with self._lock, self._changed:
            self._is_open = False
            for member in self._waiting():
                self._answer(member, Reply(self._version, is_made=False))

    def resume(self) -> None:
        """Run rounds again after `pause`, once all workers have synchronized.

        The count of rounds begins at zero, late contributions are dropped, and all
        connected workers take part again.
        """
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
        """Return whether the round can end, never with fewer workers than it needs.

        Args:
            is_late: Bool, whether the time for further contributions is over: then
                those of `least` workers are enough.
        """
        # With fewer workers than `_least`, the threads that serve followers must not
        # end the round: the leader's thread raises an error in `_check` instead.
        assert self._least is not None
        is_enough = len(self._members) >= self._least
        return is_enough and super()._is_complete(is_late=is_late)

    def _check(self, member: Participant) -> None:
        """Raise `TransportError` in the leader if the rounds have failed.

        They have if too few workers are left, or an answer to one raised an error.

        Args:
            member: `Participant` that waits for the end of the round; for a follower,
                nothing is checked.
        """
        assert self._least is not None
        if member is not self._own:
            return
        if self._error is not None:
            raise TransportError(
                f"A round of averaging failed: {self._error!r}"
            ) from self._error
        if len(self._members) < self._least:
            reasons = "; ".join(self._reasons)
            raise TransportError(
                f"A round needs {pluralize(self._least, 'worker')}. {reasons}"
            )

    def _end_round(self) -> None:
        """Record the leader's state before the round, and end the round.

        A follower that has missed rounds receives this state and the round's mean.
        """
        self._state, self._means = (self._version, self._own_state), []
        super()._end_round()

    def _serve(self, member: Participant, link: Link) -> None:
        """Answer the contributions of one follower until its connection ends.

        Args:
            member: `Participant`, the follower.
            link: `Link` to it.
        """
        try:
            while True:
                head, arrays = receive_frame(link)
                reply = self._reply_to(member, **head, arrays=arrays)
                if reply is not None:
                    reply.send(link)
        except (PeerLost, TransportError) as error:
            self._reasons.append(str(error))
            self.stop_waiting_for(member.index)
        except Exception as error:  # noqa: BLE001 the leader's thread raises it
            self._error = error
            self.stop_waiting_for(member.index)

    def _reply_to(
        self,
        member: Participant,
        generation: int,
        version: int,
        samples: float,
        arrays: list[Array],
    ) -> Reply | None:
        """Return the reply to a follower that contributes to a round, or that pauses.

        Args:
            member: `Participant`, the follower.
            generation: Int, number of synchronizations of all workers so far.
            version: Int, number of rounds that the follower has made since the last
                synchronization, or `_PAUSE_VERSION` if it pauses.
            samples: Float, number of samples, the weight of the follower.
            arrays: List of arrays to average.

        Returns:
            `Reply`, after the round; or `None` if the follower pauses: rounds do not
            wait for it until all workers synchronize.
        """
        with self._changed:
            # A follower may return from a synchronization of all workers before worker
            # 0 does. Its message then waits until worker 0 has also counted that
            # synchronization.
            self._changed.wait_for(lambda: generation <= self._generation)
            if version != _PAUSE_VERSION:
                return self.contribute(member, version, (samples, arrays))
            # All workers take part again after they have synchronized. So a pause
            # message of an earlier generation, which has arrived late, is ignored.
            if generation == self._generation:
                member.has_begun = False
                self._may_come.discard(member.index)
                self._changed.notify_all()
            return None


class RoundFollower:
    """Client of the averaging rounds that worker 0 leads, on another worker.

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
        """Contribute arrays to a round of the leader.

        Args:
            samples: Float, number of samples, the weight of this worker.
            arrays: Sequence of arrays to average.
            state: Not used; an argument that `RoundLeader.exchange` also has.

        Returns:
            `Reply` of the leader, after the round.
        """
        del state
        with self._lock:
            self._send(self._version, samples, arrays)
            reply = Reply.from_frame(*receive_frame(self._link))
            self._version = reply.version
            return reply

    def pause(self) -> None:
        """Notify the leader that this worker contributes nothing until `resume`.

        Rounds then do not wait for it. `resume` is called once all workers have
        synchronized. A lost connection is ignored.
        """
        with self._lock, contextlib.suppress(PeerLost, TransportError):
            self._send(_PAUSE_VERSION, 0.0, [])

    def resume(self) -> None:
        """Take part in rounds again after `pause`, once all workers have synchronized.

        The count of rounds begins at zero.
        """
        with self._lock:
            self._generation += 1
            self._version = 0

    def _send(self, version: int, samples: float, arrays: Sequence[Array]) -> None:
        """Send the leader a contribution to a round, or notify it of a pause.

        Args:
            version: Int, number of rounds so far, or `_PAUSE_VERSION`.
            samples: Float, number of samples, the weight of this worker.
            arrays: Sequence of arrays to average.
        """
        head = {
            "generation": self._generation,
            "version": version,
            "samples": samples,
        }
        send_frame(self._link, head, arrays)
