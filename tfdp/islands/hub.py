"""The hub: the process that islands connect to, one meeting for each `fit`."""

from __future__ import annotations

import contextlib
import socket
import threading
from multiprocessing.connection import Connection
from typing import Any

from tfdp.islands.frames import GONE, close, receive, secured, send
from tfdp.islands.meeting import Meeting, Parcel

# How long those who come first wait for the others, which may still start.
JOIN_SECONDS = 120.0


class Hub:
    """The place where islands meet; to be used as a context manager.

    Args:
        address: Tuple of the host and the port to listen on; port 0: any.
        secret: String, which all islands have.
        count: Int, islands that may come.
        join_seconds: Float, how long the first ones wait for the others. Defaults to
            two minutes.

    Attributes:
        port: Int, the one that it listens on.

    Raises:
        OSError: If it cannot listen there.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: str,
        count: int,
        join_seconds: float = JOIN_SECONDS,
    ) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._server = socket.create_server(address, family=family)
        self.port: int = self._server.getsockname()[1]
        self._secret = secret
        self._join_seconds = join_seconds
        self._lock = threading.Lock()
        self._is_closed = False
        self._connections: set[Connection] = set()
        self._meetings: dict[int, Meeting] = {}
        # Islands that have not ended for good.
        self._expected = set(range(count))
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
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                return
            self._start(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        """Answer one island until it has gone."""
        try:
            connection = secured(sock, self._secret, is_hub=True)
        except GONE:  # a stranger
            return
        with self._lock:
            is_late = self._is_closed
            self._connections.add(connection)
        # Whoever breaks the rules is gone, too.
        with contextlib.suppress(*GONE, KeyError, TypeError, ValueError):
            if not is_late:
                self._serve_member(connection)
        with self._lock:
            self._connections.discard(connection)
        close(connection)

    def _serve_member(self, connection: Connection) -> None:
        head, arrays = receive(connection)
        meeting, index = self._meeting(int(head["fit"])), int(head["index"])
        member = meeting.new_member(index)
        try:
            send(connection, *meeting.join(member, head["settings"], arrays))
            while True:
                head, arrays = receive(connection)
                if head["kind"] == "state":
                    meeting.keep(int(head["version"]), arrays)
                    continue
                parcel = Parcel(int(head["version"]), float(head["samples"]), arrays)
                send(connection, *meeting.exchange(member, parcel))
        finally:
            meeting.leave(member)

    def _meeting(self, number: int) -> Meeting:
        with self._lock:
            if number not in self._meetings:
                expected = set(self._expected)
                self._meetings[number] = Meeting(expected, self._join_seconds)
            return self._meetings[number]
