"""The hub as an island sees it, and as the launcher of another machine does."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tfdp.communication.cluster.address import split_address
from tfdp.communication.cluster.islands import Island
from tfdp.communication.connection.handshake import (
    ConnectionFailed,
    UnauthenticatedPeer,
    authenticate,
    dial_steps,
)
from tfdp.communication.transport.communicator import Array
from tfdp.communication.transport.frames import send_frame
from tfdp.communication.transport.rounds import Reply
from tfdp.features.islands.hub_connection import (
    BEAT_SECONDS,
    GONE,
    SERVICE,
    HubConnection,
)
from tfdp.ground.forks import close_in_forks

_CONNECT_SECONDS = 60.0
_PROOF_SECONDS = 10.0
_RETRY_SECONDS = 0.2
_REPORT_AGAIN_SECONDS = 1.0
# A launcher whose islands have ended has nothing else to wait for.
_CLOSE_SECONDS = 5.0


class HubGone(RuntimeError):
    """The connection to the hub has ended."""


class Member:
    """Connection of an island to the hub.

    Args:
        island: `Island`.
        fit: Int, number of this `fit` in its process; those of one number meet.
            Defaults to 0.

    Raises:
        RuntimeError: If the hub cannot be reached, or has another secret.
    """

    def __init__(self, island: Island, fit: int = 0) -> None:
        self._island = island
        self._fit = fit
        self._connection = connect(island, _CONNECT_SECONDS)
        # Held while the hub is asked, and knows that this island waits.
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        threading.Thread(target=self._beat, name="tfdp beat", daemon=True).start()

    def join(
        self, settings: dict[str, Any], state: Sequence[Array], updates: int = 0
    ) -> Reply:
        """Join the others, and wait for those that start.

        Args:
            settings: Dict that JSON can hold, alike on all islands.
            state: Sequence of arrays, from which all begin if this island is the one
                with most updates, or the first of several.
            updates: Int, those that it has made before. Defaults to 0.

        Returns:
            `Reply` with the state that all have in common.

        Raises:
            ValueError: If others have other settings.
            RuntimeError: If the hub has gone.
        """
        head = {
            "kind": "join",
            "index": self._island.index,
            "fit": self._fit,
            "settings": settings,
            "updates": updates,
        }
        reply = self._ask(head, state)
        if reply.error:
            raise ValueError(
                f"The islands do not fit together: {reply.error}. Start all with "
                "the same script and settings."
            )
        return reply

    def exchange(self, version: int, samples: float, arrays: Sequence[Array]) -> Reply:
        """Bring arrays to the exchange that follows a version, and wait for its mean.

        Args:
            version: Int, exchanges that this island has made.
            samples: Float, by which it counts.
            arrays: Sequence of arrays.

        Returns:
            `Reply`.

        Raises:
            HubGone: If the hub has gone, or has taken this island for gone.
        """
        head = {"kind": "exchange", "version": version, "samples": samples}
        return self._ask(head, arrays)

    def keep(self, version: int, state: Sequence[Array]) -> None:
        """Leave the state after an exchange with the hub, for those who join.

        Raises:
            HubGone: If the hub has gone.
        """
        self._send({"kind": "state", "version": version}, state)

    def close(self, *, is_through: bool = False) -> None:
        """Leave; the others do not wait for this island any more.

        Args:
            is_through: Bool, whether it does not come back to this `fit`. Defaults to
                `False`.
        """
        self._is_closed.set()
        if is_through:
            with contextlib.suppress(HubGone):
                self._send({"kind": "bye"})
        self._connection.close()

    def _ask(self, head: dict[str, Any], arrays: Sequence[Array]) -> Reply:
        with self._translated():
            send_frame(self._connection, head, arrays)
            return Reply.from_frame(*self._connection.receive())

    def _send(self, head: dict[str, Any], arrays: Sequence[Array] = ()) -> None:
        with self._translated():
            send_frame(self._connection, head, arrays)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Use the connection alone inside; translate what it raises."""
        with self._lock:
            try:
                yield
            except GONE as error:
                raise HubGone(
                    f"The hub of the islands ({self._island.hub}) has gone: the "
                    "launcher that ran it has ended, is suspended, or is cut off from "
                    "the network. Start all again."
                ) from error

    def _beat(self) -> None:
        """Send signs of life, until this island leaves."""
        with contextlib.suppress(HubGone):  # the next exchange says so
            while not self._is_closed.wait(BEAT_SECONDS):
                with self._translated():
                    self._connection.send_beat()


class LauncherLink(threading.Thread):
    """Reports of a launcher to the hub: which of its islands run, or start again.

    The hub waits for an island that has failed as long as its launcher reports. A hub
    that cannot be reached is tried again, and is no error of the launcher: its islands
    say so.

    Args:
        island: `Island`, any of this launcher's.
        indices: Sequence of ints, its islands.
    """

    def __init__(self, island: Island, indices: Sequence[int]) -> None:
        super().__init__(name="tfdp launcher", daemon=True)
        self._island = island
        self._indices = list(indices)
        self._ended: set[int] = set()
        self._is_closed = False
        self._changed = threading.Event()
        self.start()

    def ended(self, index: int) -> None:
        """Report that an island has ended for good: nobody waits for it.

        Args:
            index: Int, the island's.
        """
        self._ended.add(index)
        self._changed.set()

    def close(self) -> None:
        """Report that all islands have ended, as far as the hub can be reached."""
        self._ended.update(self._indices)
        self._is_closed = True
        self._changed.set()
        self.join(_CLOSE_SECONDS)

    def run(self) -> None:
        """Report until this link is closed."""
        while True:
            # RuntimeError: the hub has not started yet, or has ended.
            with contextlib.suppress(*GONE, RuntimeError):
                self._report_on(connect(self._island, 0.0))
                return
            if self._is_closed:
                return
            self._changed.wait(_REPORT_AGAIN_SECONDS)
            self._changed.clear()

    def _report_on(self, connection: HubConnection) -> None:
        """Report on a connection until this link is closed."""
        try:
            is_last = False
            while not is_last:
                self._changed.clear()
                is_last = self._is_closed
                ended = sorted(self._ended)
                running = sorted(set(self._indices).difference(ended))
                report = {"kind": "launcher", "running": running, "ended": ended}
                send_frame(connection, report)
                connection.receive()
                if not is_last:
                    self._changed.wait(BEAT_SECONDS)
        finally:
            connection.close()


def connect(island: Island, within_seconds: float) -> HubConnection:
    """Connect to the hub.

    Args:
        island: `Island`.
        within_seconds: Float, for how long it is tried.

    Returns:
        `HubConnection` whose ends have proved themselves.

    Raises:
        RuntimeError: If the hub cannot be reached, or has another secret.
    """
    address = split_address(island.hub)
    deadline = time.monotonic() + within_seconds
    while True:
        try:
            sock = close_in_forks(socket.create_connection(address, timeout=5.0))
            steps = dial_steps(island.secret, SERVICE)
            authenticate(sock, steps, _PROOF_SECONDS)
            return HubConnection(sock)
        except UnauthenticatedPeer as error:
            raise RuntimeError(
                f"What listens at {island.hub} is not the hub of these islands: "
                f"{error}. Another job may have taken its port, or the secret's file "
                "or the version of tfdp differs."
            ) from error
        except (OSError, ConnectionFailed) as error:
            if time.monotonic() >= deadline:
                raise RuntimeError(
                    f"The hub of the islands ({island.hub}) cannot be reached: {error}."
                    " See whether its launcher runs, and the firewall between."
                ) from error
        time.sleep(_RETRY_SECONDS)
