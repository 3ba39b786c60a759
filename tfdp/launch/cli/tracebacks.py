"""Tracebacks of several workers: one error is shown once."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence

from tfdp.launch.cli.lines import without_escapes

# A progress bar that was being drawn may stand before either, on the same line.
_BEGIN = "Traceback (most recent call last):"
_INTERRUPTED = "tfdp: interrupted"
# What follows from the error of another worker; the message says where this one was.
_LOST = re.compile(r"tfdp\.[\w.]+\.WorkerLost: ")
_FRAME = re.compile(r'  File "(?!<)(.+)", line (\d+)')
# A traceback is written at once; after such a pause it has ended.
_PAUSE_SECONDS = 0.3
_MAX_SECONDS = 2.0
_MAX_LINES = 1000
# One that comes later is told again: the first is out of sight.
_RECENT_SECONDS = 30.0
# What is not the same in two processes.
_OF_A_PROCESS = re.compile(r"(?<=0x)[0-9a-f]+|(?<=/task:)\d+")


@dataclasses.dataclass
class _Block:
    """Lines of a worker from the beginning of a traceback on."""

    rank: int
    began_at: float
    lines: list[str] = dataclasses.field(default_factory=list)
    added_at: float = 0.0

    def add(self, line: str) -> None:
        self.lines.append(line)
        self.added_at = time.monotonic()

    def is_complete(self) -> bool:
        now = time.monotonic()
        if now - self.began_at >= _MAX_SECONDS or len(self.lines) >= _MAX_LINES:
            return True
        is_within = self.lines[-1].startswith(" ") or len(self.lines) == 1
        return not is_within and now - self.added_at >= _PAUSE_SECONDS


class Tracebacks:
    """Filter of the workers' lines that shows what several of them say once.

    All workers run the same script, and so meet the same error. A traceback is held
    until it is complete, a moment later, so that those of two workers do not mix; one
    that another worker has just shown becomes a line. All other lines pass at
    once. Of workers that Ctrl-C has ended, one says where; of those that have lost
    another worker, none says by which calls.

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
        self._is_interrupted = self._has_said_where = False

    def interrupt(self) -> None:
        """Note that Ctrl-C was passed on to the workers."""
        self._is_interrupted = True

    def holds(self, rank: int) -> bool:
        """Return whether lines of this worker wait."""
        return rank in self._held

    def take(self, rank: int, lines: Sequence[str]) -> list[str]:
        """Take complete lines of a worker; return those to show now."""
        return [shown for line in lines for shown in self._take(rank, line)]

    def due(self, rank: int) -> list[str]:
        """Return what is to be shown instead of a traceback that is complete."""
        block = self._held.get(rank)
        return self.rest(rank) if block and block.is_complete() else []

    def rest(self, rank: int) -> list[str]:
        """Return what is to be shown instead of all that waits."""
        block = self._held.pop(rank, None)
        if block is None:
            return []
        # The last of chained ones.
        begin = max(i for i, line in enumerate(block.lines) if _begins(line))
        if self._is_interrupted and (end := _end_of_ctrl_c(block.lines, begin)):
            said = self._say_where(f"{_INTERRUPTED}{_place(block.lines)}")
            return said + block.lines[end:]
        lost = [i for i, line in enumerate(block.lines) if _LOST.match(line)]
        if lost:
            del block.lines[begin : lost[-1]]
        return self._fold(block)

    def _take(self, rank: int, line: str) -> list[str]:
        if rank in self._held:
            self._held[rank].add(line)
            return []
        if _begins(line):
            bar = line.rstrip().removesuffix(_BEGIN)
            # Not so "ERROR Traceback" and the like.
            is_bar = bool(bar) and not bar[-1].isspace()
            self._held[rank] = _Block(rank, time.monotonic())
            self._held[rank].add(_BEGIN if is_bar else line)
            return [bar] if is_bar else []
        if self._is_interrupted and _INTERRUPTED in line:
            bar, said, where = line.partition(_INTERRUPTED)
            return ([bar] if bar.strip() else []) + self._say_where(said + where)
        return [line]

    def _say_where(self, line: str) -> list[str]:
        if self._has_said_where:
            return []
        self._has_said_where = True
        return [line]

    def _fold(self, block: _Block) -> list[str]:
        """Leave out what another worker has shown."""
        now = time.monotonic()
        self._shown = [b for b in self._shown if now - b.added_at < _RECENT_SECONDS]
        for other in self._shown:
            if other.rank == block.rank:
                continue
            size = _common(block.lines, other.lines)
            rest = block.lines[size:]
            if not rest:
                return [f"tfdp: the same error as on worker {other.rank}"]
            # Only the message differs.
            if all(_is_message(lines, size) for lines in (block.lines, other.lines)):
                return [
                    f"tfdp: the same traceback as on worker {other.rank}, and:",
                    *rest,
                ]
        self._shown.append(block)
        return block.lines


def _begins(line: str) -> bool:
    return line.rstrip().endswith(_BEGIN)


def _end_of_ctrl_c(lines: Sequence[str], begin: int) -> int:
    """Return where the lines of an interruption end, or 0 if there is none.

    In the middle of a call in C++ it comes as another error that names it.
    """
    if "KeyboardInterrupt" in lines[begin:]:
        return lines.index("KeyboardInterrupt", begin) + 1
    is_named = any("KeyboardInterrupt" in line for line in lines[begin:])
    return len(lines) if is_named else 0


def _common(lines: Sequence[str], others: Sequence[str]) -> int:
    """Return how many lines at the beginning are the same."""
    size = 0
    for line, other in zip(lines, others, strict=False):
        if _comparable(line) != _comparable(other):
            break
        size += 1
    return size


def _is_message(lines: Sequence[str], index: int) -> bool:
    """Return whether the frames of a traceback have ended here."""
    line = lines[index] if 1 < index < len(lines) else ""
    return bool(line.strip()) and not line.startswith(" ")


def _comparable(line: str) -> str:
    text = _OF_A_PROCESS.sub("", without_escapes(line)).rstrip()
    return _BEGIN if text.endswith(_BEGIN) else text


def _place(lines: Sequence[str]) -> str:
    """Describe the first frame of a traceback, which is the script's."""
    for line in lines:
        if found := _FRAME.match(without_escapes(line)):
            return f" at line {found[2]} of {found[1]}"
    return ""
