"""Files and folders: atomic writes, bounded reads, and private folders."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

from tfdp.ground.base.temporary import remove_left_over, temporary_name
from tfdp.ground.text import pluralize

# No link is followed, no pipe waited for, and no terminal taken over. Not all systems
# have each of them.
_READ_FLAGS = os.O_RDONLY
for _flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"):
    _READ_FLAGS |= getattr(os, _flag, 0)
# Of a file's name; each may be several bytes in UTF-8.
_MOST_LETTERS = 200


class NotRegularFile(ValueError):
    """Something other than a regular file: a link, a folder, a pipe, a device."""


@contextlib.contextmanager
def replaced(
    path: str | os.PathLike,
    temporary: str | None = None,
    *,
    replaces_folder: bool = True,
) -> Iterator[str]:
    """Replace a file or folder, in one move, by what the block writes.

    Whoever reads meanwhile finds the old contents or the new ones. If the block
    fails, the old ones stay and what it has written is removed. What is left where a
    process is killed is removed by the next one that writes into the folder.

    Args:
        path: String or path-like, the target.
        temporary: String, the path to write to, on the same disk. Defaults to
            `None`: beside the target, with the same ending.
        replaces_folder: Bool, whether a folder that is there goes; if not, the new one
            does. Defaults to `True`.

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
        temporary = _beside(target)
    elif os.path.lexists(temporary):
        _remove(temporary)  # left by a process that was killed, or a link elsewhere
    try:
        yield temporary
        if os.path.isdir(temporary):
            _replace_folder(temporary, target, replaces_folder)
        elif os.path.exists(temporary):
            os.replace(temporary, target)
    except BaseException:
        _remove(temporary)
        raise


def _beside(target: str) -> str:
    folder, name = os.path.split(target)
    own = f".{temporary_name('file')}."
    return os.path.join(folder, own + name[len(own) - _MOST_LETTERS :])


def _replace_folder(temporary: str, target: str, replaces_folder: bool) -> None:
    """A folder cannot replace another one, which goes first."""
    if replaces_folder and os.path.exists(target):
        shutil.rmtree(target, ignore_errors=True)
    try:
        os.rename(temporary, target)
    except OSError:  # another process was first
        _remove(temporary)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        os.unlink(path)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a new file, all the way to the disk; no link is followed.

    Raises:
        FileExistsError: If there is anything of that name.
    """
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def open_regular(path: str | os.PathLike) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        NotRegularFile: If it is anything else; nothing is read of it.
        OSError: If it cannot be opened.
    """
    try:
        number = os.open(path, _READ_FLAGS)
    except OSError as error:
        # What the system says of a link and of a socket.
        if error.errno not in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
            raise
        raise NotRegularFile("it is no regular file") from error
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise NotRegularFile("it is no regular file")
    return os.fdopen(number, "rb")


def read_text(path: str | os.PathLike, most_bytes: int) -> str:
    """Read a regular file of limited size.

    Args:
        path: String or path-like.
        most_bytes: Int, how large it may be.

    Returns:
        String.

    Raises:
        ValueError: If it is larger, no regular file, or no text.
        OSError: If it cannot be read.

    Example:

    >>> path = os.path.join(tempfile.mkdtemp(), "numbers.json")
    >>> write_text(path, "[1, 2]")
    >>> read_text(path, most_bytes=100)
    '[1, 2]'
    """
    with open_regular(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        # It may grow while it is read.
        content = b"" if num_bytes > most_bytes else file.read(most_bytes + 1)
    if max(num_bytes, len(content)) > most_bytes:
        raise ValueError(f"it has more than {pluralize(most_bytes, 'byte')}")
    return content.decode()


def sync_folder(path: str | os.PathLike) -> None:
    """Take the names of a folder's files to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # no such thing here
            raise
    finally:
        os.close(number)


def make_private_folder(path: str | os.PathLike, *, exist_ok: bool = True) -> None:
    """Make a folder that only its owner can read; one that is there stays as it is.

    Args:
        path: String or path-like. Folders above it are made where they are missing.
        exist_ok: Bool, whether it may be there. Defaults to `True`.

    Raises:
        OSError: If it cannot be made.

    Example:

    >>> path = os.path.join(tempfile.mkdtemp(), "logs")
    >>> make_private_folder(path)
    >>> oct(os.stat(path).st_mode & 0o777)
    '0o700'
    """
    os.makedirs(path, mode=0o700, exist_ok=exist_ok)


def problem_of_folder(folder: str | os.PathLike, argument: str) -> str:
    """Make a folder and try to write into it.

    Args:
        folder: String or path-like.
        argument: String, the name of the argument that it came from.

    Returns:
        String, one sentence, or `""` if it can be written.
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
