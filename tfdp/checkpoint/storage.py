"""Storage of checkpoints: a folder with files, and folders below it.

Writer, reader and backups do not know whether it is on a file system or in an object
store, see `tfdp.checkpoint.object_store`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence

from tfdp.ground.base.files import (
    make_private_folder,
    read_text,
    replaced,
    sync_folder,
    write_text,
)
from tfdp.ground.base.temporary import remove_left_over

# Takes files that were written into a local folder to the storage.
Publish = Callable[[Sequence[str]], None]
# Makes files of the storage readable in a local folder, and returns its path.
Fetch = Callable[[Sequence[str]], str]


class StoreError(OSError):
    """Object store that does not answer, or refuses."""


class Storage:
    """Folder on a file system; an object store has another class of its own.

    Args:
        path: String, its path or URL.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """String, the last part of its path."""
        return os.path.basename(self.path)

    @property
    def is_link(self) -> bool:
        """Whether it is a link to a folder."""
        return os.path.islink(self.path)

    def below(self, name: str) -> Storage:
        """Folder of that name in it."""
        return Storage(self._path(name))

    def make(self, *, exist_ok: bool = True) -> None:
        """Make the folder, for its owner alone."""
        if exist_ok and os.path.exists(self.path) and not os.path.isdir(self.path):
            raise ValueError("there is a file of that name; give a directory")
        make_private_folder(self.path, exist_ok=exist_ok)

    def is_folder(self) -> bool:
        """Whether files can be written into it: it was made, and is no link."""
        return os.path.isdir(self.path) and not self.is_link

    def names(self) -> list[str]:
        """Names of all that is in it; none if it is not there."""
        with contextlib.suppress(FileNotFoundError):
            return os.listdir(self.path)
        return []

    def sizes(self) -> dict[str, int]:
        """Bytes of each file.

        TensorFlow opens files of the folder by name, and follows links.

        Raises:
            ValueError: If it leads elsewhere, or reading would hang.
        """
        if self.is_link:
            raise ValueError(
                f"The folder {self.name!r} is a link. Put the folder itself there."
            )
        if not os.path.isdir(self.path):
            return {}  # each of its files is missing
        sizes = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                if not entry.is_file(follow_symlinks=False):
                    raise ValueError(
                        f"The folder {self.name!r} has {entry.name!a} in it, which is "
                        "no regular file."
                    )
                sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
        return sizes

    def has(self, name: str) -> bool:
        """Whether there is anything of that name."""
        return os.path.lexists(self._path(name))

    def read_text(self, name: str, most_bytes: int) -> str:
        """Read a file of limited size, see `tfdp.ground.base.files.read_text`."""
        return read_text(self._path(name), most_bytes)

    def write_text(self, name: str, text: str) -> None:
        """Write a new file, all the way to the disk."""
        write_text(self._path(name), text)

    def replace_text(self, name: str, text: str, scratch: str) -> None:
        """Replace a file: whoever reads meanwhile finds the old text or the new one.

        Args:
            name: String.
            text: String.
            scratch: String, a folder in this one, for a temporary file.
        """
        own = os.path.join(self.path, scratch, name)
        with replaced(self._path(name), own) as temporary:
            write_text(temporary, text)
        sync_folder(self.path)

    @contextlib.contextmanager
    def writing(self) -> Iterator[tuple[str, Publish]]:
        """Yield a local folder to write into, and what takes files of it here.

        It is the folder itself; in the end its names reach the disk.
        """
        yield self.path, lambda names: None
        sync_folder(self.path)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Fetch]:
        """Yield what makes files readable in a local folder, which it returns."""
        yield lambda names: self.path

    def rename(self, name: str, new_name: str) -> None:
        """Rename a folder in it."""
        os.rename(self._path(name), self._path(new_name))

    def remove_file(self, name: str) -> None:
        """Remove a file."""
        os.unlink(self._path(name))

    def remove_left_over(self) -> None:
        """Remove the temporary files of processes that were killed."""
        remove_left_over(self.path)

    def remove(self) -> None:
        """Remove the folder with all that is in it, as far as that can be done."""
        shutil.rmtree(self.path, ignore_errors=True)

    def remove_if_empty(self) -> None:
        """Remove the folder, where there are folders and nothing is in it."""
        os.rmdir(self.path)

    def _path(self, name: str) -> str:
        return os.path.join(self.path, name)
