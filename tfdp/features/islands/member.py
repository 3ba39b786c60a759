"""The hub as an island sees it."""

from __future__ import annotations

import contextlib
import dataclasses
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


class HubGone(RuntimeError):
    """The connection to the hub has ended."""


@dataclasses.dataclass(frozen=True)
class Standing:
    """What all islands have in common, for one that has missed how it became so.

    Args:
        state: List of arrays, the state after some exchange.
        means: List of lists of arrays, those of the exchanges since, in their order.
    """

    state: list[Array]
    means: list[list[Array]]


@dataclasses.dataclass(frozen=True)
class Reply:
    """The end of an exchange for one island.

    Args:
        version: Int, exchanges so far.
        mean: List of arrays, the mean of those who came.
        standing: `Standing` if the island was behind, which replaces its own state, or
            `None`.
        keeps: Bool, whether it is to send the hub the state that follows.
        participants: Int, islands in this exchange; 0 if the island was behind.
    """

    version: int
    mean: list[Array]
    standing: Standing | None
    keeps: bool
    participants: int


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
    ) -> tuple[int, Standing]:
        """Join the others, and wait for those that start.

        Args:
            settings: Dict that JSON can hold, alike on all islands.
            state: Sequence of arrays, from which all begin if this island is the one
                with most updates, or the first of several.
            updates: Int, those that it has made before. Defaults to 0.

        Returns:
            Tuple of the number of exchanges so far, and the `Standing`.

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
        answer, arrays = self._ask(head, state)
        if "error" in answer:
            raise ValueError(
                f"The islands do not fit together: {answer['error']}. Start all with "
                "the same script and settings."
            )
        return answer["version"], _standing(answer, arrays)

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
        answer, found = self._ask(head, arrays)
        if answer.get("is_behind"):
            standing = _standing(answer, found)
            return Reply(answer["version"], [], standing, False, 0)
        return Reply(
            answer["version"], found, None, answer["keeps"], answer["participants"]
        )

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

    def _ask(
        self, head: dict[str, Any], arrays: Sequence[Array]
    ) -> tuple[dict[str, Any], list[Array]]:
        with self._translated():
            send_frame(self._connection, head, arrays)
            return self._connection.receive()

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
                raise self._gone() from error

    def _beat(self) -> None:
        """Send signs of life, until this island leaves."""
        with contextlib.suppress(HubGone):  # the next exchange says so
            while not self._is_closed.wait(BEAT_SECONDS):
                with self._translated():
                    self._connection.send_beat()

    def _gone(self) -> HubGone:
        return HubGone(
            f"The hub of the islands ({self._island.hub}) has gone: the launcher that "
            "ran it has ended, is suspended, or is cut off from the network. Start all "
            "again."
        )


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


def _standing(answer: dict[str, Any], arrays: list[Array]) -> Standing:
    state, rest = arrays[: answer["num_state"]], arrays[answer["num_state"] :]
    size = answer["num_mean"]
    means = [rest[begin : begin + size] for begin in range(0, len(rest), size or 1)]
    return Standing(state, means)
