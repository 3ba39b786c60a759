"""Folder in the memory of this host, whose files outlive the worker's process.

The folder has two slots for each part of a state that the host keeps: parts of its own
workers, and copies of parts of others. Saves write the slots alternately. A slot is a
file of bytes, and a header that makes the bytes valid.
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
from collections.abc import Collection

import numpy as np

from tfdp.checkpoint.background import MEMORY_SHARE
from tfdp.checkpoint.index_file import INDEX_BYTES
from tfdp.checkpoint.memory_parts import PartHeader, PartName
from tfdp.checkpoint.object_store import absolute_path
from tfdp.ground.base.files import (
    make_private_folder,
    open_regular,
    read_text,
    replaced,
    write_text,
)
from tfdp.ground.base.memory import free_bytes
from tfdp.ground.base.process_identity import boot_id

try:
    import fcntl
except ImportError:  # Windows, where `HostMemory.open` fails before any use
    fcntl = None  # type: ignore[assignment]

# Linux's file system in memory: its files outlive the process that wrote them, so a
# restarted run finds the states of the previous one.
ROOT = "/dev/shm"
_NAME = re.compile(r"tfdp-memory-([0-9]+)-[0-9a-f]{16}")
# The groups are the stem of a part's file, the rank in the stem, and the ending. Names
# that end in `.new` match too, so that the incomplete files of killed processes are
# removed.
_FILE = re.compile(r"(part-([0-9]+)-[01])\.(json|data)(?:\.new)?")
# A run's files stay in memory when its processes end. Other runs remove the files once
# the run has not saved for this many seconds, a day.
_MAX_UNUSED_SECONDS = 86400.0


class HostMemory:
    """Folder in `/dev/shm`, in memory, with parts of the saved states of one run.

    A part holds the elements of a state that one worker saves. It has two slots, which
    saves write alternately: one keeps the last save while the other is written.

    Args:
        directory: String, path or URL of the run's backups.
    """

    def __init__(self, directory: str) -> None:
        name = os.fsencode(absolute_path(directory))
        digest = hashlib.sha256(name).hexdigest()[:16]
        user = os.geteuid() if hasattr(os, "geteuid") else 0
        self.path = os.path.join(ROOT, f"tfdp-memory-{user}-{digest}")
        self._arrays: dict[tuple[int, int], np.ndarray] = {}
        self._lock: int | None = None

    def open(self) -> str:
        """Create the folder; free the memory of other runs without a save for a day.

        Returns:
            String, equal for processes that see the same folder.

        Raises:
            OSError: If the system has no `/dev/shm`, or the folder is not this user's.
        """
        if not os.path.isdir(ROOT):
            raise NotADirectoryError(f"{ROOT!r} does not exist")
        _remove_unused(self.path)
        make_private_folder(self.path)
        status = os.lstat(self.path)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(f"{self.path!r} belongs to another user")
        return f"{boot_id()} {status.st_dev} {status.st_ino}"

    def headers(self, owner: str) -> dict[PartName, PartHeader]:
        """Return the metadata of the valid parts that belong to a backup directory.

        Args:
            owner: String, identity of the directory of backups.

        Returns:
            Dict from `PartName` to `PartHeader`; parts of other directories are left
            out.
        """
        found = {}
        for file in self._files():
            header = self._header(file[0]) if file[3] == "json" else None
            if header is None or header.owner != owner:
                continue
            name = header.name
            is_whole = self._num_bytes(name.rank, name.slot) >= header.num_bytes
            if file[1] == _stem(name.rank, name.slot) and is_whole:
                found[name] = header
        return found

    def remove_others(self, token: str | None, ranks: Collection[int]) -> None:
        """Remove all saves but one from this host's memory.

        A save is invalid without the headers of its parts, so these are removed. The
        data of the workers in `ranks` stay, since later saves overwrite them.

        Args:
            token: String, identity of the save that stays, or `None` to invalidate all
                saves.
            ranks: Collection of ints, the workers whose parts this host keeps.
        """
        for file in self._files():
            header = self._header(f"{file[1]}.json")
            if header is not None and header.name.token == token:
                continue
            if file[3] == "json" or int(file[2]) not in ranks:
                # The file may be missing, since each worker of this host removes files
                # from the folder.
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self.path, file[0]))

    def _files(self) -> list[re.Match]:
        """List the files of parts in the folder; a missing folder has none.

        Returns:
            List of matches of `_FILE`, whose groups are the stem, the rank and the
            ending.
        """
        with contextlib.suppress(OSError):
            return [*filter(None, map(_FILE.fullmatch, os.listdir(self.path)))]
        return []

    def _header(self, file: str) -> PartHeader | None:
        """Return the header in a file, by its name; `None` if missing or damaged."""
        with contextlib.suppress(OSError, ValueError):
            text = read_text(os.path.join(self.path, file), INDEX_BYTES)
            return PartHeader.from_text(text)
        return None

    def take_lock(self, rank: int) -> None:
        """Lock the folder for this worker's rank, until `close` or the process's end.

        Forked processes do not inherit a record lock, unlike one of `flock`.

        Args:
            rank: Int, rank of this worker.

        Raises:
            OSError: If another process of the same rank uses the folder.
        """
        if self._lock is not None:
            return
        path = os.path.join(self.path, f"part-{rank}.lock")
        lock = _open_to_write(path)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise BlockingIOError(
                f"another process of the same run and rank uses {self.path!r}"
            ) from error
        self._lock = lock

    def missing_bytes(self, rank: int, num_bytes: int) -> int:
        """Return the bytes to allocate so that both slots of a part have room for it.

        Args:
            rank: Int, the worker whose part it is.
            num_bytes: Int, size of the part.
        """
        held = (self._num_bytes(rank, slot) for slot in (0, 1))
        return sum(max(num_bytes - size, 0) for size in held)

    def begin(self, rank: int, slot: int, num_bytes: int) -> np.ndarray:
        """Invalidate a slot; return its memory, a writable array of bytes, for a part.

        Args:
            rank: Int, the worker whose part it is.
            slot: Int, 0 or 1.
            num_bytes: Int, size of the part.

        Raises:
            OSError: If the host lacks the memory.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(rank, slot, "json"))
        array = self._arrays.get((rank, slot))
        if array is None or array.size < num_bytes:
            array = self._arrays[rank, slot] = self._allocate(rank, slot, num_bytes)
        return array[:num_bytes]

    def commit(self, header: PartHeader) -> None:
        """Write the header of a part, which makes the bytes in its slot valid."""
        path = self._path(header.name.rank, header.name.slot, "json")
        with replaced(path, f"{path}.new") as temporary:
            write_text(temporary, header.to_text())

    def read(self, header: PartHeader) -> np.ndarray:
        """Return the bytes of a part, as an array that is read-only.

        Raises:
            ValueError: If the file is shorter than its header says.
            OSError: If the file cannot be read.
        """
        path = self._path(header.name.rank, header.name.slot, "data")
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size < header.num_bytes:
                raise ValueError(f"the file {path!r} is truncated")
            return _map(file.fileno(), header.num_bytes, mmap.PROT_READ)

    def remove(self) -> None:
        """Remove the folder, and free the memory once no worker has mapped it."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Drop the mapped files, and release the lock; the folder stays."""
        self._arrays.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _allocate(self, rank: int, slot: int, num_bytes: int) -> np.ndarray:
        """Allocate a slot's file in memory; return its bytes as a writable array.

        Without the allocation, a write to memory that is lacking would kill the
        process.
        """
        number = _open_to_write(self._path(rank, slot, "data"))
        try:
            if num_bytes > os.fstat(number).st_size:
                os.posix_fallocate(number, 0, num_bytes)
            return _map(number, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(number)

    def _num_bytes(self, rank: int, slot: int) -> int:
        """Return the bytes of the data file of a worker's part, 0 if it is missing."""
        with contextlib.suppress(OSError):
            return os.lstat(self._path(rank, slot, "data")).st_size
        return 0

    def _path(self, rank: int, slot: int, ending: str) -> str:
        """Return the path of the file of a worker's part that ends in `ending`."""
        return os.path.join(self.path, f"{_stem(rank, slot)}.{ending}")


def host_memory_budget() -> int:
    """Return how many bytes of this host's memory the parts of its workers may take.

    It is at most half of the free memory, and 0 if the system has no `/dev/shm`.
    """
    try:
        system = os.statvfs(ROOT)
    except OSError:
        return 0
    return int(min(MEMORY_SHARE * free_bytes(), system.f_bavail * system.f_frsize))


def _stem(rank: int, slot: int) -> str:
    """Return the name, without ending, of the files of a worker's part in a slot."""
    return f"part-{rank}-{slot}"


def _open_to_write(path: str) -> int:
    """Open a file for reading and writing, and return its descriptor.

    A missing file is created for its owner only.

    Raises:
        OSError: If the path is a symbolic link, or the file cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path, flags, 0o600)


def _map(number: int, num_bytes: int, protection: int) -> np.ndarray:
    """Map the first bytes of a file as an array, shared with other processes.

    Args:
        number: Int, descriptor of the open file.
        num_bytes: Int, size of the array.
        protection: Int, `mmap.PROT_READ`, or with `mmap.PROT_WRITE` for a writable
            array.
    """
    if not num_bytes:
        return np.empty(0, np.uint8)
    mapped = mmap.mmap(number, num_bytes, mmap.MAP_SHARED, protection)
    return np.frombuffer(mapped, np.uint8)


def _remove_unused(own: str) -> None:
    """Remove the folders of this user's other runs without a save for a day.

    Args:
        own: String, path of the folder of this run, which stays.
    """
    with contextlib.suppress(OSError), os.scandir(ROOT) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            is_other = match and match[1] == str(os.geteuid()) and entry.path != own
            if is_other:
                with contextlib.suppress(OSError):
                    # The modification time of the folder is the time of the run's last
                    # save, since each save replaces a header file in the folder.
                    age = time.time() - entry.stat(follow_symlinks=False).st_mtime
                    if age > _MAX_UNUSED_SECONDS:
                        shutil.rmtree(entry.path, ignore_errors=True)
