"""The connection of a launcher to the hub on another machine."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from tfdp.communication.cluster.islands import Island
from tfdp.communication.transport.frames import send_frame
from tfdp.features.islands.hub_connection import BEAT_SECONDS, GONE, HubConnection
from tfdp.features.islands.member import connect

_RETRY_SECONDS = 1.0
# A launcher whose islands have ended has nothing else to wait for.
_CLOSE_SECONDS = 5.0


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
            self._changed.wait(_RETRY_SECONDS)
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
