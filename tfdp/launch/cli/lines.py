"""Readers that split a worker's output into lines as a terminal would show them."""

from __future__ import annotations

import codecs
import os
import re
from typing import IO

# A line without a newline must not fill the memory, so it is cut after this many
# characters.
MAX_LINE_LENGTH = 1 << 16
# A Linux pipe holds this many bytes by default, so one read can empty it.
CHUNK_BYTES = 1 << 16

_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])"
)
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


class LineReader:
    r"""Decoder of a worker's bytes into lines as a terminal shows them.

    A progress bar redraws its line after a carriage return. Only the last drawn state
    of such a line is kept.

    Args:
        most: Int, number of characters above which a line without a newline is cut and
            returned as a complete line. Defaults to 65,536.

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
        """Decode the next bytes, and return the lines that they complete."""
        text = self._pending + self._decoder.decode(data)
        *lines, rest = text.split("\n")
        if len(rest) > self._most and "\r" not in rest:
            lines.append(rest)
            rest = ""
        *drawn, tail = rest.split("\r")
        if drawn and not without_escapes(tail).strip():
            # The line ends with a carriage return, which is kept, since the next text
            # will be drawn over the line.
            self._pending = f"{last_drawn(rest)}\r{tail}"
        else:
            self._pending = tail
        return [last_drawn(line) for line in lines]

    def close(self) -> list[str]:
        """End the output, and return the unfinished line if there is one."""
        text = self._pending + self._decoder.decode(b"", final=True)
        self._pending = ""
        return [last_drawn(text)] if text.strip() else []

    @property
    def unfinished(self) -> str:
        """String, the line that is being drawn, or `""`."""
        return last_drawn(self._pending)


class PipeReader(LineReader):
    """Non-blocking reader of lines from a pipe.

    Args:
        pipe: Binary stream to read from.
        most: Int, number of characters above which a line without a newline is cut.
            Defaults to 65,536.

    Attributes:
        has_ended: Bool, whether the other end is closed and all is read.
    """

    def __init__(self, pipe: IO[bytes] | None, most: int = MAX_LINE_LENGTH) -> None:
        super().__init__(most)
        assert pipe is not None  # the type of a `Popen`'s pipes includes `None`
        self.has_ended = False
        self.pipe = pipe
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        """Return the descriptor of the pipe, so that a selector can wait for it."""
        return self.pipe.fileno()

    def read(self) -> list[str]:
        """Read one chunk without blocking, and return the lines that it completes."""
        try:
            data = os.read(self.fileno(), CHUNK_BYTES)
        except BlockingIOError:
            return []
        self.has_ended = not data
        return self.feed(data)


def last_drawn(line: str) -> str:
    """Return the visible part of a line that was redrawn after carriage returns.

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
    """Remove all escape sequences except colours.

    Sequences that move the cursor would write over the worker's name before the line.
    """
    if "\x1b" not in text:
        return text
    return _ESCAPE.sub(lambda m: m[0] if _COLOUR.fullmatch(m[0]) else "", text)
