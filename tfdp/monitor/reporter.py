"""Brings the windows of all workers together, beside the training."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable

from tfdp.coordination.mailbox import Mailbox
from tfdp.monitor.board import Board
from tfdp.monitor.windows import Window, merge

# How long the first worker waits for another one's windows, and at the end for all.
_PATIENCE_SECONDS, _PARTING_SECONDS = 10.0, 20.0
# Windows of this time travel together: every message costs the steps beside it.
_PAUSE_SECONDS = 1.0


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
        self._made: queue.SimpleQueue[Callable[[], Window] | None]
        self._made = queue.SimpleQueue()
        self._is_closing = threading.Event()
        self._num_sent = 0
        others = range(1, mailbox.num_workers)
        self._arrived: dict[int, dict[int, Window]] = {rank: {} for rank in others}
        self._num_received = dict.fromkeys(others, 0)
        self._silent: set[int] = set()

    def put(self, make: Callable[[], Window]) -> None:
        """Takes a window of this worker, which is computed by the thread.

        Args:
            make: Callable that returns the `Window`.
        """
        if self.error is None:
            self._made.put(make)

    def close(self) -> None:
        """Waits until all windows are through, but not for ever."""
        self._is_closing.set()
        self._made.put(None)
        self.join(_PARTING_SECONDS)

    def run(self) -> None:
        """Works until it is closed; an error ends the reports, not the training."""
        is_open = True
        try:
            while is_open:
                batch = [self._made.get()]
                self._is_closing.wait(_PAUSE_SECONDS)
                while not self._made.empty():
                    batch.append(self._made.get())
                is_open = None not in batch
                self._pass_on([make() for make in batch if make is not None])
        except Exception as error:  # noqa: BLE001
            self.error = error

    def _pass_on(self, windows: list[Window]) -> None:
        if self._board is not None:
            for window in windows:
                others = self._of_others(window.step)
                windows_of_all = {0: window, **others}
                self._board.take(merge(windows_of_all, self._mailbox.num_workers))
        elif windows:
            texts = [window.to_json() for window in windows]
            self._mailbox.send(self._num_sent, json.dumps(texts))
            self._num_sent += 1

    def _of_others(self, step: int) -> dict[int, Window]:
        """The other workers' windows that end with a step, by rank."""
        found = {}
        for rank, arrived in self._arrived.items():
            while step not in arrived and self._receive(rank):
                pass
            if step in arrived:
                found[rank] = arrived.pop(step)
        return found

    def _receive(self, rank: int) -> bool:
        """Takes in a message of a worker, and says whether there was one."""
        patience = 0.01 if rank in self._silent else _PATIENCE_SECONDS
        text = self._mailbox.receive(self._num_received[rank], rank, patience)
        if text is None:
            self._silent.add(rank)
            return False
        self._silent.discard(rank)
        self._num_received[rank] += 1
        for window in map(Window.from_json, json.loads(text)):
            self._arrived[rank][window.step] = window
        return True
