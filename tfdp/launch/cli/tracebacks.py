"""Filter that shows the same traceback of several workers once."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence

from tfdp.launch.cli.lines import without_escapes

# A progress bar may be on the same line before a traceback, or before the message after
# Ctrl-C, so these texts need not be at the start of a line.
_BEGIN = "Traceback (most recent call last):"
_INTERRUPTED = "tfdp: interrupted"
# The message of a `WorkerLost` error names the place in the script, so the frames of a
# worker whose peer was lost are not shown.
_LOST = re.compile(r"tfdp\.[\w.]+\.WorkerLost: ")
# Matches a frame in a file, with its line number. A name such as `<string>` is skipped,
# since users cannot open it.
_FRAME = re.compile(r'  File "(?!<)(.+)", line (\d+)')
# Python writes all lines of a traceback at once, so a traceback is complete after this
# many seconds without a further line.
_PAUSE_SECONDS = 0.3
# A traceback may never seem complete, so after `_MAX_SECONDS`, or with `_MAX_LINES`
# lines, it is shown as it is.
_MAX_SECONDS = 2.0
_MAX_LINES = 1000
# Workers fail from one cause at about the same time, so a traceback that was shown
# longer ago than this many seconds is shown in full again.
_RECENT_SECONDS = 30.0
# Addresses and task indices differ between processes, so they are ignored when
# tracebacks of two workers are compared.
_PROCESS_DETAILS = re.compile(r"(?<=0x)[0-9a-f]+|(?<=/task:)\d+")


@dataclasses.dataclass
class _Block:
    """Held-back lines of one worker: a traceback, and the lines that follow it.

    Args:
        rank: Int, rank of the worker.
        began_at: Float, time of the first line, by `time.monotonic`.
        lines: List of strings, the lines. Defaults to none.
        added_at: Float, time of the last line, by the same clock. Defaults to `0.0`.
    """

    rank: int
    began_at: float
    lines: list[str] = dataclasses.field(default_factory=list)
    added_at: float = 0.0

    def add(self, line: str) -> None:
        """Add a line that is held back."""
        self.lines.append(line)
        self.added_at = time.monotonic()

    def is_complete(self) -> bool:
        """Return whether the traceback is complete, or was held back for too long.

        It is complete if its last line is not indented, and no other line has followed
        within `_PAUSE_SECONDS`. It was held back for too long if its first line is
        older than `_MAX_SECONDS`, or if it has `_MAX_LINES` lines.
        """
        now = time.monotonic()
        if now - self.began_at >= _MAX_SECONDS or len(self.lines) >= _MAX_LINES:
            return True
        is_within = self.lines[-1].startswith(" ") or len(self.lines) == 1
        return not is_within and now - self.added_at >= _PAUSE_SECONDS


class Tracebacks:
    """Filter of the workers' lines that shows the same traceback once.

    All workers run the same script, and often fail with the same error. A traceback is
    held back until it is complete, so that tracebacks of two workers do not mix. If
    another worker has just shown the same one, a single line replaces it. All other
    lines pass at once. After Ctrl-C, only one worker shows where it was interrupted. A
    worker whose peer was lost shows its error without frames.

    Attributes:
        is_interrupted: Bool, whether Ctrl-C was forwarded to the workers.
        shown_for: Dict from the rank of a worker whose last traceback was left out to
            the rank of the worker that has shown the same one.

    Example:

    >>> tracebacks = Tracebacks()
    >>> error = ["Traceback (most recent call last):", '  File "a.py"', "ValueError: 3"]
    >>> tracebacks.take(0, ["Epoch 1/2", *error])
    ['Epoch 1/2']
    >>> tracebacks.rest(0) == error
    True
    >>> tracebacks.take(1, error), tracebacks.rest(1)
    ([], ['tfdp: the same error as on worker 0'])
    """

    def __init__(self) -> None:
        self._held: dict[int, _Block] = {}
        self._shown: list[_Block] = []
        self.shown_for: dict[int, int] = {}
        self.is_interrupted = self._has_shown_interruption = False

    def interrupt(self) -> None:
        """Record that Ctrl-C was forwarded to the workers.

        From then on, only the first traceback that it has caused is shown, as one line.
        """
        self.is_interrupted = True

    def holds(self, rank: int) -> bool:
        """Return whether lines of a worker are held back."""
        return rank in self._held

    def take(self, rank: int, lines: Sequence[str]) -> list[str]:
        """Filter complete lines of a worker, and return the lines to show now.

        From the beginning of a traceback on, all lines of the worker are held back,
        until `due` or `rest` returns what to show for them.
        """
        return [shown for line in lines for shown in self._take(rank, line)]

    def due(self, rank: int) -> list[str]:
        """Stop holding back a traceback that is complete; return the lines to show.

        While it is incomplete, it stays held back, and the list is empty.
        """
        block = self._held.get(rank)
        return self.rest(rank) if block and block.is_complete() else []

    def rest(self, rank: int) -> list[str]:
        """Stop holding back a worker's lines; return the lines to show for them.

        A single line replaces a traceback that another worker has just shown. The list
        is empty if no lines are held back.
        """
        block = self._held.pop(rank, None)
        if block is None:
            return []
        # Chained tracebacks follow each other, and only the last one is that of the
        # error that has ended the script.
        begin = max(i for i, line in enumerate(block.lines) if _begins(line))
        if self.is_interrupted and (end := _end_of_ctrl_c(block.lines, begin)):
            said = self._show_interruption_once(f"{_INTERRUPTED}{_place(block.lines)}")
            return said + block.lines[end:]
        lost = [i for i, line in enumerate(block.lines) if _LOST.match(line)]
        if lost:
            del block.lines[begin : lost[-1]]
        return self._without_repeats(block)

    def _take(self, rank: int, line: str) -> list[str]:
        """Filter one line of a worker, and return the lines to show now.

        A line of a traceback is held back: the list is then empty, or has only the
        progress bar before the traceback.
        """
        if rank in self._held:
            self._held[rank].add(line)
            return []
        if _begins(line):
            bar = line.rstrip().removesuffix(_BEGIN)
            # A text that ends with a space, as in "ERROR Traceback", is a part of a
            # message, not a progress bar.
            is_bar = bool(bar) and not bar[-1].isspace()
            self._held[rank] = _Block(rank, time.monotonic())
            self._held[rank].add(_BEGIN if is_bar else line)
            return [bar] if is_bar else []
        if self.is_interrupted and _INTERRUPTED in line:
            bar, said, where = line.partition(_INTERRUPTED)
            return ([bar] if bar.strip() else []) + self._show_interruption_once(
                said + where
            )
        return [line]

    def _show_interruption_once(self, line: str) -> list[str]:
        """Return `[line]` at the first call, and an empty list at later calls.

        So only the first worker shows where Ctrl-C has interrupted the script.

        Args:
            line: String, `"tfdp: interrupted"` with the place in the script.
        """
        if self._has_shown_interruption:
            return []
        self._has_shown_interruption = True
        return [line]

    def _without_repeats(self, block: _Block) -> list[str]:
        """Return the lines to show for a complete traceback.

        If another worker has just shown the same one, a single line names that worker.
        If only the message differs, the frames are left out.
        """
        self.shown_for.pop(block.rank, None)
        now = time.monotonic()
        self._shown = [b for b in self._shown if now - b.added_at < _RECENT_SECONDS]
        for other in self._shown:
            if other.rank == block.rank:
                continue
            size = _num_common_lines(block.lines, other.lines)
            rest = block.lines[size:]
            if not rest:
                self.shown_for[block.rank] = other.rank
                return [f"tfdp: the same error as on worker {other.rank}"]
            # Tracebacks that differ only in the message have the same frames, so only
            # the message is shown.
            if all(_is_message(lines, size) for lines in (block.lines, other.lines)):
                return [
                    f"tfdp: the same traceback as on worker {other.rank}, and:",
                    *rest,
                ]
        self._shown.append(block)
        return block.lines


def _begins(line: str) -> bool:
    """Return whether a line begins a traceback."""
    return line.rstrip().endswith(_BEGIN)


def _end_of_ctrl_c(lines: Sequence[str], begin: int) -> int:
    """Return the index after the last line of a traceback by Ctrl-C, else 0.

    An interrupted call in C++ raises another error that names `KeyboardInterrupt`. All
    lines then belong to the traceback.

    Args:
        lines: Sequence of strings, the held-back lines.
        begin: Int, index of the first line of the traceback.
    """
    if "KeyboardInterrupt" in lines[begin:]:
        return lines.index("KeyboardInterrupt", begin) + 1
    is_named = any("KeyboardInterrupt" in line for line in lines[begin:])
    return len(lines) if is_named else 0


def _num_common_lines(lines: Sequence[str], others: Sequence[str]) -> int:
    """Return the number of leading lines that two tracebacks have in common."""
    size = 0
    for line, other in zip(lines, others, strict=False):
        if _comparable(line) != _comparable(other):
            break
        size += 1
    return size


def _is_message(lines: Sequence[str], index: int) -> bool:
    """Return whether a line of a traceback is its message, after the frames."""
    line = lines[index] if 1 < index < len(lines) else ""
    return bool(line.strip()) and not line.startswith(" ")


def _comparable(line: str) -> str:
    """Return a line without what differs between equal tracebacks of two workers.

    That is addresses, task indices, escape sequences, spaces at the end, and a progress
    bar before the first line of a traceback.
    """
    text = _PROCESS_DETAILS.sub("", without_escapes(line)).rstrip()
    return _BEGIN if text.endswith(_BEGIN) else text


def _place(lines: Sequence[str]) -> str:
    """Return the place of a traceback's first frame that is in a file.

    Returns:
        String such as `" at line 3 of train.py"`, or `""` without such a frame.
    """
    for line in lines:
        if match := _FRAME.match(without_escapes(line)):
            return f" at line {match[2]} of {match[1]}"
    return ""
