"""Output of all workers: cut into lines, shown on one screen, in a file, or as JSON."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import datetime
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO, Literal, TextIO, cast, get_args

from rich.console import Console
from rich.text import Text

from tfdp.ground import user_code
from tfdp.launch.cli.outlet import Outlet
from tfdp.launch.cli.signals import SignalPipe

# Longer text without an end is cut: nobody reads it, and memory is finite.
MAX_LINE_LENGTH = 1 << 16
# Read from a pipe at a time.
CHUNK_BYTES = 1 << 16

_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])"
)
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")
_REDRAW_SECONDS = 0.1
# For who reads the output, once the job was told to end.
_LAST_LINES_SECONDS = 2.0

# How grave the launcher's own words are, and how a terminal shows it.
Level = Literal["info", "warning", "error"]
_STYLES: dict[Level, str] = {"info": "", "warning": "bold yellow", "error": "bold red"}


class LineReader:
    r"""Reader of a worker's bytes as lines, the way a terminal shows them.

    A carriage return starts the line anew, as progress bars do: of such a line
    only what was drawn last is kept.

    Args:
        most: Int, length at which a line without end is cut. Defaults to 65,536.

    Example:
    >>> reader = LineReader()
    >>> reader.feed(b"one\n 1/9\r 2/9")
    ['one']
    >>> reader.unfinished
    ' 2/9'
    >>> reader.feed(b"\r 9/9\n")
    [' 9/9']
    """

    def __init__(self, most: int = MAX_LINE_LENGTH) -> None:
        self._most = most
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending = ""

    def feed(self, data: bytes) -> list[str]:
        """Take the next bytes; return the lines that they complete."""
        text = self._pending + self._decoder.decode(data)
        *lines, rest = text.split("\n")
        if len(rest) > self._most and "\r" not in rest:
            lines.append(rest)
            rest = ""
        *drawn, tail = rest.split("\r")
        if drawn and not without_escapes(tail).strip():
            # The return must stay: what comes next draws over.
            self._pending = f"{last_drawn(rest)}\r{tail}"
        else:
            self._pending = tail
        return [last_drawn(line) for line in lines]

    def close(self) -> list[str]:
        """End the output; return the unfinished line if there is one."""
        text = self._pending + self._decoder.decode(b"", final=True)
        self._pending = ""
        return [last_drawn(text)] if text.strip() else []

    @property
    def unfinished(self) -> str:
        """The line that is being drawn; empty if there is none."""
        return last_drawn(self._pending)


class PipeReader(LineReader):
    """Reader of the lines that come out of a pipe, which is never waited for.

    Args:
        pipe: The stream to read from.
        most: Int, as of `LineReader`.

    Attributes:
        has_ended: Bool, whether the other end is closed and all is read.
    """

    def __init__(self, pipe: IO[bytes] | None, most: int = MAX_LINE_LENGTH) -> None:
        super().__init__(most)
        assert pipe is not None  # as those of a `Popen` may be
        self.has_ended = False
        self.pipe = pipe
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self.pipe.fileno()

    def read(self) -> list[str]:
        """Read the lines that have become complete."""
        try:
            data = os.read(self.fileno(), CHUNK_BYTES)
        except BlockingIOError:
            return []
        self.has_ended = not data
        return self.feed(data)


def last_drawn(line: str) -> str:
    """Return what is left to see of a line after its carriage returns.

    Args:
        line: String without a line feed.

    Returns:
        String, the last part that is not blank.
    """
    parts = line.replace("\b", "").split("\r")
    drawn = [part for part in parts if without_escapes(part).strip()]
    return drawn[-1] if drawn else ""


def without_escapes(text: str) -> str:
    """Remove a terminal's escape sequences: colours, cursor movements, titles."""
    return _ESCAPE.sub("", text) if "\x1b" in text else text


def only_colours(text: str) -> str:
    """Remove all escape sequences but colours.

    What moves the cursor would take it away from behind the line's prefix.
    """
    if "\x1b" not in text:
        return text
    return _ESCAPE.sub(lambda m: m[0] if _COLOUR.fullmatch(m[0]) else "", text)


def new_console() -> Console:
    """Return a console for stdout, as plain text.

    A terminal gets lines that are broken between words, a file gets them whole.
    """
    is_whole = sys.stdout is None or not sys.stdout.isatty()
    return Console(highlight=False, markup=False, soft_wrap=is_whole)


def _is_same_file(one: TextIO, other: TextIO) -> bool:
    try:
        return os.path.sameopenfile(one.fileno(), other.fileno())
    except OSError:
        return False


class Screen:
    """Printer of the workers' lines, each behind the name of its worker.

    On a terminal, the line that some worker is drawing (a progress bar) stays
    at the bottom and is redrawn below what others print. In a file or pipe it
    appears once complete, and now and then until it is. The launcher's own
    words go to stderr. No call waits for a reader, or fails for the lack of one.

    Args:
        output: Where the lines go. Defaults to `sys.stdout`.
        messages: Where the launcher's own words go. Defaults to `sys.stderr`.

    Attributes:
        is_one: Bool, whether both go to one terminal, file or pipe.
        is_verbatim: Bool, whether all lines of the workers are wanted as they are,
            those too that say nothing new.
        node: Int, the node of this launcher, or `None` while it is not known, or if
            the workers are on several.
        nodes: Dict of ints, the node of each worker that is on another one, by rank.
    """

    is_verbatim = False

    def __init__(
        self, output: TextIO | None = None, messages: TextIO | None = None
    ) -> None:
        output, messages = output or sys.stdout, messages or sys.stderr
        self.node: int | None = None
        self.nodes: dict[int, int] = {}
        self._output = Outlet(output, self._truncation_notice)
        # One queue for one terminal or file keeps the order.
        is_same = output and messages and _is_same_file(output, messages)
        self._words = (
            self._output if is_same else Outlet(messages, self._truncation_notice)
        )
        self.is_one = bool(is_same)
        self._console = Console(file=cast("TextIO", self._output), highlight=False)
        self._messages = Console(
            file=cast("TextIO", self._words), highlight=False, soft_wrap=True
        )
        # Not what rich thinks: FORCE_COLOR makes no terminal of a file.
        self._is_terminal = (
            self._output.isatty()
            and not self._console.is_dumb_terminal
            and not self.is_verbatim
        )
        # The line that each worker is drawing; who drew last stands last.
        self._unfinished: dict[int, str] = {}
        self._bar: tuple[int, str] | None = None
        self._bar_drawn_at = 0.0

    def line(self, rank: int, text: str) -> None:
        """Print a complete line of a worker."""
        self._unfinished.pop(rank, None)
        if self._is_terminal:
            self._erase_bar()
            self._console.print(self._decorate(rank, text), soft_wrap=True)
        else:
            text = f"[worker {rank}] {without_escapes(text)}"
            self._output.write(text.rstrip() + "\n")

    def progress(self, rank: int, text: str) -> None:
        """Note the line that a worker is drawing; `refresh` shows it."""
        self._unfinished.pop(rank, None)
        if text:
            self._unfinished[rank] = text

    def snapshot(self, rank: int, text: str) -> None:
        """Print a line that is being drawn, where it cannot be drawn over."""
        if not self._is_terminal:
            self.line(rank, text)

    def refresh(self) -> None:
        """Show what has changed; to be called a few times a second."""
        if self._is_terminal:
            self._draw_bar()
        self._output.flush()
        self._tell_failure()

    def message(
        self,
        text: str,
        level: Level = "info",
        *,
        rank: int | None = None,
        node: int | None = None,
    ) -> None:
        """Print the launcher's own words on stderr.

        Args:
            text: String.
            level: How grave they are. Defaults to `"info"`.
            rank: Int, the worker that they are about. Defaults to `None`.
            node: Int, whose launcher says them. Defaults to `None`, this one.
        """
        self._erase_line()
        self._output.flush()
        self._messages.print(Text(text, style=_STYLES[level]))

    def warn(self, text: str) -> None:
        """Print a warning of the launcher's on stderr."""
        self.message(text, "warning")

    def recall(self, rank: int, lines: Sequence[str]) -> None:
        """Repeat the last lines of a worker, which are out of sight, on stderr."""
        self.message(f"\ntfdp: the last lines of worker {rank}:", "error")
        for line in lines:
            self._messages.print(self._decorate(rank, line))
        self.message("")

    @property
    def has_no_reader(self) -> bool:
        """Bool, whether the reader of the output is gone, as of `| head`."""
        return isinstance(self._output.error, BrokenPipeError)

    @property
    def is_behind(self) -> bool:
        """Bool, whether the output is read, but more slowly than it is written."""
        return self._output.is_behind

    def close(self, timeout_seconds: float) -> bool:
        """Take away the bar, and wait until all is shown; may be called again.

        Args:
            timeout_seconds: Float, how long to wait.

        Returns:
            Bool, whether all is shown.
        """
        self._erase_bar()
        is_shown = self._output.drain(timeout_seconds)
        self._tell_failure()
        return self._words.drain(timeout_seconds) and is_shown

    def _truncation_notice(self, text: str) -> str:
        """Return the line that says in the output where a piece of it is missing."""
        return f"{text}\n"

    def _decorate(self, rank: int, text: str) -> Text:
        prefix = (f"[worker {rank}] ", _COLOURS[rank % len(_COLOURS)])
        return Text.assemble(prefix, Text.from_ansi(only_colours(text)))

    def _tell_failure(self) -> None:
        error = self._output.error
        if error is None or self.has_no_reader:
            return
        if user_code.is_new("unwritten output", self):
            self.warn(
                f"tfdp: warning: the output cannot be written ({error.strerror}); "
                "it is kept in the logs"
            )

    def _erase_bar(self) -> None:
        if self._bar is not None:
            self._erase_line()

    def _erase_line(self) -> None:
        """Erase the bar, or what the terminal has echoed there, such as ^C."""
        if self._is_terminal:
            self._output.write("\r\x1b[2K")
        self._bar = None

    def _draw_bar(self) -> None:
        bar = next(reversed(self._unfinished.items()), None)
        if bar is None or bar == self._bar:
            return
        now = time.monotonic()
        if self._bar is not None and now - self._bar_drawn_at < _REDRAW_SECONDS:
            return
        self._erase_bar()
        line = self._decorate(*bar)
        # A line that wraps could not be erased.
        line.truncate(self._console.width - 1, overflow="ellipsis")
        self._console.print(line, end="", no_wrap=True)
        self._bar, self._bar_drawn_at = bar, now


@dataclasses.dataclass(frozen=True)
class Entry:
    """Line of the output of a job, as `--log-format json` writes it.

    Args:
        message: String, what was said: a worker's line as it is in the worker's log.
        stream: `"launcher"` or `"worker"`, who said it; stdout and stderr of a worker
            are one stream. Defaults to `"launcher"`.
        level: `"info"`, `"warning"` or `"error"`; `None` of a worker, whose lines
            are not looked into. Defaults to `None`.
        node: Int, where it was said, or `None` if that is not known. Defaults to
            `None`.
        rank: Int, the worker that has said it, or that the launcher's words are
            about, or `None`. Defaults to `None`.
        time: String, when, by the clock of this machine, in UTC. Defaults to now.

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
        """Return the line of JSON, in ASCII, which any locale can write."""
        # What is no text, in the name of a file, would be no JSON for many readers.
        message = self.message.encode("utf-8", "replace").decode()
        about = {
            n: getattr(self, n) for n in ("time", "level", "stream", "node", "rank")
        }
        return json.dumps({**about, "message": message}) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Entry | None:
        """Read a line; return `None` if it is none of these.

        Args:
            line: String.
        """
        try:
            fields = json.loads(line)
            entry = cls(**fields)
        except (ValueError, TypeError, RecursionError):
            return None
        return entry if entry._has_right_types() else None

    def _has_right_types(self) -> bool:
        return (
            all(type(text) is str for text in (self.message, self.stream, self.time))
            and all(type(n) in (int, type(None)) for n in (self.node, self.rank))
            and self.level in (None, *get_args(Level))
        )


class JsonScreen(Screen):
    """Printer of all lines as JSON: the workers' on stdout, the launcher's on stderr.

    No line of a worker is left out, held back or repeated; progress bars are lines
    as in a file.
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
        """Write the launcher's own words."""
        self._output.flush()
        node = self.node if node is None else node
        self._words.write(Entry(text, level=level, node=node, rank=rank).to_line())
        self._words.flush()

    def recall(self, rank: int, lines: Sequence[str]) -> None:
        """Repeat nothing: who reads JSON finds all lines of a worker by its rank."""

    def _truncation_notice(self, text: str) -> str:
        return Entry(text, level="warning", node=self.node).to_line()


@contextlib.contextmanager
def showing(
    signals: SignalPipe, until: float | None, log_format: str = "text"
) -> Iterator[Screen]:
    """Make a screen; in the end wait for its reader, unless the job is to end.

    Args:
        signals: The `SignalPipe`.
        until: Float, by `time.monotonic()`, when the job is stopped, or `None`.
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
            if signals.received or (until and time.monotonic() > until):
                end = min(end, time.monotonic() + _LAST_LINES_SECONDS)
