"""Temporary files and folders, with removal of those that killed processes have left.

Each name contains the process that created the file. Files of a running process stay,
and files of another host or container stay until they are an hour old.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import socket
import tempfile
import time
import uuid

from tfdp.ground.base.process_identity import ENDED, machine, state_and_start
from tfdp.ground.forks import TemporaryDirectory

# A temporary name has the host and the process that created the file, so that others
# can find out whether that process has ended. The groups are a hash of the host, the id
# of the process, and the time of its start.
_NAME = re.compile(r"\.?tfdp-[a-z]+-([0-9a-f]{8})-([0-9]+)-([0-9]+)-.+")
# A temporary file of another host counts as left over after this many seconds without a
# change, since a file that is still being written changes more often.
_MAX_PAUSE_SECONDS = 3600.0


def temporary_name(purpose: str) -> str:
    """Return a unique name for a temporary file of this process.

    Args:
        purpose: String of small letters.

    Example:

    >>> is_left_over(temporary_name("probe"), age_seconds=10.0**6)
    False
    """
    process = os.getpid()
    own = f"{_host()}-{process}-{_start_of(process) or 0}"
    return f"tfdp-{purpose}-{own}-{uuid.uuid4().hex[:8]}"


class TemporaryFolder(TemporaryDirectory):
    """Temporary folder; folders of killed processes are removed when it is created.

    Args:
        purpose: String of small letters, a part of the name.
    """

    def __init__(self, purpose: str) -> None:
        remove_left_over(tempfile.gettempdir())
        super().__init__(prefix=f"{temporary_name(purpose)}-")


def is_left_over(name: str, age_seconds: float | None) -> bool:
    """Return whether a name is that of a temporary file whose process has ended.

    Args:
        name: String, the name of the file.
        age_seconds: Float, seconds since the last change, or `None` if unknown. Only
            the age tells whether a file of another host is left over, or, on systems
            without `/proc`, one of this host; of unknown age it is not.

    Example:

    >>> is_left_over("tfdp-probe-00000000-1-1-a", age_seconds=10.0**6)
    True
    >>> is_left_over("tfdp-probe-00000000-1-1-a", age_seconds=60.0)
    False
    >>> is_left_over("model.keras", age_seconds=10.0**6)
    False
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return False
    host, process, start = match.groups()
    if machine() and host == _host():
        return _start_of(int(process)) != int(start)
    return age_seconds is not None and age_seconds > _MAX_PAUSE_SECONDS


def remove_left_over(folder: str | os.PathLike) -> None:
    """Remove temporary files of this user's killed processes from a folder.

    Args:
        folder: String or path-like.
    """
    with contextlib.suppress(OSError), os.scandir(os.fspath(folder)) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):  # another process removed the file
                    _remove_if_left_over(entry)


def _remove_if_left_over(entry: os.DirEntry) -> None:
    """Remove a temporary file or folder of this user if its process has ended."""
    status = entry.stat(follow_symlinks=False)
    is_folder = entry.is_dir(follow_symlinks=False)
    # The modification time of a folder does not show changes of the files inside it, so
    # a folder has no known age, and a folder of another host is never removed.
    age = None if is_folder else time.time() - status.st_mtime
    if status.st_uid != os.geteuid() or not is_left_over(entry.name, age):
        return
    if is_folder:
        shutil.rmtree(entry.path, ignore_errors=True)
    else:
        os.unlink(entry.path)


@functools.cache
def _host() -> str:
    """Return eight hexadecimal digits, a hash of `machine()` or of the host's name."""
    key = machine() or socket.gethostname()
    return hashlib.sha256(key.encode()).hexdigest()[:8]


def _start_of(process: int) -> int | None:
    """Return when a process started, in ticks since boot; `None` if it has ended."""
    state, started = state_and_start(process)
    return None if state in ENDED else int(started)
