"""Screens that print the output of all workers, as text or as lines of JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Literal, TextIO, cast, get_args

from rich.console import Console
from rich.text import Text

from tfdp.ground import user_code
from tfdp.launch.cli.lines import only_colours, without_escapes
from tfdp.launch.cli.nonblocking_stream import NonBlockingStream
from tfdp.launch.cli.signals import SignalPipe

# The names of workers of neighboring ranks have different colors, which separates their
# lines at a glance.
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")
# Workers change their progress bars many times a second, so the screen redraws a bar
# only at this interval in seconds.
_REDRAW_SECONDS = 0.1
# A pager may never read the last lines, so after a signal the launcher waits for the
# reader at most this many seconds.
_LAST_LINES_SECONDS = 2.0

# The severity of a launcher's message is a field of JSON output, and selects the style
# on a terminal.
Level = Literal["info", "warning", "error"]
_STYLES: dict[Level, str] = {"info": "", "warning": "bold yellow", "error": "bold red"}


def new_console() -> Console:
    """Return a console for plain text on stdout.

    Lines are wrapped between words on a terminal, but not in a file.
    """
    is_whole = sys.stdout is None or not sys.stdout.isatty()
    return Console(highlight=False, markup=False, soft_wrap=is_whole)


def _is_same_file(one: TextIO, other: TextIO) -> bool:
    """Return whether two streams are the same file, terminal or pipe."""
    try:
        return os.path.sameopenfile(one.fileno(), other.fileno())
    except OSError:
        return False


class Screen:
    """Printer of the workers' lines, with the name of the worker before each line.

    On a terminal, the line that a worker is drawing (a progress bar) stays at the
    bottom, and is redrawn below new lines of other workers. In a file or pipe it
    appears once it is complete, and every 10 s before that. Messages of the launcher
    are printed on stderr. No call waits for the reader of the output, or fails without
    one.

    Args:
        output: Text stream of the workers' lines. Defaults to `sys.stdout`.
        messages: Text stream of the launcher's messages. Defaults to `sys.stderr`.

    Attributes:
        is_one: Bool, whether both streams are the same terminal, file or pipe.
        is_verbatim: Bool, whether all lines of the workers are printed unchanged,
            including noise and repeated tracebacks.
        node: Int, rank of this launcher's node, or `None` while it is not known, or if
            the workers are on several nodes.
        nodes: Dict from the rank of a worker on another node to the rank of its node.
    """

    is_verbatim = False

    def __init__(
        self, output: TextIO | None = None, messages: TextIO | None = None
    ) -> None:
        output, messages = output or sys.stdout, messages or sys.stderr
        self.node: int | None = None
        self.nodes: dict[int, int] = {}
        self._output = NonBlockingStream(output, self._truncation_notice)
        # If both streams are the same terminal or file, they share one queue, which
        # keeps the order of their lines.
        is_same = output and messages and _is_same_file(output, messages)
        self._message_output = (
            self._output
            if is_same
            else NonBlockingStream(messages, self._truncation_notice)
        )
        self.is_one = bool(is_same)
        self._console = Console(file=cast("TextIO", self._output), highlight=False)
        self._messages = Console(
            file=cast("TextIO", self._message_output), highlight=False, soft_wrap=True
        )
        # With FORCE_COLOR set, `Console.is_terminal` is true even for a file, so
        # `isatty` is asked instead.
        self._is_terminal = (
            self._output.isatty()
            and not self._console.is_dumb_terminal
            and not self.is_verbatim
        )
        # Unfinished lines by rank. A terminal shows only the line of the worker that
        # drew last, so the entry of that worker is the last in the dict.
        self._unfinished: dict[int, str] = {}
        self._bar: tuple[int, str] | None = None
        self._bar_drawn_at = 0.0

    def line(self, rank: int, text: str) -> None:
        """Print a complete line of a worker, with the worker's name before it."""
        self._unfinished.pop(rank, None)
        if self._is_terminal:
            self._erase_bar()
            self._console.print(self._decorate(rank, text), soft_wrap=True)
        else:
            text = f"[worker {rank}] {without_escapes(text)}"
            self._output.write(text.rstrip() + "\n")

    def progress(self, rank: int, text: str) -> None:
        """Set the line that a worker is drawing, `""` for none; `refresh` shows it."""
        self._unfinished.pop(rank, None)
        if text:
            self._unfinished[rank] = text

    def snapshot(self, rank: int, text: str) -> None:
        """Print `text`, a worker's unfinished line, if the output is no terminal."""
        if not self._is_terminal:
            self.line(rank, text)

    def refresh(self) -> None:
        """Redraw the progress bar, and flush the output; to be called frequently."""
        if self._is_terminal:
            self._draw_bar()
        self._output.flush()
        self._warn_of_write_error()

    def message(
        self,
        text: str,
        level: Level = "info",
        *,
        rank: int | None = None,
        node: int | None = None,
    ) -> None:
        """Print a message of the launcher on stderr.

        Args:
            text: String, the message.
            level: Severity of the message. Defaults to `"info"`.
            rank: Int, rank of the worker that the message is about, or `None`. Defaults
                to `None`.
            node: Int, rank of the node whose launcher has sent the message, or `None`
                for this node. Defaults to `None`.
        """
        self._erase_line()
        self._output.flush()
        self._messages.print(Text(text, style=_STYLES[level]))

    def warn(self, text: str) -> None:
        """Print a warning of the launcher on stderr."""
        self.message(text, "warning")

    def repeat_lines(self, rank: int, lines: Sequence[str]) -> None:
        """Print the last lines of a failed worker on stderr, again."""
        self.message(f"\ntfdp: the last lines of worker {rank}:", "error")
        for line in lines:
            self._messages.print(self._decorate(rank, line))
        self.message("")

    @property
    def has_no_reader(self) -> bool:
        """Bool, whether the reader of the output has exited, such as in `| head`."""
        return isinstance(self._output.error, BrokenPipeError)

    @property
    def is_behind(self) -> bool:
        """Bool, whether the output is read, but more slowly than lines are printed."""
        return self._output.is_behind

    def close(self, timeout_seconds: float) -> bool:
        """Erase the progress bar, and wait until all is written; may be called again.

        Args:
            timeout_seconds: Float, longest wait for each stream.

        Returns:
            Bool, whether all is written.
        """
        self._erase_bar()
        is_shown = self._output.drain(timeout_seconds)
        self._warn_of_write_error()
        return self._message_output.drain(timeout_seconds) and is_shown

    def _truncation_notice(self, text: str) -> str:
        """Format a sentence about dropped lines as a line of the output."""
        return f"{text}\n"

    def _decorate(self, rank: int, text: str) -> Text:
        """Return a line with the worker's name before it, both in color."""
        prefix = (f"[worker {rank}] ", _COLOURS[rank % len(_COLOURS)])
        return Text.assemble(prefix, Text.from_ansi(only_colours(text)))

    def _warn_of_write_error(self) -> None:
        """Warn once if the output cannot be written, unless its reader has exited."""
        error = self._output.error
        if error is None or self.has_no_reader:
            return
        if user_code.record_if_new("unwritten output", self):
            self.warn(
                f"tfdp: warning: the output cannot be written ({error.strerror}); "
                "it is kept in the logs"
            )

    def _erase_bar(self) -> None:
        """Erase the progress bar if it is drawn."""
        if self._bar is not None:
            self._erase_line()

    def _erase_line(self) -> None:
        """Erase the bar, or the terminal's echo in its place, such as `^C`."""
        if self._is_terminal:
            self._output.write("\r\x1b[2K")
        self._bar = None

    def _draw_bar(self) -> None:
        """Draw the unfinished line that was updated last, unless it was just drawn."""
        bar = next(reversed(self._unfinished.items()), None)
        if bar is None or bar == self._bar:
            return
        now = time.monotonic()
        if self._bar is not None and now - self._bar_drawn_at < _REDRAW_SECONDS:
            return
        self._erase_bar()
        line = self._decorate(*bar)
        # The line is truncated, since a wrapped one could not be erased.
        line.truncate(self._console.width - 1, overflow="ellipsis")
        self._console.print(line, end="", no_wrap=True)
        self._bar, self._bar_drawn_at = bar, now


@dataclasses.dataclass(frozen=True)
class OutputEntry:
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

    >>> entry = OutputEntry("Epoch 1/2", "worker", node=0, rank=3, time="12:00")
    >>> print(entry.to_line(), end="")
    {"time": "12:00", "level": null, "stream": "worker", "node": 0, "rank": 3, "message": "Epoch 1/2"}
    >>> OutputEntry.from_line(entry.to_line()) == entry
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
    def from_line(cls, line: str) -> OutputEntry | None:
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
        """Write a complete line of a worker as a line of JSON on the output."""
        message = without_escapes(text).rstrip()
        node = self.nodes.get(rank, self.node)
        self._output.write(
            OutputEntry(message, "worker", node=node, rank=rank).to_line()
        )

    def message(
        self,
        text: str,
        level: Level = "info",
        *,
        rank: int | None = None,
        node: int | None = None,
    ) -> None:
        """Write a message of the launcher; see `Screen.message` for the arguments."""
        self._output.flush()
        node = self.node if node is None else node
        self._message_output.write(
            OutputEntry(text, level=level, node=node, rank=rank).to_line()
        )
        self._message_output.flush()

    def repeat_lines(self, rank: int, lines: Sequence[str]) -> None:
        """Repeat nothing: a reader of JSON can select the lines of a rank."""

    def _truncation_notice(self, text: str) -> str:
        """Return the notice about lost lines as a line of JSON."""
        return OutputEntry(text, level="warning", node=self.node).to_line()


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
            if signals.end_reason is not None:
                end = min(end, time.monotonic() + _LAST_LINES_SECONDS)
