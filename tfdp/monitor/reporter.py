"""Brings the windows of all workers together, beside the training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from tfdp.mailbox import Mailbox
from tfdp.monitor.board import Board
from tfdp.monitor.windows import Window, merge

# How long the first worker waits for another one's window, and at the end for all.
_PATIENCE_SECONDS, _PARTING_SECONDS = 10.0, 20.0


class Reporter(threading.Thread):
    """A thread that sends this worker's windows, or on the first worker merges them.

    Training never waits for it: a worker that is silent is left out.

    Args:
        mailbox: `Mailbox` of all workers.
        board: `Board` on the first worker, which takes each `Row`; `None` on others.
    """

    def __init__(self, mailbox: Mailbox, board: Board | None) -> None:
        super().__init__(name="tfdp monitor", daemon=True)
        self.error: Exception | None = None
        self._mailbox = mailbox
        self._board = board
        self._windows: queue.SimpleQueue[Callable[[], Window] | None]
        self._windows = queue.SimpleQueue()
        self._silent: set[int] = set()

    def put(self, make: Callable[[], Window]) -> None:
        """Takes a window of this worker, which is computed by the thread.

        Args:
            make: Callable that returns the `Window`.
        """
        self._windows.put(make)

    def close(self) -> None:
        """Waits until all windows are through, but not for ever."""
        self._windows.put(None)
        self.join(_PARTING_SECONDS)

    def run(self) -> None:
        """Works until it is closed; an error ends the reports, not the training."""
        try:
            for make in iter(self._windows.get, None):
                self._pass_on(make())
        except Exception as error:  # noqa: BLE001
            self.error = error

    def _pass_on(self, window: Window) -> None:
        if self._board is None:
            self._mailbox.send(window.step, window.to_json())
            return
        windows = {0: window}
        for rank in range(1, self._mailbox.num_workers):
            patience = 0.01 if rank in self._silent else _PATIENCE_SECONDS
            text = self._mailbox.receive(window.step, rank, patience)
            if text is None:
                self._silent.add(rank)
            else:
                self._silent.discard(rank)
                windows[rank] = Window.from_json(text)
        self._board.take(merge(windows))
