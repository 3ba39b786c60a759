"""The thread of node 0 that serves the connections of all nodes."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import threading

from tfdp.communication.connection.acceptor import Acceptor
from tfdp.communication.connection.handshake import Authenticated
from tfdp.launch.rendezvous.channel import MAX_REPORT_BYTES, SERVICE, Channel
from tfdp.launch.rendezvous.coordinator import Coordinator
from tfdp.launch.rendezvous.failure import Lost, MalformedMessage, RendezvousError
from tfdp.launch.rendezvous.roster import Hello

_logger = logging.getLogger("tfdp.rendezvous")

# Longest wait for the first message of a new connection.
_HELLO_SECONDS = 5.0
# Interval of calls to `Coordinator.tick`.
_TICK_SECONDS = 0.05
# Longest wait until all nodes have received the end of the job and disconnect.
_GOODBYE_SECONDS = 3.0
# Wait after a cancellation before tasks that are still running are cancelled again.
_CANCEL_SECONDS = 1.0


class Server:
    """Server of the rendezvous, in a thread of its own.

    Args:
        listener: Listening socket; the server closes it at the end.
        secret: String, the job's secret.
        coordinator: `Coordinator`, called only from the server's thread.
    """

    def __init__(
        self, listener: socket.socket, secret: str, coordinator: Coordinator
    ) -> None:
        self._listener = listener
        self._secret = secret
        self._coordinator = coordinator
        self._handlers: set[asyncio.Task[None]] = set()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run()),
            name="tfdp-rendezvous-server",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Send all pending messages, and wait for the end of the thread."""
        self._is_closing.set()
        self._thread.join()

    async def _run(self) -> None:
        """Accept connections and tick the coordinator until `close` is called."""
        loop = asyncio.get_running_loop()

        def accepted(sock: socket.socket, peer: Authenticated) -> None:
            """Serve an authenticated connection in the thread of the event loop."""
            loop.call_soon_threadsafe(self._begin, sock, peer)

        acceptor = Acceptor(
            self._secret,
            SERVICE,
            [self._listener],
            accepted,
            # The cache makes the same warning be logged once.
            lacks_files=functools.cache(_logger.warning),
        )
        try:
            while not self._is_closing.is_set():
                self._coordinator.tick()
                await asyncio.sleep(_TICK_SECONDS)
        finally:
            acceptor.close()
        # Let the loop start the handlers of the last accepted connections.
        await asyncio.sleep(0)
        # Nodes close their connections themselves once they know that the job is over.
        seconds = _GOODBYE_SECONDS if self._coordinator.is_over else 0.0
        while self._handlers:
            _, late = await asyncio.wait(self._handlers, timeout=seconds)
            # The cancellation is repeated, since `asyncio.wait_for` of Python 3.10 and
            # 3.11 may swallow one that coincides with a message.
            for task in late:
                task.cancel()
            seconds = _CANCEL_SECONDS

    def _begin(self, sock: socket.socket, peer: Authenticated) -> None:
        """Start a task that serves an accepted connection."""
        task = asyncio.create_task(self._serve(sock, peer))
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)

    async def _serve(self, sock: socket.socket, peer: Authenticated) -> None:
        """Pass one node's messages to the coordinator until the connection ends."""
        streams = await asyncio.open_connection(sock=sock, limit=MAX_REPORT_BYTES)
        channel = Channel(*streams, peer)
        beats = asyncio.create_task(channel.beat())
        how = "has closed its connection"
        try:
            hello = Hello.from_message(await channel.receive(_HELLO_SECONDS))
            self._coordinator.join(channel, hello)
            while True:
                self._coordinator.receive(channel, await channel.receive())
        except RendezvousError as error:
            channel.send({"type": "refused", "text": str(error)})
        except Lost as error:
            how = str(error)
        except MalformedMessage:
            how = "has sent an invalid message"
        finally:
            beats.cancel()
            self._coordinator.register_disconnect(channel, how)
            await channel.close()
