"""File of a job's time: JSON lines that worker 0 appends, beside the backups."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tfdp.communication.cluster import tf_config
from tfdp.ground.arguments import is_number
from tfdp.ground.base.files import open_regular
from tfdp.ground.base.process_identity import boot_id, state_and_start
from tfdp.ground.text import say

# File name of a ledger in a folder of logs. A ledger beside a directory of backups has
# the directory's name and a dot in front, since other jobs may use the same parent.
NAME = "goodput.jsonl"
# Version of the lines of a ledger, written with each attempt: a line of another version
# is rejected, since its fields may have another meaning.
FORMAT = 1
# Key below `"tfdp"` in `TF_CONFIG`, under which a launcher passes the place of the
# ledger to its workers.
_KEY = "goodput"
# Largest number of bytes of a line that are read at once, so that a damaged ledger
# cannot fill the memory. A valid line has a few hundred bytes.
_MAX_LINE_BYTES = 1 << 16
# A ledger is opened without following a symbolic link, which could lead to another
# file, and without blocking at a FIFO.
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
_FLAGS |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def uptime() -> float:
    """Return the seconds since this machine's boot, unaffected by setting the clock."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


@dataclasses.dataclass(frozen=True)
class Moment:
    """A point in time, by the wall clock and by the time since the machine's boot.

    Args:
        time: Float, seconds of the wall clock.
        up: Float, seconds since the boot of the machine.
        boot: String, id of that boot, or `""` if it is unknown.

    Example:

    >>> Moment(time=50.0, up=9.0, boot="a").since(Moment(100.0, 5.0, "a"))
    4.0
    >>> Moment(time=107.0, up=3.0, boot="b").since(Moment(100.0, 5.0, "a"))
    7.0
    """

    time: float
    up: float
    boot: str

    @classmethod
    def now(cls) -> Moment:
        """Return the present moment."""
        try:
            boot = boot_id()
        except OSError:
            boot = ""
        return cls(time.time(), uptime(), boot)

    @classmethod
    def of_process_start(cls) -> Moment:
        """Return the moment at which this process started."""
        now, (_, ticks) = cls.now(), state_and_start(os.getpid())
        age = now.up - int(ticks) / os.sysconf("SC_CLK_TCK") if ticks else 0.0
        return cls(now.time - age, now.up - age, now.boot)

    def since(self, earlier: Moment) -> float:
        """Return the seconds since another moment, at least 0.

        They are measured by the time since the boot if both moments have the same boot
        id, and otherwise by the wall clock, which the system may have set in between.
        """
        is_one_boot = self.boot == earlier.boot != ""
        clock = "up" if is_one_boot else "time"
        return max(0.0, getattr(self, clock) - getattr(earlier, clock))


@dataclasses.dataclass(frozen=True)
class Launch:
    """Folder of logs and start of a launcher, passed to its workers in `TF_CONFIG`.

    Args:
        folder: String, absolute path of its folder of logs.
        since: `Moment` at which the launcher started.
    """

    folder: str
    since: Moment

    @classmethod
    def new(cls, folder: str | os.PathLike[str]) -> Launch:
        """Return the `Launch` of this process, which is a launcher.

        Args:
            folder: String or path-like, its folder of logs.
        """
        return cls(os.path.abspath(folder), Moment.of_process_start())

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Launch | None:
        """Return the `Launch` in `TF_CONFIG` of `environ`, or `None` without one."""
        try:
            settings = tf_config.read_settings(environ["TF_CONFIG"])[_KEY]
            folder = str(settings["folder"])
            return cls(folder, moment_of(settings["since"]))
        except (KeyError, TypeError, ValueError):
            return None

    def add_to(self, config: dict[str, Any]) -> None:
        """Add this launch to a `TF_CONFIG`, so that `from_environment` finds it.

        Args:
            config: Dict, the parsed value of `TF_CONFIG`, changed in place: the launch
                is stored as `config["tfdp"]["goodput"]`.
        """
        config.setdefault("tfdp", {})[_KEY] = dataclasses.asdict(self)

    @property
    def path(self) -> str:
        """String, path of the ledger in the folder of logs."""
        return os.path.join(self.folder, NAME)


def moment_of(content: Any) -> Moment:
    """Return the `Moment` that the fields of a dict describe.

    Args:
        content: Value from JSON, a line of a ledger or settings of a launcher: a dict
            with the numbers `"time"` and `"up"`, and maybe the string `"boot"`.

    Raises:
        ValueError: If it has no such fields.
    """
    known = content if isinstance(content, dict) else {}
    times: list[Any] = [known.get("time"), known.get("up")]
    boot = known.get("boot", "")
    if not all(map(is_number, times)) or not isinstance(boot, str):
        raise ValueError("it has no valid time")
    return Moment(float(times[0]), float(times[1]), boot)


def path_beside(directory: str) -> str:
    """Return the path of the ledger, a job's file of times, beside its backups.

    It is not in their directory, which is deleted with them; but if a volume is mounted
    there, it is in the volume, since files beside a volume may not be kept.

    Args:
        directory: String, the directory of backups.

    Example:

    >>> path_beside("/data/backups/")
    '/data/backups.goodput.jsonl'
    """
    folder = os.path.abspath(directory)
    if os.path.ismount(folder):
        return os.path.join(folder, NAME)
    return f"{folder}.{NAME}"


def find(directory: str) -> list[str]:
    """Return the paths of a job's ledgers, found by its backups or folder of logs.

    A script that gives each `fit` its own directory of backups has a ledger for each.

    Args:
        directory: String, a directory of backups, which may no longer exist; a
            folder of logs; or the path of a ledger.

    Raises:
        ValueError: If there is no ledger.
    """
    candidates = [directory, os.path.join(directory, NAME), path_beside(directory)]
    for path in filter(os.path.isfile, candidates):
        return [path, *_referred(path)]
    raise ValueError(
        "There is no ledger of goodput; give the directory of backups or the log "
        f"folder of a job that has trained. Received: {directory}"
    )


def _referred(path: str) -> list[str]:
    """Return the paths of other ledgers that lines of a ledger name, if they exist.

    Each path is listed once, in the order of the last lines that have it.
    """
    found: list[str] = []
    for text in read(path):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            line = json.loads(text) if '"moved"' in text else {"kind": ""}
            if line["kind"] == "moved" and os.path.isfile(str(line["path"])):
                found = [each for each in found if each != line["path"]]
                found.append(str(line["path"]))
    return found


def read(path: str) -> Iterator[str]:
    """Yield the lines of a ledger, with replacement characters for invalid bytes.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is not a regular file.
    """
    with open_regular(path) as file:
        while line := file.readline(_MAX_LINE_BYTES):
            yield line.decode("utf-8", "replace")


class LedgerFile:
    """File of a job's times, to append to; a failed write is printed once, not raised.

    The file is opened at the first write, since `fit` creates the directory of backups
    after it has chosen its callbacks.

    Args:
        directory: String, the directory of backups, or `None` without any.
        launch: `Launch`, or `None` without a launcher. Its folder has the ledger if
            there are no backups, and otherwise a line that refers to it.
    """

    def __init__(self, directory: str | None, launch: Launch | None) -> None:
        self._directory, self._launch = directory, launch
        self._file: int | None = None
        self._has_failed = False
        self.path = ""

    def append(self, lines: list[str]) -> bool:
        """Append lines, all or none.

        Args:
            lines: List of strings, without ends of lines.

        Returns:
            Bool, whether the lines are written.
        """
        try:
            if self._file is None and not self._open():
                return False
            assert self._file is not None
            _append(self._file, lines)
        except (OSError, ValueError) as error:
            self._report(error)
            return False
        return True

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> bool:
        """Open the ledger of this job.

        If it is not in the launcher's folder of logs, add a line there that names it.

        Returns:
            Bool, false if the folder of the ledger does not exist yet.

        Raises:
            OSError: If a file cannot be opened or written.
            ValueError: If a file is not a regular one with a single link.
        """
        if self._directory is None:
            assert self._launch is not None
            self.path = self._launch.path
        else:
            self.path = path_beside(self._directory)
        if not os.path.isdir(os.path.dirname(self.path)):
            return False
        self._file = _open(self.path)
        if self._launch is not None and self.path != self._launch.path:
            number = _open(self._launch.path)
            try:
                moved = {"kind": "moved", "format": FORMAT, "path": self.path}
                _append(number, [json.dumps(moved)])
            finally:
                os.close(number)
        return True

    def _report(self, error: Exception) -> None:
        """Print on stderr, once, that the ledger cannot be written, and the reason."""
        if not self._has_failed:
            self._has_failed = True
            text = getattr(error, "strerror", None) or error
            say(
                f"the ledger of goodput {self.path} cannot be written ({text}); "
                "training continues, and its lines are kept until they can be"
            )


def _open(path: str) -> int:
    """Open a ledger, created for this user alone; return its file descriptor.

    Raises:
        ValueError: If it is not a regular file with a single link.
        OSError: If it cannot be opened.
    """
    number = os.open(path, _FLAGS, 0o600)
    status = os.fstat(number)
    # With a second hard link, the ledger may be another program's file, which must not
    # be changed.
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(number)
        raise ValueError("it is not a regular file with a single link")
    return number


def _append(number: int, lines: list[str]) -> None:
    """Append lines to the file with descriptor `number`; undo an incomplete write.

    Raises:
        OSError: If they cannot be written.
    """
    size = os.fstat(number).st_size
    # The ledger may end within a line if a process was killed while it wrote, or if the
    # disk was full. A line end in front keeps the new lines separate from that line.
    is_torn = size > 0 and os.pread(number, 1, size - 1) != b"\n"
    data = "".join(f"{line}\n" for line in lines).encode()
    data = b"\n" + data if is_torn else data
    try:
        written = os.write(number, data)
        if written < len(data):
            os.write(number, data[written:])
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(number, size)
        raise
