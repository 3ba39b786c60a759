"""Thread of node 0 that serves the connections of all nodes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

from tfdp.rendezvous import handshake
from tfdp.rendezvous.channel import Channel
from tfdp.rendezvous.coordinator import Coordinator
from tfdp.rendezvous.errors import Lost, RendezvousError, Stranger
from tfdp.rendezvous.hello import Hello
from tfdp.rendezvous.messages import MAX_REPORT_BYTES

# Who has not proved itself after so long, or is one of more than so many, has to go.
_STRANGER_SECONDS = 5.0
_MOST_STRANGERS = 256
_TICK_SECONDS = 0.05
# For the last words to all nodes.
_GOODBYE_SECONDS = 3.0
_CANCEL_SECONDS = 1.0


class Server:
    """Server of the rendezvous, in a thread of its own.

    Args:
        listener: Listening socket, which it closes at the end.
        secret: String, the job's.
        coordinator: `Coordinator`, called from the thread alone.
    """

    def __init__(
        self, listener: socket.socket, secret: str, coordinator: Coordinator
    ) -> None:
        self._listener = listener
        self._secret = secret
        self._coordinator = coordinator
        # In the order in which they came.
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._handlers: set[asyncio.Task[None]] = set()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run()),
            name="tfdp-rendezvous-server",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Say the last words and wait for the end of the thread."""
        self._is_closing.set()
        self._thread.join()

    async def _run(self) -> None:
        server = await asyncio.start_server(
            self._meet, sock=self._listener, limit=MAX_REPORT_BYTES
        )
        while not self._is_closing.is_set():
            self._coordinator.tick()
            await asyncio.sleep(_TICK_SECONDS)
        server.close()
        for writer in list(self._strangers):
            writer.transport.abort()
        # The nodes end their connections once they know that the job is over.
        seconds = _GOODBYE_SECONDS if self._coordinator.is_over else 0.0
        while self._handlers:
            _, late = await asyncio.wait(self._handlers, timeout=seconds)
            # More than once, for the reason that `Member.close` gives.
            for task in late:
                task.cancel()
            seconds = _CANCEL_SECONDS

    async def _meet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        try:
            channel = await self._check(reader, writer)
            if channel is not None:
                await self._serve(channel)
        except (Stranger, OSError, asyncio.CancelledError):
            pass
        finally:
            self._handlers.discard(task)
            self._strangers.pop(writer, None)
            writer.transport.abort()

    async def _check(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Channel | None:
        """Let a stranger prove itself, in the place of the one that came first."""
        self._strangers[writer] = None
        if len(self._strangers) > _MOST_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        try:
            return await asyncio.wait_for(
                handshake.accept(reader, writer, self._secret), _STRANGER_SECONDS
            )
        except (Stranger, asyncio.TimeoutError):
            # What it was told last reaches it before the end.
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                writer.close()
                await asyncio.wait_for(writer.wait_closed(), 1.0)
            return None
        finally:
            self._strangers.pop(writer, None)

    async def _serve(self, channel: Channel) -> None:
        beats = asyncio.create_task(channel.beat())
        how = "has ended its connection"
        try:
            hello = Hello.from_message(await channel.receive(_STRANGER_SECONDS))
            self._coordinator.join(channel, hello)
            while True:
                self._coordinator.receive(channel, await channel.receive())
        except RendezvousError as error:
            channel.send({"type": "refused", "text": str(error)})
        except Lost as error:
            how = str(error)
        except Stranger:
            how = "has sent what is no message"
        finally:
            beats.cancel()
            self._coordinator.gone(channel, how)
            await channel.close()
