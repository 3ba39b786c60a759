"""The hub: the process that islands connect to, one meeting for each `fit`.

Nobody trains here: the state that an island which is behind gets is what another one
has kept here, see `tfdp.communication.transport.rounds`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import sys
import threading
import time
from collections.abc import Collection
from typing import Any

from tfdp.communication.connection.acceptor import Acceptor
from tfdp.communication.connection.handshake import Authenticated
from tfdp.communication.transport.communicator import Array
from tfdp.communication.transport.frames import send_frame
from tfdp.communication.transport.rounds import Participant, Reply, Rounds
from tfdp.features.islands.hub_connection import (
    GONE,
    SERVICE,
    SILENT_SECONDS,
    HubConnection,
)

# How long those who come first wait for the others, which may still start.
JOIN_SECONDS = 120.0


class Meeting(Rounds):
    """The rounds of one `fit` of all islands, and the state for who joins.

    Args:
        expected: Set of ints, islands that may come, for which the first ones wait.
        join_seconds: Float, for how long.
    """

    def __init__(self, expected: set[int], join_seconds: float) -> None:
        super().__init__(sorted(expected))
        # Who has not come yet, beside who may come, or come again.
        self._expected = set(expected)
        self._begins_by = time.monotonic() + join_seconds
        self._is_closed = False
        # Of those who wait for the first exchange, with their updates.
        self._first_states: dict[int, tuple[int, list[Array]]] = {}
        self._settings: dict[str, Any] | None = None

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
            super().expect_no_more(index)

    def new_member(self, index: int) -> Participant:
        """Let an island in, in place of what it was before."""
        member = Participant(index, has_begun=False)
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
            member.brought = None
            self._changed.notify_all()

    def join(
        self,
        member: Participant,
        settings: dict[str, Any],
        updates: int,
        state: list[Array],
    ) -> Reply:
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
                return Reply(0, error=_difference(settings, self._settings))
            self._least = settings["least"]
            self._patience = settings["patience_seconds"]
            self._expected.discard(member.index)
            self._first_states[member.index] = updates, state
            self._changed.notify_all()
            self._changed.wait_for(self._may_begin, self._begins_by - time.monotonic())
            if self._state is None:
                self._state = 0, self._furthest()
            self._first_states.pop(member.index, None)
            member.has_begun = True
            return self._standing()

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

    def _check(self, member: Participant) -> None:
        if self._is_closed:
            raise EOFError
        super()._check(member)


def _difference(own: dict[str, Any], others: dict[str, Any]) -> str:
    """The first setting in which an island differs from the others."""
    for name, value in others.items():
        if own.get(name) != value:
            own_text, text = json.dumps(own.get(name)), json.dumps(value)
            return f"{name} is {own_text} here, and {text} on others"
    return f"it has more settings: {', '.join(sorted(set(own) - set(others)))}"


class Hub:
    """The place where islands meet; to be used as a context manager.

    Args:
        server: Listening TCP socket, which is its own from then on.
        secret: String, which all islands have.
        count: Int, islands that may come.
        join_seconds: Float, how long the first ones wait for the others. Defaults to
            two minutes.
        own: Collection of ints, islands of the process that runs the hub, which says
            itself when they have ended. Defaults to none.

    Attributes:
        port: Int, the one that it listens on.
    """

    def __init__(
        self,
        server: socket.socket,
        secret: str,
        count: int,
        join_seconds: float = JOIN_SECONDS,
        own: Collection[int] = (),
    ) -> None:
        self.port: int = server.getsockname()[1]
        self._join_seconds = join_seconds
        self._lock = threading.Lock()
        self._is_closed = False
        # Which islands give a sign of life over each.
        self._connections: dict[HubConnection, set[int]] = {}
        self._meetings: dict[int, Meeting] = {}
        # Islands that have not ended for good, and of those that have been here.
        self._expected = set(range(count))
        self._seen: set[int] = set()
        self._own = frozenset(own)
        # When others were last heard of, by `time.monotonic()`.
        self._heard_at: dict[int, float] = {}
        self._acceptor = Acceptor(
            secret,
            SERVICE,
            [server],
            self._begin,
            lacks_files=functools.cache(_warn_of_lack),  # once
        )

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *args: object) -> None:
        with self._lock:
            self._is_closed = True
            connections = list(self._connections)
            meetings = list(self._meetings.values())
        self._acceptor.close()
        for meeting in meetings:
            meeting.close()
        for connection in connections:
            connection.close()

    @property
    def is_needed(self) -> bool:
        """Bool, whether an island is there, or has been and may come back."""
        with self._lock:
            return bool(self._connections or self._seen & self._expected)

    def forget_lost(self) -> list[int]:
        """Take islands for ended that have been silent for a minute with no connection.

        An island that failed starts again without delay, and its launcher reports
        meanwhile: where neither is heard of, the launcher has ended, too.

        Returns:
            List of ints, those that were expected until now.
        """
        with self._lock:
            heard = self._own.union(*self._connections.values())
            since = time.monotonic() - SILENT_SECONDS
            lost = [
                index
                for index in sorted(self._seen & self._expected - heard)
                if self._heard_at[index] <= since
            ]
        for index in lost:
            self.ended(index)
        return lost

    def ended(self, index: int) -> None:
        """Take note that an island has ended for good: nobody waits for it.

        Args:
            index: Int, the island's.
        """
        with self._lock:
            self._expected.discard(index)
            meetings = list(self._meetings.values())
        for meeting in meetings:
            meeting.expect_no_more(index)

    def _begin(self, sock: socket.socket, _: Authenticated) -> None:
        threading.Thread(
            target=self._serve, args=(sock,), name="tfdp hub", daemon=True
        ).start()

    def _serve(self, sock: socket.socket) -> None:
        """Answer one island until it has gone."""
        connection = HubConnection(sock)
        with self._lock:
            is_late = self._is_closed
            self._connections[connection] = set()
        try:
            # Whoever breaks the rules is gone, too.
            with contextlib.suppress(*GONE, KeyError, TypeError, ValueError):
                if not is_late:
                    self._answer(connection)
        finally:
            with self._lock:
                heard = self._connections.pop(connection)
                self._heard_at.update(dict.fromkeys(heard, time.monotonic()))
            connection.close()

    def _answer(self, connection: HubConnection) -> None:
        head, arrays = connection.receive()
        if head["kind"] == "launcher":
            self._serve_launcher(connection, head)
            return
        index = int(head["index"])
        self._hear_of(connection, {index})
        number = int(head["fit"])
        meeting = self._meeting(number)
        member = meeting.new_member(index)
        try:
            with connection.beating():
                reply = meeting.join(
                    member, head["settings"], int(head["updates"]), arrays
                )
            reply.send(connection)
            if member.has_begun:
                self._serve_member(connection, meeting, member)
        finally:
            meeting.leave(member)
            with self._lock:
                if meeting.is_over:  # its state is of no use to anybody
                    self._meetings.pop(number, None)

    def _hear_of(self, connection: HubConnection, indices: set[int]) -> None:
        """Take note of islands that live while a connection does."""
        with self._lock:
            before = self._connections[connection] - indices
            self._heard_at.update(dict.fromkeys(before, time.monotonic()))
            self._connections[connection] = indices
            self._seen |= indices
            self._expected |= indices  # also one that was taken for lost

    def _serve_launcher(self, connection: HubConnection, head: dict[str, Any]) -> None:
        """Take the reports of another machine's launcher until it has gone."""
        told: set[int] = set()
        while True:
            for index in set(head["ended"]) - told:
                self.ended(index)
            told.update(head["ended"])
            self._hear_of(connection, set(head["running"]))
            send_frame(connection, {})
            head, _ = connection.receive()

    def _serve_member(
        self, connection: HubConnection, meeting: Meeting, member: Participant
    ) -> None:
        while True:
            head, arrays = connection.receive()
            if head["kind"] == "bye":
                meeting.expect_no_more(member.index)
                return
            if head["kind"] == "state":
                meeting.keep(int(head["version"]), arrays)
                continue
            brought = float(head["samples"]), arrays
            with connection.beating():
                reply = meeting.bring(member, int(head["version"]), brought)
            reply.send(connection)

    def _meeting(self, number: int) -> Meeting:
        with self._lock:
            if number not in self._meetings:
                expected = set(self._expected)
                self._meetings[number] = Meeting(expected, self._join_seconds)
            return self._meetings[number]


def _warn_of_lack(lack: str) -> None:
    print(f"tfdp: no island can connect: {lack}", file=sys.stderr, flush=True)
