"""Output of the workers of this machine, as the launcher shows it."""

from __future__ import annotations

from collections.abc import Sequence

from tfdp.launch.cli.noise import is_noise, may_be_peer_failure
from tfdp.launch.cli.screen import Screen
from tfdp.launch.cli.tracebacks import Tracebacks
from tfdp.launch.cli.worker import TAIL_LINES, Worker


class Output:
    """Output of the workers of one attempt, shown on a screen.

    Noise is left out, and the same traceback of several workers is shown once.

    Args:
        screen: `Screen` that shows the lines.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen, self._tracebacks = screen, Tracebacks()
        # A failed worker's last lines are repeated unless they are still visible, so
        # printed lines are counted: `_num_lines` in all, and by rank the number of
        # lines up to each worker's last one.
        self._num_lines = 0
        self._last_line: dict[int, int] = {}

    def interrupt(self) -> None:
        """Record that Ctrl-C was forwarded to the workers.

        From then on, only the first of their tracebacks is shown, as one line, and
        reports of lost peers are left out.
        """
        self._tracebacks.interrupt()

    def show(self, worker: Worker, lines: Sequence[str]) -> None:
        """Print new lines of a worker without noise, and update its progress bar.

        Args:
            worker: `Worker`.
            lines: Sequence of strings, its new lines.
        """
        if self._screen.is_verbatim:
            self._print(worker, lines)
            return
        kept = [line for line in lines if not is_noise(line)]
        if self._tracebacks.is_interrupted:
            kept = [line for line in kept if not may_be_peer_failure(line)]
        self._print(worker, self._tracebacks.take(worker.rank, kept))
        if not self._tracebacks.holds(worker.rank):
            self._screen.progress(worker.rank, worker.output.unfinished)

    def show_rest(self, worker: Worker) -> None:
        """Print all that is left of the output of a worker that has ended."""
        self.show(worker, worker.read_rest())
        self._print(worker, self._tracebacks.rest(worker.rank))

    def show_due(self, worker: Worker) -> None:
        """Print the held-back traceback of a worker if it is complete by now.

        The worker's unfinished line is also printed when `Worker.snapshot` returns it.
        """
        self._print(worker, self._tracebacks.due(worker.rank))
        if (text := worker.snapshot()) is not None:
            self._screen.snapshot(worker.rank, text)

    def repeat_last_lines(self, failed: Worker) -> None:
        """Print a failed worker's last lines again, unless they are still visible.

        They count as visible if output and messages share a terminal, file or pipe, and
        at most `TAIL_LINES` lines of any worker were printed since.
        """
        since = self._num_lines - self._last_line.get(failed.rank, self._num_lines)
        is_seen = since <= TAIL_LINES and self._screen.is_one
        if failed.tail and not is_seen:
            self._screen.repeat_lines(failed.rank, failed.tail)

    def shown_for(self, rank: int) -> int:
        """Return the rank of the worker whose traceback was shown for that of `rank`.

        The result is `rank` itself, unless the same traceback of another worker was
        shown in its place.

        Args:
            rank: Int, rank of a worker.
        """
        return self._tracebacks.shown_for.get(rank, rank)

    def _print(self, worker: Worker, lines: Sequence[str]) -> None:
        """Print lines of a worker, and count them.

        The position of the worker's last line among the lines of all workers is stored
        for `repeat_last_lines`.
        """
        for line in lines:
            self._screen.line(worker.rank, line)
            self._num_lines += 1
            self._last_line[worker.rank] = self._num_lines
