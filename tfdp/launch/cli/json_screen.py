"""Output of all workers as lines of JSON, and the context of a screen."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import time
from collections.abc import Iterator, Sequence
from typing import get_args

from tfdp.launch.cli.lines import without_escapes
from tfdp.launch.cli.screen import Level, Screen
from tfdp.launch.cli.signals import SignalPipe

# Time for the reader to take the last lines, once the job was asked to end.
_LAST_LINES_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class Entry:
    """Line of a job's output in the format of `--log-format json`.

    Args:
        message: String, text of the line. A worker's line is the same as in its log.
        stream: `"launcher"` or `"worker"`, the source of the line; stdout and stderr of
            a worker are one stream. Defaults to `"launcher"`.
        level: `"info"`, `"warning"` or `"error"` for a line of the launcher; `None` for
            a line of a worker, which is not parsed. Defaults to `None`.
        node: Int, rank of the line's node, or `None` if it is not known. Defaults to
            `None`.
        rank: Int, rank of the worker that wrote the line, or that the launcher's line
            is about, or `None`. Defaults to `None`.
        time: String, time of the line by the clock of this machine, in UTC. Defaults to
            now.

    Example:

    >>> entry = Entry("Epoch 1/2", "worker", node=0, rank=3, time="12:00")
    >>> print(entry.to_line(), end="")
    {"time": "12:00", "level": null, "stream": "worker", "node": 0, "rank": 3, "message": "Epoch 1/2"}
    >>> Entry.from_line(entry.to_line()) == entry
    True
    """  # noqa: E501

    message: str
    stream: str = "launcher"
    level: Level | None = None
    node: int | None = None
    rank: int | None = None
    time: str = dataclasses.field(
        default_factory=lambda: datetime.datetime.now(datetime.timezone.utc).isoformat(
            timespec="milliseconds"
        )
    )

    def to_line(self) -> str:
        """Return the line as JSON in ASCII, which any locale can write."""
        # Lone surrogates, which come from undecodable file names, are invalid JSON for
        # many readers.
        message = self.message.encode("utf-8", "replace").decode()
        about = {
            n: getattr(self, n) for n in ("time", "level", "stream", "node", "rank")
        }
        return json.dumps({**about, "message": message}) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Entry | None:
        """Parse a line; return `None` if it is not in this format.

        Args:
            line: String, one line of JSON or any other text.
        """
        try:
            fields = json.loads(line)
            entry = cls(**fields)
        except (ValueError, TypeError, RecursionError):
            return None
        return entry if entry._has_right_types() else None

    def _has_right_types(self) -> bool:
        """Return whether the fields, which may come from any text, have valid types."""
        return (
            all(type(text) is str for text in (self.message, self.stream, self.time))
            and all(type(n) in (int, type(None)) for n in (self.node, self.rank))
            and self.level in (None, *get_args(Level))
        )


class JsonScreen(Screen):
    """Screen that prints JSON: workers' lines on stdout, the launcher's on stderr.

    No line of a worker is left out, held back or repeated; progress bars are lines, as
    in a file.
    """

    is_verbatim = True

    def line(self, rank: int, text: str) -> None:
        """Write a complete line of a worker."""
        message = without_escapes(text).rstrip()
        node = self.nodes.get(rank, self.node)
        self._output.write(Entry(message, "worker", node=node, rank=rank).to_line())

    def message(
        self,
        text: str,
        level: Level = "info",
        *,
        rank: int | None = None,
        node: int | None = None,
    ) -> None:
        """Write a message of the launcher."""
        self._output.flush()
        node = self.node if node is None else node
        self._message_output.write(
            Entry(text, level=level, node=node, rank=rank).to_line()
        )
        self._message_output.flush()

    def recall(self, rank: int, lines: Sequence[str]) -> None:
        """Repeat nothing: a reader of JSON can select the lines of a rank."""

    def _truncation_notice(self, text: str) -> str:
        """Return the notice about lost lines as a line of JSON."""
        return Entry(text, level="warning", node=self.node).to_line()


@contextlib.contextmanager
def open_screen(signals: SignalPipe, log_format: str = "text") -> Iterator[Screen]:
    """Open a screen, and wait at the end until its output is read.

    A signal or `--timeout` limits the wait to 2 s.

    Args:
        signals: `SignalPipe` of the job.
        log_format: `"text"` or `"json"`. Defaults to `"text"`.

    Yields:
        `Screen`.
    """
    screen = JsonScreen() if log_format == "json" else Screen()
    try:
        yield screen
    finally:
        end = math.inf
        while not screen.close(timeout_seconds=0.1) and time.monotonic() < end:
            signals.read()
            if signals.exit_code is not None:
                end = min(end, time.monotonic() + _LAST_LINES_SECONDS)
