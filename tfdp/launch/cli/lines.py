"""Lines of a worker's output, as a terminal would show them."""

from __future__ import annotations

import codecs
import os
import re
from typing import IO

# Longer text without an end is cut: nobody reads it, and memory is finite.
MAX_LINE_LENGTH = 1 << 16
# Read from a pipe at a time.
CHUNK_BYTES = 1 << 16

_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])"
)
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


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
