"""Shares of a job's time, computed from the lines of its ledger."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tfdp.features.goodput.ledger import FORMAT, Moment, moment_of
from tfdp.ground.arguments import is_integer, is_number

# Classes of time. These names, which the lines of a ledger contain, must not change,
# since files of earlier versions have them. `CLASSES` has the names that tables show,
# in the order of their rows.
STEP, AGAIN, STARTUP, TRACE = "step", "again", "startup", "trace"
DATA, EXPOSED, EVALUATION, SAVE = "data", "exposed", "evaluation", "save"
BACKUP, RECOVERY, IDLE, UNKNOWN = "backup", "recovery", "idle", "unknown"
CLASSES = {
    STEP: "steps that count",
    AGAIN: "steps done again",
    STARTUP: "start-up",
    TRACE: "tracing",
    DATA: "waiting for data",
    EXPOSED: "exposed communication",
    EVALUATION: "evaluation",
    SAVE: "saves",
    RECOVERY: "recovery",
    IDLE: "idle",
    UNKNOWN: "not recorded",
}
# Classes into which the time of steps is divided. If an earlier attempt has done the
# same steps, all this time counts as `AGAIN`, since the job gains nothing by it.
_OF_STEPS = (STEP, DATA, EXPOSED)
# Classes that a line of a ledger may have. Backups count as saves in tables, but lines
# list them separately, since an attempt that begins at batch 0 although there were
# backups is a new job.
_IN_LINES = {*CLASSES, BACKUP}
# A gap between two lines of a ledger counts as time that was not recorded only if it is
# longer than this many seconds: shorter gaps are rounding errors.
_NOTABLE_SECONDS = 0.5
_NUMBERS = (
    "no",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
)
# Offset that keeps the numbers of calls of `fit` in several ledgers distinct: no ledger
# has more calls.
_FITS_OF_LEDGER = 1_000_000
# Position of a step in a job: its number of `fit`, epoch and batch, in this order, so
# that tuples compare as the steps follow each other.
Position = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Shares:
    """Seconds of a job by class of time, such as steps, start-up or saves.

    Args:
        seconds: Dict from each class of `CLASSES` to its seconds.
        num_restarts: Int, number of attempts that were restarts of the job.
        num_damaged: Int, lines of the ledger that could not be read. Defaults to 0.
        measures_communication: Bool, whether exposed communication was measured;
            otherwise it is a part of the steps. Defaults to `False`.
        launched: `Moment` at which the launcher of the last attempt started, or `None`
            without one. Defaults to `None`.

    Example:

    >>> shares = Shares({"step": 93.0, "startup": 4.0, "recovery": 2.0, "save": 1.0}, 2)
    >>> str(shares)
    'goodput 93 %: 4 % start-up, 2 % two restarts, 1 % saves'
    """

    seconds: dict[str, float]
    num_restarts: int
    num_damaged: int = 0
    measures_communication: bool = False
    launched: Moment | None = None

    @property
    def total_seconds(self) -> float:
        """Float, seconds of the job, the sum over all classes."""
        return sum(self.seconds.values())

    def share(self, name: str) -> float:
        """Return the share of a class in the time of the job.

        Args:
            name: String, a class of `CLASSES`.

        Returns:
            Float from 0 to 1.
        """
        total = self.total_seconds
        return self.seconds.get(name, 0.0) / total if total else 0.0

    def label(self, name: str) -> str:
        """Return the words for a class of time, as `str(self)` has them.

        Args:
            name: String, a class of `CLASSES`.

        Returns:
            String, such as `"start-up"`; for recovery the number of restarts, if there
            were some, such as `"two restarts"`.
        """
        count = self.num_restarts
        if name != RECOVERY or not count:
            return CLASSES[name]
        number = _NUMBERS[count] if count < len(_NUMBERS) else f"{count:,}"
        return f"{number} restart{'s' if count > 1 else ''}"

    def __str__(self) -> str:
        percents = {name: round(100 * self.share(name)) for name in CLASSES}
        others = [name for name in CLASSES if name != STEP]
        # `sort` is stable, so equal shares stay in the order of `CLASSES`.
        others.sort(key=self.share, reverse=True)
        parts = [f"{percents[n]} % {self.label(n)}" for n in others if percents[n]]
        text = f"goodput {percents[STEP]} %"
        return f"{text}: {', '.join(parts)}" if parts else text


def shares_of_several(ledgers: Sequence[Iterable[str]]) -> Shares:
    """Compute the `Shares` of a job whose times are in several files, its ledgers.

    Args:
        ledgers: Sequence of iterables of strings, the lines of each ledger.

    Returns:
        `Shares`.
    """
    account = Account()
    timed = [_timed(number, lines) for number, lines in enumerate(ledgers)]
    for _, number, line in heapq.merge(*timed, key=lambda each: each[:2]):
        account.add(line, number)
    return account.shares


def _timed(number: int, lines: Iterable[str]) -> Iterator[tuple[float, int, str]]:
    """Yield the lines of a ledger with their times, for a merge with other ledgers.

    A damaged line has the time of the previous one.

    Args:
        number: Int, number of the ledger, which is yielded with each line.
        lines: Iterable of strings.

    Returns:
        Iterator of tuples of the time in seconds, `number` and the line.
    """
    seconds = 0.0
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
            seconds = max(seconds, float(_parse(line)["time"]))
        yield seconds, number, line


def shares(lines: Iterable[str]) -> Shares:
    """Compute the `Shares` of time of the last job in a ledger, its file of times.

    A ledger has several jobs if training was complete and began again. Damaged lines
    are left out; their time is not recorded.

    Args:
        lines: Iterable of strings, the lines of the ledger.

    Returns:
        `Shares`.

    Example:

    >>> lines = [
    ...     '{"kind": "attempt", "format": 1, "time": 100, "up": 7}',
    ...     '{"kind": "work", "time": 104, "up": 11, "seconds": {"startup": 1, '
    ...     '"step": 3}, "fit": 1, "epoch": 0, "first": 0, "last": 29}',
    ... ]
    >>> str(shares(lines))
    'goodput 75 %: 25 % start-up'
    """
    account = Account()
    account.add_all(lines)
    return account.shares


class Account:
    """Sums of a job's seconds by class, from lines of its ledger, the file of times."""

    def __init__(self) -> None:
        self._num_damaged = 0
        self._clear()

    @property
    def shares(self) -> Shares:
        """`Shares` of the job's time in the lines that were added so far."""
        return Shares(
            {name: self._seconds.get(name, 0.0) for name in CLASSES},
            max(0, self._num_attempts - 1 - self._num_continued),
            self._num_damaged,
            self._measures_communication,
            self._launched,
        )

    def add_all(self, lines: Iterable[str]) -> None:
        """Add several lines of the ledger to the sums, one after another."""
        for line in lines:
            self.add(line)

    def add(self, text: str, ledger: int = 0) -> None:
        """Add a line of a ledger to the sums, or count it if it is damaged.

        Args:
            text: String, the line.
            ledger: Int, index of its ledger, if the lines of several ledgers are added
                in the order of time. Defaults to 0.
        """
        if not text.strip():
            return
        try:
            line = _parse(text)
        except (ValueError, RecursionError):
            self._num_damaged += 1
            return
        if "fit" in line:
            line["fit"] += ledger * _FITS_OF_LEDGER
        self._add(line)

    def _clear(self) -> None:
        """Reset the sums and the last recorded step: a new job begins in the ledger."""
        self._seconds: dict[str, float] = {}
        self._num_attempts = 0
        # Number of attempts that continued the job of the previous one without a
        # restart: they do not count as restarts.
        self._num_continued = 0
        self._is_done = self._has_backups = self._measures_communication = False
        self._has_relaunched = self._had_backups = False
        self._last: Moment | None = None
        self._launched: Moment | None = None
        # Identity of the last attempt's process: an attempt in the same process is not
        # a restart. `None` if the ledger is older than this field of its lines.
        self._process: Any = None
        self._furthest: Position | None = None
        # Lines of an attempt up to its first step, or `None` afterwards. Only that step
        # shows whether the attempt has begun a new job; then the sums are cleared and
        # these lines are added again.
        self._opening: list[dict[str, Any]] | None = None

    def _add(self, line: dict[str, Any]) -> None:
        """Add a parsed line to the sums, if its kind is attempt, work or exit."""
        match line["kind"]:
            case "attempt":
                self._begin_attempt(line)
            case "work":
                self._add_work(line)
            case "exit":
                self._last, self._is_done = self._moment(line), line["done"]

    def _begin_attempt(self, line: dict[str, Any]) -> None:
        """Count an attempt, a start of the job, and the time before it.

        Before the first attempt, time since the launch is start-up. Before a later one,
        time since the previous line is recovery, or idle if one process makes both
        attempts; if the job was launched again, only time since the launch is recovery,
        and time before it is idle. If the job was complete, a new job begins, except
        within one launch: all sums are reset first.

        Args:
            line: Dict, a line of the kind `"attempt"`: the moment of its start; the
                moment of its launch (`"launched"`); the identity of its `"process"`;
                whether it `"continues"` the job without a restart; and whether its
                process has written another ledger before (`"follows"`).
        """
        start = moment_of(line)
        launched = line.get("launched")
        since = None if launched is None else moment_of(launched)
        is_same_launch = since is not None and since == self._launched
        if self._is_done and not is_same_launch:
            self._clear()
        if self._last is None:
            if since is not None and not line.get("follows"):
                self._count(STARTUP, start.since(since))
        elif self._process is not None and line.get("process") == self._process:
            # The process of the previous attempt has begun another `fit`. No restart
            # was needed, so the time between the two attempts is idle, not recovery.
            self._count(IDLE, start.since(self._last))
            self._num_continued += 1
        elif since is None or is_same_launch or not since.since(self._last):
            self._count(RECOVERY, start.since(self._last))
        else:
            # No process of the job existed until the job was launched again: that time
            # is idle, and only the time since the launch is recovery.
            self._count(IDLE, since.since(self._last))
            self._count(RECOVERY, start.since(since))
        self._has_relaunched = not is_same_launch
        self._had_backups = self._has_backups
        self._launched, self._last, self._is_done = since, start, False
        self._process = line.get("process")
        self._num_attempts += 1
        self._num_continued += bool(line.get("continues"))
        self._opening = [line]

    def _add_work(self, line: dict[str, Any]) -> None:
        """Add the seconds of a line of the kind `"work"` to the sums, by class.

        If more than half a second since the previous line is not part of these seconds,
        the difference is added to `UNKNOWN`. If an attempt's first line with steps
        shows that it has begun a new job, the sums of earlier attempts are dropped.
        """
        if self._opening is not None:
            self._opening.append(line)
            if "first" in line:
                opening, self._opening = self._opening, None
                if self._begins_without_backups(line):
                    self._clear()
                    for each in opening:
                        self._add(each)
                    return
        moment, seconds = self._moment(line), line["seconds"]
        if self._last is not None:
            missing = moment.since(self._last) - sum(seconds.values())
            self._count(UNKNOWN, missing if missing > _NOTABLE_SECONDS else 0.0)
        self._last = moment
        self._measures_communication |= EXPOSED in seconds
        self._has_backups |= BACKUP in seconds
        again = self._fraction_again(line)
        for name, value in seconds.items():
            of_again = again * value if name in _OF_STEPS else 0.0
            self._count(AGAIN, of_again)
            self._count(self._class_of(name, line), value - of_again)
        if "first" in line:
            last = line["fit"], line["epoch"], line["last"]
            self._furthest = max(self._furthest or last, last)

    def _begins_without_backups(self, line: dict[str, Any]) -> bool:
        """Return whether an attempt starts anew, since the backups were deleted.

        True if its first step is the first batch of its first `fit`, although earlier
        attempts had backups, and if the job was launched again.

        Args:
            line: Dict, the first line of the attempt that has steps: its `"fit"`,
                `"epoch"` and `"first"` batch are compared.
        """
        is_first = (line["fit"], line["epoch"], line["first"]) == (1, 0, 0)
        return is_first and self._had_backups and self._has_relaunched

    def _class_of(self, name: str, line: dict[str, Any]) -> str:
        """Return the class of `CLASSES` to which seconds of a line are added.

        Backups are added to saves. Start-up in a later attempt is recovery if steps of
        the same or a later call of `fit` were recorded before. All other classes stay
        the same.

        Args:
            name: String, the class in the line.
            line: Dict, the line; its `"fit"` is the number of the call of `fit`.
        """
        is_known = self._furthest is not None and line["fit"] <= self._furthest[0]
        if name == STARTUP and self._num_attempts > 1 and is_known:
            return RECOVERY
        return SAVE if name == BACKUP else name

    def _fraction_again(self, line: dict[str, Any]) -> float:
        """Return the fraction, 0 to 1, of a line's steps that repeat earlier steps."""
        if self._furthest is None or "first" not in line:
            return 0.0
        fit, epoch, batch = self._furthest
        first, last = line["first"], line["last"]
        if (line["fit"], line["epoch"]) != (fit, epoch):
            return float((line["fit"], line["epoch"]) < (fit, epoch))
        num_again = min(last, batch) - first + 1
        return max(0.0, num_again / (last - first + 1))

    def _moment(self, line: dict[str, Any]) -> Moment:
        """Return the moment of a line, with the boot id from the attempt's first line.

        Lines after the first one do not contain the id.
        """
        boot = "" if self._last is None else self._last.boot
        return dataclasses.replace(moment_of(line), boot=boot)

    def _count(self, name: str, seconds: float) -> None:
        """Add seconds to the sum of the class of time `name`."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds


def _parse(text: str) -> dict[str, Any]:
    """Parse a line of a ledger, a JSON object, and check its kind and its fields.

    Raises:
        ValueError: If it is damaged.
    """
    line = json.loads(text)
    if not isinstance(line, dict) or line.get("format", FORMAT) != FORMAT:
        raise ValueError("it is no object of a known format")
    kind = line.get("kind")
    if kind == "moved":
        return line
    moment_of(line)
    if kind == "attempt":
        if line.get("launched") is not None:
            moment_of(line["launched"])
    elif kind == "work":
        _check_work(line)
    elif kind != "exit" or not isinstance(line.get("done"), bool):
        raise ValueError("it is of an unknown kind")
    return line


def _check_work(line: dict[str, Any]) -> None:
    """Raise `ValueError` unless a line of kind `"work"` has valid seconds and steps."""
    seconds: Any = line.get("seconds")
    is_valid = isinstance(seconds, dict) and all(
        is_number(value) and value >= 0 for value in seconds.values()
    )
    if not is_valid or not seconds.keys() <= _IN_LINES:
        raise ValueError("its seconds are invalid")
    names = ("fit", "epoch", "first", "last") if "first" in line else ("fit",)
    position = [line.get(name) for name in names]
    is_valid = all(is_integer(v, least=0) and is_number(v) for v in position)
    if not is_valid or ("first" in line and line["first"] > line["last"]):
        raise ValueError("its steps are invalid")
