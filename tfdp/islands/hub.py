"""The hub: the process that islands connect to, one meeting for each `fit`."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from tfdp.cluster.limits import lack_of_files
from tfdp.islands.frames import GONE, close, receive, secured, send
from tfdp.islands.meeting import Meeting, Parcel, Participant

# How long those who come first wait for the others, which may still start.
JOIN_SECONDS = 120.0
_RETRY_SECONDS = 0.1


class Hub:
    """The place where islands meet; to be used as a context manager.

    Args:
        server: Listening TCP socket, which is its own from then on.
        secret: String, which all islands have.
        count: Int, islands that may come.
        join_seconds: Float, how long the first ones wait for the others. Defaults to
            two minutes.

    Attributes:
        port: Int, the one that it listens on.
    """

    def __init__(
        self,
        server: socket.socket,
        secret: str,
        count: int,
        join_seconds: float = JOIN_SECONDS,
    ) -> None:
        self._server = server
        self.port: int = server.getsockname()[1]
        self._secret = secret
        self._join_seconds = join_seconds
        self._lock = threading.Lock()
        self._is_closed = False
        self._has_warned = False
        self._connections: set[Connection] = set()
        self._meetings: dict[int, Meeting] = {}
        # Islands that have not ended for good, and of those that have been here.
        self._expected = set(range(count))
        self._seen: set[int] = set()
        self._start(self._accept)

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *args: object) -> None:
        with self._lock:
            self._is_closed = True
            connections = list(self._connections)
            meetings = list(self._meetings.values())
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for meeting in meetings:
            meeting.close()
        for connection in connections:
            close(connection)

    @property
    def is_needed(self) -> bool:
        """Bool, whether an island is there, or has been and may come back."""
        with self._lock:
            return bool(self._connections or self._seen & self._expected)

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

    def _start(self, target: Any, *args: Any) -> None:
        threading.Thread(target=target, args=args, name="tfdp hub", daemon=True).start()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                sock, _ = self._server.accept()
            except OSError as error:  # it is closed; or files are lacking, for a while
                self._warn_of_lack(error)
                time.sleep(_RETRY_SECONDS)
                continue
            self._start(self._serve, sock)

    def _warn_of_lack(self, error: OSError) -> None:
        lack = lack_of_files(error)
        if lack is not None and not self._has_warned:
            self._has_warned = True
            print(f"tfdp: no island can connect: {lack}", file=sys.stderr, flush=True)

    def _serve(self, sock: socket.socket) -> None:
        """Answer one island until it has gone."""
        try:
            connection = secured(sock, self._secret, is_hub=True)
        except GONE:  # a stranger
            return
        with self._lock:
            is_late = self._is_closed
            self._connections.add(connection)
        try:
            # Whoever breaks the rules is gone, too.
            with contextlib.suppress(*GONE, KeyError, TypeError, ValueError):
                if not is_late:
                    self._answer(connection)
        finally:
            with self._lock:
                self._connections.discard(connection)
            close(connection)

    def _answer(self, connection: Connection) -> None:
        head, arrays = receive(connection)
        index = int(head["index"])
        if head["kind"] == "ended":
            self.ended(index)
            send(connection, {})
            return
        with self._lock:
            self._seen.add(index)
        number = int(head["fit"])
        meeting = self._meeting(number)
        member = meeting.new_member(index)
        try:
            reply = meeting.join(member, head["settings"], int(head["updates"]), arrays)
            send(connection, *reply)
            if member.has_begun:
                self._serve_member(connection, meeting, member)
        finally:
            meeting.leave(member)
            with self._lock:
                if meeting.is_over:  # its state is of no use to anybody
                    self._meetings.pop(number, None)

    def _serve_member(
        self, connection: Connection, meeting: Meeting, member: Participant
    ) -> None:
        while True:
            head, arrays = receive(connection)
            if head["kind"] == "beat":
                continue
            if head["kind"] == "bye":
                meeting.expect_no_more(member.index)
                return
            if head["kind"] == "state":
                meeting.keep(int(head["version"]), arrays)
                continue
            parcel = Parcel(int(head["version"]), float(head["samples"]), arrays)
            send(connection, *meeting.exchange(member, parcel))

    def _meeting(self, number: int) -> Meeting:
        with self._lock:
            if number not in self._meetings:
                expected = set(self._expected)
                self._meetings[number] = Meeting(expected, self._join_seconds)
            return self._meetings[number]
