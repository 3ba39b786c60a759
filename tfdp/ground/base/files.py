"""Files and folders: atomic writes, bounded reads, and private folders."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

from tfdp.ground.base.temporary import remove_left_over, temporary_name
from tfdp.ground.text import pluralize

if TYPE_CHECKING:
    import numpy as np

# A path may be replaced by a link, a pipe or a terminal. With these flags, `os.open`
# does not follow a link, wait for a pipe or make a terminal the controlling one. Flags
# that a system lacks are left out.
_READ_FLAGS = os.O_RDONLY
for _flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"):
    _READ_FLAGS |= getattr(os, _flag, 0)
# Most characters of a temporary file's name. File systems allow 255 bytes, and a
# character may take several bytes in UTF-8, so the limit is lower.
_MAX_NAME_CHARACTERS = 200


class NotRegularFile(ValueError):
    """Error: a path is not a regular file, but a link, a folder, a pipe or a device."""


@contextlib.contextmanager
def replaced(
    path: str | os.PathLike,
    temporary: str | None = None,
    *,
    replaces_folder: bool = True,
) -> Iterator[str]:
    """Replace a file or folder atomically by the one that the block writes.

    Concurrent readers see the old contents or the new ones. If the block fails, the old
    contents stay and the temporary file is removed. If the process is killed, the next
    process that writes into the folder removes the temporary file.

    Args:
        path: String or path-like, the target.
        temporary: String, the path to write to, on the same disk. Defaults to
            `None`: beside the target, with the same ending.
        replaces_folder: Bool, whether an existing folder is replaced; otherwise the new
            folder is discarded. Defaults to `True`.

    Yields:
        String, the path to write to.

    Example:

    >>> path = os.path.join(tempfile.mkdtemp(), "numbers.json")
    >>> with replaced(path) as temporary:
    ...     write_text(temporary, "[1, 2]")
    >>> os.listdir(os.path.dirname(path))
    ['numbers.json']
    """
    target = os.fspath(path)
    if temporary is None:
        remove_left_over(os.path.dirname(target) or ".")
        temporary = _temporary_path_beside(target)
    elif os.path.lexists(temporary):
        # A killed process may have left a file at the temporary path, or the path may
        # be a link to another place, which must not be written. So whatever is at the
        # path is removed first.
        _remove(temporary)
    try:
        yield temporary
        if os.path.isdir(temporary):
            _replace_folder(temporary, target, replaces_folder)
        elif os.path.exists(temporary):
            os.replace(temporary, target)
    except BaseException:
        _remove(temporary)
        raise


def _temporary_path_beside(target: str) -> str:
    """Return a temporary path in the folder of a target, with the same ending."""
    folder, name = os.path.split(target)
    prefix = f".{temporary_name('file')}."
    return os.path.join(folder, prefix + name[len(prefix) - _MAX_NAME_CHARACTERS :])


def _replace_folder(temporary: str, target: str, replaces_folder: bool) -> None:
    """Rename a folder; an existing target is removed first, as `rename` requires.

    Args:
        temporary: String, path of the new folder.
        target: String, path that it gets.
        replaces_folder: Bool, whether an existing target is removed; otherwise the new
            folder is.
    """
    if replaces_folder and os.path.exists(target):
        shutil.rmtree(target, ignore_errors=True)
    try:
        os.rename(temporary, target)
    except OSError:  # the target exists, perhaps because another process created it
        _remove(temporary)


def _remove(path: str) -> None:
    """Remove a file, a link or a folder with its contents; ignore errors."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        os.unlink(path)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a new file and sync it to the disk; links are not followed.

    Raises:
        FileExistsError: If the path exists.
    """
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def page_aligned(num_bytes: int) -> np.ndarray:
    """Allocate the page-aligned memory that `write_aligned` needs.

    Forked processes share it, so a fork during a write copies no page.

    Args:
        num_bytes: Int, rounded up to whole pages.

    Returns:
        Array of bytes, which starts at a page.
    """
    import numpy as np  # not at the top: the launcher reads files without NumPy

    return np.frombuffer(mmap.mmap(-1, _whole_pages(num_bytes)), np.uint8)


def write_aligned(path: str | os.PathLike, content: np.ndarray, num_bytes: int) -> None:
    """Write bytes into a new file and sync it to the disk; links are not followed.

    Where the file system can, the disk reads the memory itself: this takes hardly any
    processor time, and no memory for pages of the file.

    Args:
        path: String or path-like.
        content: Array of bytes from `page_aligned`.
        num_bytes: Int, the number of bytes to write.

    Raises:
        FileExistsError: If the path exists.

    Example:

    >>> path = os.path.join(tempfile.mkdtemp(), "bytes")
    >>> content = page_aligned(3)
    >>> content[:3] = 7
    >>> write_aligned(path, content, 3)
    >>> os.path.getsize(path)
    3

    Source: https://man7.org/linux/man-pages/man2/open.2.html, `O_DIRECT`
    """
    with open(path, "xb") as file:
        if not _write_past_cache(path, content[: _whole_pages(num_bytes)]):
            file.write(content[:num_bytes].data)
        file.truncate(num_bytes)
        os.fsync(file.fileno())


def _write_past_cache(path: str | os.PathLike, content: np.ndarray) -> bool:
    """Write whole pages to an empty file without the page cache, where it is possible.

    Args:
        path: String or path-like.
        content: Array of bytes from `page_aligned`.

    Returns:
        Bool, whether all pages are written; if not, an ordinary write works, or raises
        the error of the disk.
    """
    if not hasattr(os, "O_DIRECT"):
        return False
    with contextlib.suppress(OSError):
        number = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW)
        try:
            return os.write(number, content.data) == content.size
        finally:
            os.close(number)
    return False


def _whole_pages(num_bytes: int) -> int:
    """Return a size rounded up to pages of memory."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def open_regular(path: str | os.PathLike) -> BinaryIO:
    """Open a regular file for reading; a symbolic link is not followed.

    Raises:
        NotRegularFile: If the path is a link or no regular file; nothing is read.
        OSError: If the file cannot be opened.
    """
    try:
        number = os.open(path, _READ_FLAGS)
    except OSError as error:
        # These are the errors of `open` for paths that are not regular files: `ELOOP`
        # or `EMLINK` for a symbolic link, and `ENXIO` for a socket. Others are raised
        # unchanged.
        if error.errno not in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
            raise
        raise NotRegularFile("it is not a regular file") from error
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise NotRegularFile("it is not a regular file")
    return os.fdopen(number, "rb")


def read_text(path: str | os.PathLike, most_bytes: int) -> str:
    """Read a regular file of limited size.

    Args:
        path: String or path-like.
        most_bytes: Int, the largest size that is read.

    Returns:
        String.

    Raises:
        ValueError: If the file is larger, not regular, or not text.
        OSError: If the file cannot be read.

    Example:

    >>> path = os.path.join(tempfile.mkdtemp(), "numbers.json")
    >>> write_text(path, "[1, 2]")
    >>> read_text(path, most_bytes=100)
    '[1, 2]'
    """
    with open_regular(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        # The file may grow after its size was read, so the read itself is limited, too.
        content = b"" if num_bytes > most_bytes else file.read(most_bytes + 1)
    if max(num_bytes, len(content)) > most_bytes:
        raise ValueError(f"it has more than {pluralize(most_bytes, 'byte')}")
    return content.decode()


def sync_folder(path: str | os.PathLike) -> None:
    """Sync a folder's entries to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        # A file system that cannot sync folders fails with `EINVAL` or `ENOTSUP`, which
        # is not a failure of the write.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(number)


def make_private_folder(path: str | os.PathLike, *, exist_ok: bool = True) -> None:
    """Create a folder that only its owner can read; an existing one stays unchanged.

    Args:
        path: String or path-like. Missing parent folders are created.
        exist_ok: Bool, whether the folder may exist. Defaults to `True`.

    Raises:
        OSError: If the folder cannot be created.

    Example:

    >>> path = os.path.join(tempfile.mkdtemp(), "logs")
    >>> make_private_folder(path)
    >>> oct(os.stat(path).st_mode & 0o777)
    '0o700'
    """
    os.makedirs(path, mode=0o700, exist_ok=exist_ok)


def try_create_folder(folder: str | os.PathLike, argument: str) -> str:
    """Create a folder and try to write into it; return what prevents it.

    Args:
        folder: String or path-like.
        argument: String, the name of the argument that the folder came from.

    Returns:
        String, a message, or `""` if the folder can be written.
    """
    try:
        make_private_folder(folder)
        with tempfile.TemporaryFile(dir=os.fspath(folder)):
            return ""
    except OSError as error:
        return (
            f"`{argument}` cannot be written: {error.strerror or error}. Give a folder "
            "that the first worker can write to. "
            f"Received: {argument}={os.fspath(folder)!r}"
        )
