"""The hub: the server that islands connect to, with the rounds of each `fit`.

Islands are workers that train as separate jobs. In the rounds of one call of `fit`, all
islands exchange and average their weights.

The hub does not train. An island that is behind receives the state that another island
has stored on the hub, see `tfdp.communication.transport.rounds`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import socket
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
from tfdp.ground.base.threads import start_thread
from tfdp.ground.text import say

# Seconds that the first islands wait for the others, which are separate jobs that may
# still be starting.
JOIN_SECONDS = 120.0


class IslandRounds(Rounds):
    """Exchange rounds of one `fit` of all islands, and the state for joining islands.

    Islands are separate jobs. In a round, those that take part average their weights.

    Args:
        expected: Set of ints, indices of the islands that must have joined before the
            first ones receive a state.
        join_seconds: Float, how long the first islands wait for the others at most.
    """

    def __init__(self, expected: set[int], join_seconds: float) -> None:
        super().__init__(sorted(expected))
        # Indices of the islands that have not joined these rounds yet: the first ones
        # wait for them. `_may_come` also has islands that have left and may come back.
        self._expected = set(expected)
        self._begins_by = time.monotonic() + join_seconds
        # Number of updates and state of each island that waits for the rounds to begin:
        # all begin with the state of the island with the most updates.
        self._first_states: dict[int, tuple[int, list[Array]]] = {}
        self._settings: dict[str, Any] | None = None

    def close(self) -> None:
        """Remove all islands, and wake up those that wait."""
        with self._changed:
            self._members.clear()
            self._expected.clear()
            self._changed.notify_all()

    @property
    def is_over(self) -> bool:
        """Bool, whether no island is connected, and no further one will connect."""
        with self._changed:
            return not self._members and not self._may_come

    def stop_waiting_for(self, index: int) -> None:
        """Stop waiting for an island that has finished, or will not join."""
        with self._changed:
            self._expected.discard(index)
            super().stop_waiting_for(index)

    def new_member(self, index: int) -> Participant:
        """Add an island that has connected, in place of its earlier connection if any.

        Returns:
            `Participant`, the island in these rounds by this connection.
        """
        member = Participant(index, has_begun=False)
        with self._changed:
            self._members[index] = member
            self._may_come.add(index)
            self._changed.notify_all()
        return member

    def leave(self, member: Participant) -> None:
        """Remove a disconnected island: rounds no longer wait for it."""
        with self._changed:
            if self._members.get(member.index) is member:
                del self._members[member.index]
            member.contribution = None
            self._changed.notify_all()

    def join(
        self,
        member: Participant,
        settings: dict[str, Any],
        updates: int,
        state: list[Array],
    ) -> Reply:
        """Wait until the rounds begin, and return the state to continue from.

        Args:
            member: `Participant` that joins.
            settings: Dict, settings that must be the same on all islands.
            updates: Int, updates that the island has made before, if it is resumed.
            state: List of arrays, the island's outer optimizer, weights and statistics.

        Returns:
            `Reply` with the common state, or with an error if settings differ.
        """
        with self._changed:
            self._settings = self._settings or settings
            if settings != self._settings:
                return Reply(0, error=_difference(settings, self._settings))
            self._least = settings["min_participants"]
            self._patience = settings["patience_seconds"]
            self._expected.discard(member.index)
            self._first_states[member.index] = updates, state
            self._changed.notify_all()
            self._changed.wait_for(self._may_begin, self._begins_by - time.monotonic())
            if self._state is None:
                self._state = 0, self._furthest()
            self._first_states.pop(member.index, None)
            member.has_begun = True
            return self._catch_up_reply()

    def keep(self, version: int, state: list[Array]) -> None:
        """Store the state after an exchange, for islands that join later.

        Args:
            version: Int, the number of the exchange.
            state: List of arrays, outer optimizer, weights and statistics after it.
        """
        with self._changed:
            if self._state is None or version > self._state[0]:
                self._state = version, state
                self._means = [pair for pair in self._means if pair[0] > version]

    def _furthest(self) -> list[Array]:
        """Return the state of the waiting island with the most updates.

        If several have the same number, it is the state of the first by index.
        """
        states = self._first_states
        return states[max(states, key=lambda index: (states[index][0], -index))][1]

    def _may_begin(self) -> bool:
        """Return whether the islands that wait to join may receive a state.

        They may if there is a common state, or if all expected islands have joined.
        """
        return self._state is not None or not self._expected


def _difference(settings: dict[str, Any], others: dict[str, Any]) -> str:
    """Describe the first setting in which an island differs from other islands.

    Args:
        settings: Dict, the settings of the island.
        others: Dict, the settings of the islands that joined before.

    Returns:
        String such as `"sync_every is 20 here, and 10 on others"`.
    """
    for name, value in others.items():
        if settings.get(name) != value:
            here, there = json.dumps(settings.get(name)), json.dumps(value)
            return f"{name} is {here} here, and {there} on others"
    return f"it has more settings: {', '.join(sorted(set(settings) - set(others)))}"


class Hub:
    """Server through which islands exchange weights; use it as a context manager.

    Islands are separate jobs that train the same model, and average their weights.

    Args:
        server: Listening TCP socket; the hub takes ownership and closes it.
        secret: String, the shared secret that authenticates islands.
        count: Int, number of islands.
        join_seconds: Float, how long the first islands wait for the others. Defaults
            to two minutes.
        own: Collection of ints, islands started by the process that runs the hub,
            which calls `ended` for them. Defaults to none.

    Attributes:
        port: Int, the port of `server`.
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
        # The islands that each open connection shows to be alive, so that rounds wait
        # for them: the island itself, or the running islands of a launcher.
        self._connections: dict[HubConnection, set[int]] = {}
        self._rounds_by_fit: dict[int, IslandRounds] = {}
        # Indices of the islands that have not ended, or may restart: the rounds of a
        # new `fit` wait for these.
        self._expected = set(range(count))
        self._own = frozenset(own)
        # Last sign of life of each island that has ever connected, as a time by
        # `time.monotonic()`: `forget_lost` marks islands that are silent for too long.
        self._last_contact: dict[int, float] = {}
        # If no file descriptors are left, the acceptor calls `lacks_files` at each
        # attempt to accept a connection. `functools.cache` lets the warning be printed
        # only once.
        self._acceptor = Acceptor(
            secret,
            SERVICE,
            [server],
            self._begin,
            lacks_files=functools.cache(
                lambda lack: say(f"no island can connect: {lack}")
            ),
        )

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *args: object) -> None:
        self._acceptor.close()
        with self._lock:
            connections = list(self._connections)
            all_rounds = list(self._rounds_by_fit.values())
        for rounds in all_rounds:
            rounds.close()
        for connection in connections:
            connection.close()

    @property
    def is_needed(self) -> bool:
        """Bool, whether an island is connected, or may come back."""
        with self._lock:
            known = self._last_contact.keys()
            return bool(self._connections or known & self._expected)

    def forget_lost(self) -> list[int]:
        """Mark as ended the islands that have had no connection for a minute.

        A failed island restarts without delay, and its launcher reports it meanwhile:
        without a connection from either, the launcher has ended, too. Islands that have
        never connected, and those in `own`, are not marked.

        Returns:
            List of ints, the islands that were marked by this call.
        """
        with self._lock:
            alive = self._own.union(*self._connections.values())
            since = time.monotonic() - SILENT_SECONDS
            lost = [
                index
                for index in sorted(self._last_contact.keys() & self._expected - alive)
                if self._last_contact[index] <= since
            ]
        for index in lost:
            self.ended(index)
        return lost

    def ended(self, index: int) -> None:
        """Mark an island as ended for good: no rounds wait for it.

        Args:
            index: Int, index of the island.
        """
        with self._lock:
            self._expected.discard(index)
            all_rounds = list(self._rounds_by_fit.values())
        for rounds in all_rounds:
            rounds.stop_waiting_for(index)

    def _begin(self, sock: socket.socket, _: Authenticated) -> None:
        """Start a thread that serves `sock`, a connection after its handshake."""
        connection = HubConnection(sock)
        with self._lock:
            self._connections[connection] = set()
        start_thread("tfdp hub", self._serve, connection)

    def _serve(self, connection: HubConnection) -> None:
        """Serve the connection of an island or a launcher until it ends, and close it.

        Called on a thread of the connection.
        """
        try:
            # A message that violates the protocol raises KeyError, TypeError or
            # ValueError: it ends its connection, and the hub serves the others.
            with contextlib.suppress(*GONE, KeyError, TypeError, ValueError):
                self._answer(connection)
        finally:
            with self._lock:
                indices = self._connections.pop(connection)
                self._last_contact.update(dict.fromkeys(indices, time.monotonic()))
            connection.close()

    def _answer(self, connection: HubConnection) -> None:
        """Read the first message, and serve the island or launcher that has sent it."""
        head, arrays = connection.receive()
        if head["kind"] == "launcher":
            self._serve_launcher(connection, head)
            return
        index = int(head["index"])
        self._register_alive(connection, {index})
        number = int(head["fit"])
        rounds = self._rounds_of_fit(number)
        member = rounds.new_member(index)
        try:
            with connection.beating():
                reply = rounds.join(
                    member, head["settings"], int(head["updates"]), arrays
                )
            reply.send(connection)
            if member.has_begun:
                self._serve_member(connection, rounds, member)
        finally:
            rounds.leave(member)
            with self._lock:
                # Rounds that no island will join any more are deleted, to free memory.
                if rounds.is_over:
                    self._rounds_by_fit.pop(number, None)

    def _register_alive(self, connection: HubConnection, indices: set[int]) -> None:
        """Record the islands that count as alive while a connection is open.

        Args:
            connection: `HubConnection` of an island or of a launcher.
            indices: Set of ints, indices of these islands.
        """
        with self._lock:
            known = self._connections[connection] | indices
            self._last_contact.update(dict.fromkeys(known, time.monotonic()))
            self._connections[connection] = indices
            # An island that was marked as lost may connect again, and is then expected.
            self._expected |= indices

    def _serve_launcher(self, connection: HubConnection, head: dict[str, Any]) -> None:
        """Process the reports of another machine's launcher until it disconnects.

        Args:
            connection: `HubConnection` of the launcher.
            head: Dict, the first report: indices of `"running"` and `"ended"` islands.
        """
        reported: set[int] = set()
        while True:
            for index in set(head["ended"]) - reported:
                self.ended(index)
            reported.update(head["ended"])
            self._register_alive(connection, set(head["running"]))
            send_frame(connection, {})
            head, _ = connection.receive()

    def _serve_member(
        self, connection: HubConnection, rounds: IslandRounds, member: Participant
    ) -> None:
        """Serve the exchanges of an island until it leaves or disconnects.

        Args:
            connection: `HubConnection` of the island.
            rounds: `IslandRounds` of its `fit`.
            member: `Participant`, the island in these rounds.
        """
        while True:
            head, arrays = connection.receive()
            if head["kind"] == "bye":
                rounds.stop_waiting_for(member.index)
                return
            if head["kind"] == "state":
                rounds.keep(int(head["version"]), arrays)
                continue
            contribution = float(head["samples"]), arrays
            with connection.beating():
                reply = rounds.contribute(member, int(head["version"]), contribution)
            reply.send(connection)

    def _rounds_of_fit(self, number: int) -> IslandRounds:
        """Return the `IslandRounds` of a `fit` by its number, created if missing."""
        with self._lock:
            if number not in self._rounds_by_fit:
                self._rounds_by_fit[number] = IslandRounds(
                    self._expected, self._join_seconds
                )
            return self._rounds_by_fit[number]
