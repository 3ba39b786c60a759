"""Clients of the hub: of an island, and of the launcher of another machine.

An island is a worker, or several, that trains as a separate job; the hub is the server
through which the islands average their weights.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tfdp.communication.cluster.address import split_address
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
from tfdp.features.islands.island import Island
from tfdp.ground.base.threads import start_thread
from tfdp.ground.forks import close_in_forks

# Seconds for which an island tries to connect to the hub, which may start later than
# the island; and seconds between two attempts.
_CONNECT_SECONDS = 60.0
_RETRY_SECONDS = 0.2
# Timeout in seconds of an authentication: another process than the hub may listen at
# the hub's address, and never answer.
_PROOF_SECONDS = 10.0
# Seconds between a launcher's attempts to connect to the hub, which may start later, or
# may have failed.
_REPORT_AGAIN_SECONDS = 1.0
# Timeout in seconds of a launcher's last report, so that an unreachable hub cannot
# delay the exit of the launcher.
_CLOSE_SECONDS = 5.0


class HubLost(RuntimeError):
    """Raised when an island loses its connection to the hub, which averages weights."""


class HubClient:
    """Connection of an island, a separate job, to the hub that averages weights.

    Args:
        island: `Island` that connects.
        fit: Int, number of this `fit` in its process: islands exchange with those of
            the same number. Defaults to 0.

    Raises:
        RuntimeError: If the hub cannot be reached, or has another secret.
    """

    def __init__(self, island: Island, fit: int = 0) -> None:
        self._island = island
        self._fit = fit
        self._connection = connect(island, _CONNECT_SECONDS)
        # Heartbeats are sent by another thread. This lock keeps them out of the middle
        # of a message; it is also held while this island waits for a reply.
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        beats = self._is_closed, self._lock
        start_thread("tfdp beat", self._connection.beat, *beats)

    def join(
        self, settings: dict[str, Any], state: Sequence[Array], updates: int = 0
    ) -> Reply:
        """Join the other islands, and wait for those that are starting.

        Args:
            settings: Dict, JSON-serializable, which must be the same on all islands.
            state: Sequence of arrays, outer optimizer, weights and statistics. All
                start from those of the island with the most updates (the first such).
            updates: Int, updates that this island has made before. Defaults to 0.

        Returns:
            `Reply` with the common state.

        Raises:
            ValueError: If other islands have other settings.
            HubLost: If the connection is lost.
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
        """Send arrays to the next exchange, and wait for the mean over the islands.

        Args:
            version: Int, number of exchanges that this island has made.
            samples: Float, weight of this island in the mean.
            arrays: Sequence of arrays to average.

        Returns:
            `Reply` with the mean, or with the state if this island is behind.

        Raises:
            HubLost: If the connection is lost, or the hub has closed it.
        """
        head = {"kind": "exchange", "version": version, "samples": samples}
        return self._ask(head, arrays)

    def keep(self, version: int, state: Sequence[Array]) -> None:
        """Store the state after an exchange on the hub, for islands that join later.

        Args:
            version: Int, the number of the exchange.
            state: Sequence of arrays, outer optimizer, weights and statistics after it.

        Raises:
            HubLost: If the connection is lost.
        """
        self._send({"kind": "state", "version": version}, state)

    def close(self, *, is_through: bool = False) -> None:
        """Disconnect; the other islands no longer wait for this island.

        Args:
            is_through: Bool, whether this island has finished this `fit`, and will
                not join it again. Defaults to `False`.
        """
        self._is_closed.set()
        if is_through:
            with contextlib.suppress(HubLost):
                self._send({"kind": "bye"})
        self._connection.close()

    def _ask(self, head: dict[str, Any], arrays: Sequence[Array]) -> Reply:
        """Send a message, and wait for the hub's reply.

        Args:
            head: Dict, JSON-serializable, with the key `"kind"`.
            arrays: Sequence of arrays.
        """
        with self._exclusive_connection():
            send_frame(self._connection, head, arrays)
            return Reply.from_frame(*self._connection.receive())

    def _send(self, head: dict[str, Any], arrays: Sequence[Array] = ()) -> None:
        """Send a message, a dict for JSON and arrays, without waiting for a reply."""
        with self._exclusive_connection():
            send_frame(self._connection, head, arrays)

    @contextlib.contextmanager
    def _exclusive_connection(self) -> Iterator[None]:
        """Hold the connection's lock in a `with` block; errors become `HubLost`."""
        with self._lock:
            try:
                yield
            except GONE as error:
                raise HubLost(
                    f"The connection to the islands' hub ({self._island.hub}) was "
                    "lost: the launcher that ran it has exited, is suspended, or is "
                    "cut off from the network. Start all again."
                ) from error


class LauncherLink(threading.Thread):
    """Thread that reports to the hub which islands of a launcher run or restart.

    The hub waits for a failed island as long as its launcher reports it. Connecting is
    retried, and an unreachable hub raises an error in the islands, not here.

    Args:
        island: `Island`, any island of this launcher.
        indices: Sequence of ints, indices of all islands of this launcher.
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
        """Report that an island has ended for good: the others no longer wait for it.

        Args:
            index: Int, index of the island.
        """
        self._ended.add(index)
        self._changed.set()

    def close(self) -> None:
        """Report that all islands have ended, if the hub can be reached."""
        self._ended.update(self._indices)
        self._is_closed = True
        self._changed.set()
        self.join(_CLOSE_SECONDS)

    def run(self) -> None:
        """Report the islands until this link is closed; target of the thread."""
        while True:
            # `connect` raises RuntimeError if the hub does not run yet, or has ended;
            # the next iteration tries again.
            with contextlib.suppress(*GONE, RuntimeError):
                self._report_on(connect(self._island, 0.0))
                return
            if self._is_closed:
                return
            self._changed.wait(_REPORT_AGAIN_SECONDS)
            self._changed.clear()

    def _report_on(self, connection: HubConnection) -> None:
        """Send reports on the islands over a connection until this link is closed."""
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
    """Connect to the hub, and authenticate.

    Args:
        island: `Island` with the hub's address and secret.
        within_seconds: Float, how long connecting is retried.

    Returns:
        `HubConnection`, authenticated on both ends.

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
                f"The process that listens at {island.hub} is not the hub of these "
                f"islands: {error}. Another job may use its port, or the secret file "
                "or the version of tfdp differs."
            ) from error
        except (OSError, ConnectionFailed) as error:
            if time.monotonic() >= deadline:
                raise RuntimeError(
                    f"The hub of the islands ({island.hub}) cannot be reached: "
                    f"{error}. Check that its launcher runs, and that no firewall "
                    "blocks the connection."
                ) from error
        time.sleep(_RETRY_SECONDS)
