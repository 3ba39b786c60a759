"""Cuts the output of a worker into lines, of which some are still being drawn."""

from __future__ import annotations

import codecs
import re

# Longer text without an end is cut: nobody reads it, and memory is finite.
_MAX_LINE_LENGTH = 1 << 16

_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])"
)
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


class LineReader:
    r"""Turns the bytes that a worker writes into lines as a terminal shows them.

    A carriage return starts the line anew, as progress bars do: of such a line
    only what was drawn last is kept.

    Example:
    >>> reader = LineReader()
    >>> reader.feed(b"one\n 1/9\r 2/9")
    ['one']
    >>> reader.unfinished
    ' 2/9'
    >>> reader.feed(b"\r 9/9\n")
    [' 9/9']
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending = ""

    def feed(self, data: bytes) -> list[str]:
        """Takes the next bytes; returns the lines that they complete."""
        text = self._pending + self._decoder.decode(data)
        *lines, rest = text.split("\n")
        if len(rest) > _MAX_LINE_LENGTH and "\r" not in rest:
            lines.append(rest)
            rest = ""
        # A return at the very end must stay: what comes next draws over.
        self._pending = last_drawn(rest) + "\r" * rest.endswith("\r")
        return [last_drawn(line) for line in lines]

    def close(self) -> list[str]:
        """Ends the output; returns the unfinished line if there is one."""
        text = self._pending + self._decoder.decode(b"", final=True)
        self._pending = ""
        return [last_drawn(text)] if text.strip() else []

    @property
    def unfinished(self) -> str:
        """The line that is being drawn; empty if there is none."""
        return last_drawn(self._pending)


def last_drawn(line: str) -> str:
    """Returns what is left to see of a line after its carriage returns.

    Args:
        line: String without a line feed.

    Returns:
        String, the last part that is not blank.
    """
    parts = line.replace("\b", "").split("\r")
    drawn = [part for part in parts if without_escapes(part).strip()]
    return drawn[-1] if drawn else ""


def without_escapes(text: str) -> str:
    """Removes a terminal's escape sequences: colours, cursor movements, titles."""
    return _ESCAPE.sub("", text) if "\x1b" in text else text


def only_colours(text: str) -> str:
    """Removes all escape sequences but colours.

    What moves the cursor would take it away from behind the line's prefix.
    """
    if "\x1b" not in text:
        return text
    return _ESCAPE.sub(lambda m: m[0] if _COLOUR.fullmatch(m[0]) else "", text)
