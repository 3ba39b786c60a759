"""The hub: means over the islands that come in time, and the state for who joins.

A hub trains nothing. An exchange is over when all islands that are there have come; or,
with `least`, when as many have come and `patience_seconds` are over. One that comes
later is behind: it gets the state that another one has kept here, and the means since,
and so makes the outer steps that it has missed. What it brings counts in the next
exchange, if it has missed no more than one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tfdp.islands.frames import GONE, close, receive, secured, send
from tfdp.transport.communicator import Array

# How long those who come first wait for the others, which may still start.
JOIN_SECONDS = 120.0


@dataclasses.dataclass
class _Parcel:
    """What an island brings to an exchange, and the reply once there is one."""

    version: int
    samples: float
    arrays: list[Array]
    reply: tuple[dict[str, Any], list[Array]] | None = None


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
        self._begins_by = time.monotonic() + join_seconds
        self._changed = threading.Condition()
        self._is_closed = False
        self._connections: set[Connection] = set()
        # Who may still come for the first time; who is there; who has missed the last
        # exchange.
        self._expected = set(range(count))
        self._present: dict[int, Connection] = {}
        self._away: set[int] = set()
        self._joining: dict[int, list[Array]] = {}
        self._settings: dict[str, Any] | None = None
        # Exchanges so far; the state after one of them, and the means since.
        self._version = 0
        self._state: tuple[int, list[Array]] | None = None
        self._means: list[tuple[int, list[Array]]] = []
        self._waiting: dict[int, _Parcel] = {}
        self._late: list[_Parcel] = []
        self._deadline = 0.0
        self._start(self._accept)

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *args: object) -> None:
        with self._changed:
            self._is_closed = True
            connections = list(self._connections)
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for connection in connections:
            close(connection)

    def ended(self, index: int) -> None:
        """Take note that the process of an island has ended: nobody waits for it.

        Args:
            index: Int, the island's.
        """
        with self._changed:
            self._expected.discard(index)
            self._changed.notify_all()

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
        with self._changed:
            if self._is_closed:
                close(connection)
                return
            self._connections.add(connection)
        index = None
        try:
            while True:
                head, arrays = receive(connection)
                if head["kind"] == "join":
                    index = int(head["index"])
                    reply = self._join(index, connection, head["settings"], arrays)
                elif head["kind"] == "state":
                    self._keep(head["version"], arrays)
                    continue
                else:
                    parcel = _Parcel(head["version"], head["samples"], arrays)
                    reply = self._exchange(index, parcel)
                send(connection, *reply)
        except (*GONE, KeyError, TypeError, ValueError):
            pass
        finally:
            self._leave(index, connection)

    def _leave(self, index: int | None, connection: Connection) -> None:
        with self._changed:
            self._connections.discard(connection)
            if index is not None and self._present.get(index) is connection:
                del self._present[index]
                self._waiting.pop(index, None)
                self._joining.pop(index, None)
                self._away.discard(index)
            self._changed.notify_all()
        close(connection)

    # Joining.

    def _join(
        self,
        index: int,
        connection: Connection,
        settings: dict[str, Any],
        arrays: list[Array],
    ) -> tuple[dict[str, Any], list[Array]]:
        with self._changed:
            self._settings = self._settings or settings
            if settings != self._settings:
                return {"error": _difference(settings, self._settings)}, []
            self._present[index] = connection
            self._expected.discard(index)
            self._joining[index] = arrays
            self._changed.notify_all()
            self._changed.wait_for(self._may_begin, self._begins_by - time.monotonic())
            if self._state is None:
                # All begin with the weights of the first of them.
                self._state = 0, self._joining[min(self._joining)]
            self._joining.pop(index, None)
            return self._standing()

    def _may_begin(self) -> bool:
        return self._is_closed or self._state is not None or not self._expected

    def _standing(self, **more: Any) -> tuple[dict[str, Any], list[Array]]:
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

    # Exchanging.

    def _exchange(
        self, index: int | None, parcel: _Parcel
    ) -> tuple[dict[str, Any], list[Array]]:
        if index is None or index not in self._present:
            raise ValueError("it has not joined")
        with self._changed:
            missed = self._version - parcel.version
            if missed:
                self._away.discard(index)
                if missed == 1:
                    self._late.append(parcel)
                return self._standing(is_behind=True)
            if not self._waiting:
                self._deadline = time.monotonic() + self._setting("patience_seconds")
            self._waiting[index] = parcel
            self._changed.notify_all()
            while parcel.reply is None:
                if self._is_closed or self._waiting.get(index) is not parcel:
                    raise EOFError
                left = self._deadline - time.monotonic()
                if self._is_complete(left <= 0):
                    self._close_exchange()
                else:
                    self._changed.wait(left if left > 0 else None)
            return parcel.reply

    def _is_complete(self, is_late: bool) -> bool:
        least, here = self._setting("least"), set(self._waiting)
        if least is None:
            return set(self._present) - set(self._joining) <= here
        awaited = set(self._present) - set(self._joining) - self._away
        return len(here) >= least and (is_late or awaited <= here)

    def _close_exchange(self) -> None:
        parcels = [*self._waiting.values(), *self._late]
        mean = _mean([(parcel.samples, parcel.arrays) for parcel in parcels])
        self._version += 1
        self._means.append((self._version, mean))
        keeper = min(self._waiting)
        for index, parcel in self._waiting.items():
            head = {
                "version": self._version,
                "participants": len(self._waiting),
                "keeps": index == keeper,
            }
            parcel.reply = head, mean
        self._away = set(self._present) - set(self._waiting)
        self._waiting, self._late = {}, []
        self._changed.notify_all()

    def _keep(self, version: int, state: list[Array]) -> None:
        with self._changed:
            if self._state is None or version > self._state[0]:
                self._state = version, state
                self._means = [pair for pair in self._means if pair[0] > version]

    def _setting(self, name: str) -> Any:
        assert self._settings is not None
        return self._settings[name]


def _mean(parts: Sequence[tuple[float, Sequence[Array]]]) -> list[Array]:
    """Mean of arrays, each by its samples."""
    total = sum(samples for samples, _ in parts) or 1.0
    columns = zip(*(arrays for _, arrays in parts), strict=True)
    shares = [samples / total for samples, _ in parts]
    return [
        np.asarray(
            sum(share * array for share, array in zip(shares, column, strict=True)),
            column[0].dtype,
        )
        for column in columns
    ]


def _difference(own: dict[str, Any], others: dict[str, Any]) -> str:
    """The first setting in which an island differs from the others."""
    for name, value in others.items():
        if own.get(name) != value:
            own_text, text = json.dumps(own.get(name)), json.dumps(value)
            return f"{name} is {own_text} here, and {text} on others"
    return f"it has more settings: {', '.join(sorted(set(own) - set(others)))}"
