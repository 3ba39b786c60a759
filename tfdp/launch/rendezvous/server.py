"""The thread of node 0 that serves the connections of all nodes."""

from __future__ import annotations

import functools
import logging
import socket
import time
from typing import Any

from tfdp.communication.connection.acceptor import Acceptor
from tfdp.communication.connection.handshake import Authenticated, ConnectionFailed
from tfdp.launch.rendezvous.coordinator import Coordinator
from tfdp.launch.rendezvous.failure import MalformedMessage, RendezvousError
from tfdp.launch.rendezvous.link import (
    MAX_REPORT_BYTES,
    SERVICE,
    SILENT_SECONDS,
    HeartbeatConnection,
)
from tfdp.launch.rendezvous.roster import Hello

_logger = logging.getLogger("tfdp.rendezvous")

# A peer may connect and then send nothing, so a connection without a first message is
# closed after this many seconds.
_HELLO_SECONDS = 5.0
# A node may be lost at the end, so `close` waits at most this many seconds: for all
# nodes to disconnect once they know the end of the job, or else only for pending
# messages.
_GOODBYE_SECONDS, _CLOSING_SECONDS = 3.0, 2.0
_POLL_SECONDS = 0.01


class Server(Acceptor):
    """Server of the rendezvous: an acceptor whose thread calls the coordinator.

    Args:
        listener: Listening socket; the server closes it at the end.
        secret: String, the job's secret.
        coordinator: `Coordinator`, called only from the server's thread.
    """

    def __init__(
        self, listener: socket.socket, secret: str, coordinator: Coordinator
    ) -> None:
        self._coordinator = coordinator
        # The first message of a connection adds its node to the job, so the dict has
        # for each connection whether that message has arrived.
        self._links: dict[HeartbeatConnection, bool] = {}
        self._is_ending = False
        super().__init__(
            secret,
            SERVICE,
            [listener],
            self._add_link,
            # The cache keeps a warning about missing file descriptors from repeating.
            lacks_files=functools.cache(_logger.warning),
            tick=self._tick_links,
        )

    def close(self) -> None:
        """Send pending messages for a limited time, and end the server's thread.

        If the job is over, nodes have up to 3 s to disconnect. Otherwise the pending
        messages are sent for up to 2 s.
        """
        self._is_ending = True
        # Nodes close their connections themselves once they know that the job is over,
        # so the server only waits.
        is_over = self._coordinator.is_over
        seconds = _GOODBYE_SECONDS if is_over else _CLOSING_SECONDS
        deadline = time.monotonic() + seconds
        while any(is_over or link.has_output for link in list(self._links)):
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_SECONDS)
        super().close()

    def _add_link(self, sock: socket.socket, keys: Authenticated) -> None:
        """Begin to serve a connection; it ends if no message arrives within 5 s."""
        link = HeartbeatConnection(sock, keys, MAX_REPORT_BYTES, self)
        link.most_silent_seconds = _HELLO_SECONDS
        self._links[link] = False
        self.watch(link, functools.partial(self._read_link, link))

    def _read_link(self, link: HeartbeatConnection) -> bool:
        """Handle the messages of a node that have arrived.

        Returns:
            Bool, true if the connection continues; false if it has ended or was
            refused.
        """
        how = "has closed its connection"
        try:
            for message in link.proceed():
                self._handle(link, message)
            return True
        except RendezvousError as error:
            link.send({"type": "refused", "text": str(error)})
        except ConnectionFailed as error:
            how = str(error)
        except MalformedMessage:
            how = "has sent an invalid message"
        self._remove(link, how)
        return False

    def _handle(self, link: HeartbeatConnection, message: dict[str, Any]) -> None:
        """Pass a message to the coordinator; the first, a `Hello`, adds the node."""
        if self._links[link]:
            self._coordinator.receive(link, message)
            return
        self._coordinator.join(link, Hello.from_message(message))
        self._links[link], link.most_silent_seconds = True, SILENT_SECONDS

    def _remove(self, link: HeartbeatConnection, how: str) -> None:
        """Remove a connection that has ended, and notify the coordinator.

        Args:
            link: `HeartbeatConnection` to a node.
            how: String for messages, such as `"has closed its connection"`.
        """
        del self._links[link]
        self._coordinator.register_disconnect(link, how)

    def _tick_links(self) -> None:
        """Send heartbeats, end silent connections, and call `Coordinator.tick`."""
        for link in list(self._links):
            try:
                link.tick()
            except ConnectionFailed as error:
                self._remove(link, str(error))
                self.unwatch(link)
        if self._is_ending:
            self.stop_listening()
        else:
            self._coordinator.tick()
