"""The hub: the process that islands connect to, one meeting for each `fit`."""

from __future__ import annotations

import contextlib
import functools
import socket
import sys
import threading
import time
from collections.abc import Collection
from typing import Any

from tfdp.communication.connection.acceptor import Acceptor
from tfdp.communication.connection.handshake import Authenticated
from tfdp.communication.transport.frames import send_frame
from tfdp.features.islands.hub_connection import (
    GONE,
    SERVICE,
    SILENT_SECONDS,
    HubConnection,
)
from tfdp.features.islands.meeting import Meeting, Parcel, Participant

# How long those who come first wait for the others, which may still start.
JOIN_SECONDS = 120.0


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
            send_frame(connection, *reply)
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
            parcel = Parcel(int(head["version"]), float(head["samples"]), arrays)
            with connection.beating():
                reply = meeting.exchange(member, parcel)
            send_frame(connection, *reply)

    def _meeting(self, number: int) -> Meeting:
        with self._lock:
            if number not in self._meetings:
                expected = set(self._expected)
                self._meetings[number] = Meeting(expected, self._join_seconds)
            return self._meetings[number]


def _warn_of_lack(lack: str) -> None:
    print(f"tfdp: no island can connect: {lack}", file=sys.stderr, flush=True)
