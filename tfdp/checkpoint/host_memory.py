"""Folder in the memory of this host, whose files outlive the worker's process.

For each part of a state that the host keeps, its own workers' and copies of others',
there are two slots, which are written alternately: a file of bytes, and a header that
makes them valid.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import shutil
import stat
import time
from collections.abc import Collection, Iterator

import numpy as np

from tfdp.checkpoint.index_file import INDEX_BYTES
from tfdp.checkpoint.memory_parts import PartHeader, PartName
from tfdp.ground.base.files import make_private_folder, read_text, replaced, write_text
from tfdp.ground.base.memory import free_bytes
from tfdp.ground.base.process_identity import boot_id

try:
    import fcntl
except ImportError:  # Windows, which lacks `ROOT` too
    fcntl = None  # type: ignore[assignment]

# File system in memory that Linux mounts for POSIX shared memory.
ROOT = "/dev/shm"
_NAME = re.compile(r"tfdp-memory-([0-9]+)-[0-9a-f]{16}")
_HEADER = re.compile(r"part-[0-9]+-[01]\.json")
_FILE = re.compile(r"(part-([0-9]+)-[01])\.(json|data)(?:\.new)?")
# Age after which the memory of a run that was never resumed is freed.
_LONGEST_UNUSED_SECONDS = 86400.0
# Part of a host's free memory that the slots of all its workers may take.
_MEMORY_SHARE = 0.5


class HostMemory:
    """Parts of the states of one run in the memory of this host.

    Args:
        directory: String, path or URL of the run's backups.
    """

    def __init__(self, directory: str) -> None:
        name = directory if "://" in directory else os.path.abspath(directory)
        digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
        user = os.geteuid() if hasattr(os, "geteuid") else 0
        self.path = os.path.join(ROOT, f"tfdp-memory-{user}-{digest}")
        self._arrays: dict[tuple[int, int], np.ndarray] = {}
        self._lock: int | None = None

    def open(self, rank: int) -> str:
        """Create the folder, and free the memory of runs that were never resumed.

        Args:
            rank: Int, rank of this worker.

        Returns:
            String, equal for processes that see the same folder.

        Raises:
            OSError: If the system has no such memory, the folder is not this user's, or
                another process of the same rank uses it.
        """
        if not os.path.isdir(ROOT):
            raise NotADirectoryError(f"{ROOT!r} does not exist")
        _remove_unused(self.path)
        make_private_folder(self.path)
        status = os.lstat(self.path)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(f"{self.path!r} belongs to another user")
        self._take_lock(rank)
        return f"{boot_id()} {status.st_dev} {status.st_ino}"

    def headers(self, owner: str) -> dict[PartName, PartHeader]:
        """Return the headers of all valid parts; others are not reported.

        Args:
            owner: String, identity of the directory of backups.
        """
        found = {}
        with contextlib.suppress(OSError):
            for file in filter(_HEADER.fullmatch, os.listdir(self.path)):
                with contextlib.suppress(OSError, ValueError):
                    text = read_text(os.path.join(self.path, file), INDEX_BYTES)
                    header = PartHeader.from_text(text)
                    name = header.name
                    is_whole = self._num_bytes(name.rank, name.slot) >= header.num_bytes
                    if header.owner == owner and file == _header_of(name) and is_whole:
                        found[name] = header
        return found

    def remove_others(self, token: str | None, ranks: Collection[int]) -> None:
        """Remove what is neither of a save nor written again.

        Args:
            token: String, identity of the save, or `None` for none.
            ranks: Collection of ints, the workers whose parts this host keeps.
        """
        with contextlib.suppress(OSError):
            for file in os.listdir(self.path):
                match = _FILE.fullmatch(file)
                if match is None or self._token_of(match[1]) == token is not None:
                    continue
                if match[3] == "json" or int(match[2]) not in ranks:
                    with contextlib.suppress(OSError):  # another worker has removed it
                        os.unlink(os.path.join(self.path, file))

    def _token_of(self, part: str) -> str | None:
        """Return the save that the slot of a part holds, or `None` if it holds none.

        Args:
            part: String, the name of its files without the ending.
        """
        path = os.path.join(self.path, f"{part}.json")
        with contextlib.suppress(OSError, ValueError):
            return PartHeader.from_text(read_text(path, INDEX_BYTES)).name.token
        return None

    def _take_lock(self, rank: int) -> None:
        """Keep other processes of the same rank out until this one ends.

        A record lock, unlike that of `flock`, is not inherited by forked processes.
        """
        if self._lock is not None:
            return
        path = os.path.join(self.path, f"part-{rank}.lock")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(path, flags, 0o600)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise BlockingIOError(
                f"another process of the same run and rank uses {self.path!r}"
            ) from error
        self._lock = lock

    def missing_bytes(self, rank: int, num_bytes: int) -> int:
        """Return how many bytes both slots of a part lack.

        Args:
            rank: Int, the worker whose part it is.
            num_bytes: Int, size of the part.
        """
        held = (self._num_bytes(rank, slot) for slot in (0, 1))
        return sum(max(num_bytes - size, 0) for size in held)

    def begin(self, rank: int, slot: int, num_bytes: int) -> np.ndarray:
        """Make a slot invalid, and return its bytes to write.

        Args:
            rank: Int, the worker whose part it is.
            slot: Int, 0 or 1.
            num_bytes: Int, size of the part.

        Raises:
            OSError: If the memory does not suffice.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path, f"part-{rank}-{slot}.json"))
        array = self._arrays.get((rank, slot))
        if array is None or array.size < num_bytes:
            array = self._arrays[rank, slot] = self._allocate(rank, slot, num_bytes)
        return array[:num_bytes]

    def commit(self, header: PartHeader) -> None:
        """Make a part that was written valid."""
        path = os.path.join(self.path, _header_of(header.name))
        with replaced(path, f"{path}.new") as temporary:
            write_text(temporary, header.to_text())

    def read(self, header: PartHeader) -> np.ndarray:
        """Return the bytes of a part, which cannot be written.

        Raises:
            ValueError: If the file is shorter than its header says.
            OSError: If it cannot be read.
        """
        path = self._data_path(header.name.rank, header.name.slot)
        with _opened(path, os.O_RDONLY) as number:
            if os.fstat(number).st_size < header.num_bytes:
                raise ValueError(f"the file {path!r} is truncated")
            return _map(number, header.num_bytes, mmap.PROT_READ)

    def remove(self) -> None:
        """Remove the folder, and free the memory once no worker has mapped it."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Forget the mapped files, and release the lock; the folder stays."""
        self._arrays.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _allocate(self, rank: int, slot: int, num_bytes: int) -> np.ndarray:
        """Allocate the memory of a slot, and return its bytes.

        Memory that is missing would otherwise end the process by a signal.
        """
        flags = os.O_RDWR | os.O_CREAT
        with _opened(self._data_path(rank, slot), flags) as number:
            if num_bytes > os.fstat(number).st_size:
                os.posix_fallocate(number, 0, num_bytes)
            return _map(number, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE)

    def _num_bytes(self, rank: int, slot: int) -> int:
        """Return the size of a slot's file in bytes, 0 if it is missing."""
        with contextlib.suppress(OSError):
            return os.lstat(self._data_path(rank, slot)).st_size
        return 0

    def _data_path(self, rank: int, slot: int) -> str:
        """Return the path of the file with the bytes of a part."""
        return os.path.join(self.path, f"part-{rank}-{slot}.data")


def room_bytes() -> int:
    """Return how many bytes of this host's memory the parts of its workers may take."""
    try:
        system = os.statvfs(ROOT)
    except OSError:
        return 0
    return int(min(_MEMORY_SHARE * free_bytes(), system.f_bavail * system.f_frsize))


def _header_of(name: PartName) -> str:
    """Return the name of the file with a part's header."""
    return f"part-{name.rank}-{name.slot}.json"


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    """Open a file of this user's folder, yield its descriptor, and close it."""
    number = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield number
    finally:
        os.close(number)


def _map(number: int, num_bytes: int, protection: int) -> np.ndarray:
    """Map the first bytes of a file, shared with other processes."""
    if not num_bytes:
        return np.empty(0, np.uint8)
    mapped = mmap.mmap(number, num_bytes, mmap.MAP_SHARED, protection)
    return np.frombuffer(mapped, np.uint8)


def _remove_unused(own: str) -> None:
    """Remove the folders of this user's runs that were not resumed in time.

    Args:
        own: String, path of the folder of this run, which stays.
    """
    with contextlib.suppress(OSError), os.scandir(ROOT) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            is_other = match and match[1] == str(os.geteuid()) and entry.path != own
            if is_other:
                with contextlib.suppress(OSError):
                    # Each header that is replaced changes the folder.
                    age = time.time() - entry.stat(follow_symlinks=False).st_mtime
                    if age > _LONGEST_UNUSED_SECONDS:
                        shutil.rmtree(entry.path, ignore_errors=True)
