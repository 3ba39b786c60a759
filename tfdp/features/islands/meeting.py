"""A meeting: means over the islands that come in time, and the state for who joins.

Nobody trains here. An exchange is over when all islands that are there have come; or,
with `least`, when as many have come and `patience_seconds` are over. One that comes
later is behind: it gets the state that another one has kept here, and the means since,
and so makes the outer steps that it has missed. What it brings counts in the next
exchange, if it has missed no more than one.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from typing import Any

from tfdp.communication.transport.arithmetic import mean_by_samples
from tfdp.communication.transport.communicator import Array

Message = tuple[dict[str, Any], list[Array]]


@dataclasses.dataclass
class Parcel:
    """What an island brings to an exchange, and the reply once there is one.

    Args:
        version: Int, exchanges that it has made.
        samples: Float, by which it counts.
        arrays: List of arrays.
        reply: Tuple of the head and the arrays of the reply, or `None`.
    """

    version: int
    samples: float
    arrays: list[Array]
    reply: Message | None = None


@dataclasses.dataclass(eq=False)
class Participant:
    """An island while it is there; one that comes back is another member.

    Args:
        index: Int, the island's.
        has_begun: Bool, whether it has joined, and is waited for.
        is_away: Bool, whether it has missed the last exchange.
        parcel: `Parcel` that waits for the end of an exchange, or `None`.
    """

    index: int
    has_begun: bool = False
    is_away: bool = False
    parcel: Parcel | None = None


class Meeting:
    """The exchanges of one `fit` of all islands.

    Args:
        expected: Set of ints, islands that may come, for which the first ones wait.
        join_seconds: Float, for how long.
    """

    def __init__(self, expected: set[int], join_seconds: float) -> None:
        # Who has not come yet; and who may come, or come again.
        self._expected, self._may_come = set(expected), set(expected)
        self._begins_by = time.monotonic() + join_seconds
        self._changed = threading.Condition()
        self._is_closed = False
        self._members: dict[int, Participant] = {}
        # Of those who wait for the first exchange, with their updates.
        self._first_states: dict[int, tuple[int, list[Array]]] = {}
        self._settings: dict[str, Any] | None = None
        # Exchanges so far; the state after one of them, and the means since.
        self._version = 0
        self._state: tuple[int, list[Array]] | None = None
        self._means: list[tuple[int, list[Array]]] = []
        self._late: list[Parcel] = []
        self._deadline = 0.0

    def close(self) -> None:
        """End all that waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def is_over(self) -> bool:
        """Bool, whether nobody is there, and nobody will come."""
        with self._changed:
            return not self._members and not self._may_come

    def expect_no_more(self, index: int) -> None:
        """Take note that an island is through, or does not come any more."""
        with self._changed:
            self._expected.discard(index)
            self._may_come.discard(index)
            self._members.pop(index, None)
            self._changed.notify_all()

    def new_member(self, index: int) -> Participant:
        """Let an island in, in place of what it was before."""
        member = Participant(index)
        with self._changed:
            self._members[index] = member
            self._may_come.add(index)
            self._changed.notify_all()
        return member

    def leave(self, member: Participant) -> None:
        """Take note that an island has gone: nobody waits for it any more."""
        with self._changed:
            if self._members.get(member.index) is member:
                del self._members[member.index]
            member.parcel = None
            self._changed.notify_all()

    def join(
        self,
        member: Participant,
        settings: dict[str, Any],
        updates: int,
        state: list[Array],
    ) -> Message:
        """Return the state from which an island goes on, once the first ones are there.

        Args:
            member: `Participant`.
            settings: Dict, which all have to share.
            updates: Int, those that it has made before, as where it is resumed.
            state: List of arrays, its own.
        """
        with self._changed:
            self._settings = self._settings or settings
            if settings != self._settings:
                return {"error": _difference(settings, self._settings)}, []
            self._expected.discard(member.index)
            self._first_states[member.index] = updates, state
            self._changed.notify_all()
            self._changed.wait_for(self._may_begin, self._begins_by - time.monotonic())
            if self._state is None:
                self._state = 0, self._furthest()
            self._first_states.pop(member.index, None)
            member.has_begun = True
            return self._standing()

    def exchange(self, member: Participant, parcel: Parcel) -> Message:
        """Return the mean over those that come, or what a late one has missed.

        Args:
            member: `Participant`.
            parcel: `Parcel`.

        Raises:
            EOFError: If the meeting is closed, or the island has come a second time.
        """
        with self._changed:
            missed = self._version - parcel.version
            if missed:
                member.is_away = False
                if missed == 1:
                    self._late.append(parcel)
                return self._standing(is_behind=True)
            if not self._waiting():
                self._deadline = time.monotonic() + self._setting("patience_seconds")
            member.parcel = parcel
            self._changed.notify_all()
            while parcel.reply is None:
                if self._is_closed or self._members.get(member.index) is not member:
                    raise EOFError
                left = self._deadline - time.monotonic()
                if self._is_complete(is_late=left <= 0):
                    self._end_exchange()
                else:
                    self._changed.wait(left if left > 0 else None)
            return parcel.reply

    def keep(self, version: int, state: list[Array]) -> None:
        """Keep the state after an exchange, for those who join.

        Args:
            version: Int, the number of the exchange.
            state: List of arrays.
        """
        with self._changed:
            if self._state is None or version > self._state[0]:
                self._state = version, state
                self._means = [pair for pair in self._means if pair[0] > version]

    def _furthest(self) -> list[Array]:
        """The state with most updates, and of several that of the first island."""
        states = self._first_states
        return states[max(states, key=lambda index: (states[index][0], -index))][1]

    def _may_begin(self) -> bool:
        return self._is_closed or self._state is not None or not self._expected

    def _standing(self, **more: Any) -> Message:
        """The state that is kept, and the means since: together the state of now."""
        assert self._state is not None
        version, state = self._state
        means = [mean for number, mean in self._means if number > version]
        head = {
            "version": self._version,
            "num_state": len(state),
            "num_mean": len(means[0]) if means else 0,
            **more,
        }
        return head, [*state, *(array for mean in means for array in mean)]

    def _waiting(self) -> list[Participant]:
        return [m for m in self._members.values() if m.parcel is not None]

    def _is_complete(self, *, is_late: bool) -> bool:
        least = self._setting("least")
        missing = [
            m for m in self._members.values() if m.has_begun and m.parcel is None
        ]
        if least is None:
            return not missing
        # Fewer where no more will come.
        is_enough = len(self._waiting()) >= min(least, len(self._may_come))
        return is_enough and (is_late or all(m.is_away for m in missing))

    def _end_exchange(self) -> None:
        waiting = self._waiting()
        parcels = [m.parcel for m in waiting if m.parcel is not None] + self._late
        mean = mean_by_samples([(parcel.samples, parcel.arrays) for parcel in parcels])
        self._version += 1
        self._means.append((self._version, mean))
        keeper = min(member.index for member in waiting)
        for member in self._members.values():
            member.is_away = member.parcel is None
            if member.parcel is not None:
                head = {
                    "version": self._version,
                    "participants": len(waiting),
                    "keeps": member.index == keeper,
                }
                member.parcel.reply, member.parcel = (head, mean), None
        self._late = []
        self._changed.notify_all()

    def _setting(self, name: str) -> Any:
        assert self._settings is not None
        return self._settings[name]


def _difference(own: dict[str, Any], others: dict[str, Any]) -> str:
    """The first setting in which an island differs from the others."""
    for name, value in others.items():
        if own.get(name) != value:
            own_text, text = json.dumps(own.get(name)), json.dumps(value)
            return f"{name} is {own_text} here, and {text} on others"
    return f"it has more settings: {', '.join(sorted(set(own) - set(others)))}"
