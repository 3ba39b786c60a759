"""Output of all workers on one screen, or in one file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Literal, TextIO, cast

from rich.console import Console
from rich.text import Text

from tfdp.ground import user_code
from tfdp.launch.cli.lines import only_colours, without_escapes
from tfdp.launch.cli.outlet import Outlet

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")
_REDRAW_SECONDS = 0.1

# How grave the launcher's own words are, and how a terminal shows it.
Level = Literal["info", "warning", "error"]
_STYLES: dict[Level, str] = {"info": "", "warning": "bold yellow", "error": "bold red"}


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
