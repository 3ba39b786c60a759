"""Shows the output of all workers on one screen, or in one file."""

from __future__ import annotations

import os
import sys
import time
from typing import TextIO

from rich.console import Console
from rich.text import Text

from tfdp.cli.lines import only_colours, without_escapes

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")
_REDRAW_SECONDS = 0.1


class Screen:
    """Prints the lines of the workers, each behind the name of its worker.

    On a terminal, the line that some worker is drawing (a progress bar) stays
    at the bottom and is redrawn below what others print. In a file or pipe it
    appears once complete, and now and then until it is. The launcher's own
    words go to stderr.

    Args:
        output: Where the lines go. Defaults to `sys.stdout`.
        messages: Where the launcher's own words go. Defaults to `sys.stderr`.
    """

    def __init__(
        self, output: TextIO | None = None, messages: TextIO | None = None
    ) -> None:
        self._output = output or sys.stdout
        for stream in (self._output, messages or sys.stderr):
            # A locale without the characters of a bar is no reason to fail.
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")
        self._console = Console(file=self._output, highlight=False)
        self._messages = Console(
            file=messages or sys.stderr, highlight=False, soft_wrap=True
        )
        # Not what rich thinks: FORCE_COLOR makes no terminal of a file.
        self._is_terminal = self._output.isatty() and not self._console.is_dumb_terminal
        # The line that each worker is drawing; who drew last stands last.
        self._unfinished: dict[int, str] = {}
        self._bar: tuple[int, str] | None = None
        self._bar_drawn_at = 0.0

    def line(self, rank: int, text: str) -> None:
        """Prints a complete line of a worker."""
        self._unfinished.pop(rank, None)
        if self._is_terminal:
            self._erase_bar()
            self._console.print(self._decorate(rank, text), soft_wrap=True)
        else:
            text = f"[worker {rank}] {without_escapes(text)}"
            self._output.write(text.rstrip() + "\n")

    def progress(self, rank: int, text: str) -> None:
        """Notes the line that a worker is drawing; `refresh` shows it."""
        self._unfinished.pop(rank, None)
        if text:
            self._unfinished[rank] = text

    def snapshot(self, rank: int, text: str) -> None:
        """Prints a line that is being drawn, where it cannot be drawn over."""
        if not self._is_terminal:
            self.line(rank, text)

    def refresh(self) -> None:
        """Shows what has changed; to be called a few times a second."""
        if self._is_terminal:
            self._draw_bar()
        self._output.flush()

    def message(self, text: str, style: str = "") -> None:
        """Prints the launcher's own words on stderr."""
        self._erase_bar()
        self._output.flush()
        self._messages.print(Text(text, style=style))

    def quote(self, rank: int, text: str) -> None:
        """Repeats a line of a worker on stderr."""
        self._messages.print(self._decorate(rank, text))

    def mute(self) -> None:
        """Prints nothing more: nobody reads it."""
        null = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        # Python flushes what it still holds when it exits.
        os.dup2(null.fileno(), self._output.fileno())

    def close(self) -> None:
        """Takes away the bar that is still there."""
        self._erase_bar()
        self._output.flush()

    def _decorate(self, rank: int, text: str) -> Text:
        prefix = (f"[worker {rank}] ", _COLOURS[rank % len(_COLOURS)])
        return Text.assemble(prefix, Text.from_ansi(only_colours(text)))

    def _erase_bar(self) -> None:
        if self._bar is not None:
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
