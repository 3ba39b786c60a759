"""Storage of checkpoints: a folder with files and subfolders.

Writer, reader and backups use the same interface for a folder of a file system and for
one of an object store (`tfdp.checkpoint.object_store`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence

from tfdp.ground.base.files import (
    make_private_folder,
    open_regular,
    read_text,
    replaced,
    sync_folder,
    write_text,
)
from tfdp.ground.base.temporary import remove_left_over

# `Publish` takes names of files in a local folder, and moves the files to the storage.
# Writers call it after each file, so that the local folder needs room for one file
# only.
Publish = Callable[[Sequence[str]], None]


class StoreError(OSError):
    """Error: a request to an object store failed or timed out."""


class Storage:
    """Folder of a file system; `ObjectStore` is the subclass for object stores.

    Args:
        path: String, path or URL of the folder.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """String, the last component of the path."""
        return os.path.basename(self.path)

    @property
    def is_link(self) -> bool:
        """Bool, whether the path is a symbolic link."""
        return os.path.islink(self.path)

    def below(self, name: str) -> Storage:
        """Return the `Storage` of a subfolder, by its name."""
        return Storage(self._path(name))

    def make(self, *, exist_ok: bool = True) -> None:
        """Create the folder for its owner only; with `exist_ok` it may exist.

        Raises:
            ValueError: If a file has the folder's path.
            FileExistsError: If the folder exists, and `exist_ok` is false.
        """
        if exist_ok and os.path.exists(self.path) and not os.path.isdir(self.path):
            raise ValueError("there is a file of that name; give a directory")
        make_private_folder(self.path, exist_ok=exist_ok)

    def is_folder(self) -> bool:
        """Return whether the path is an existing folder, and not a link to one."""
        return os.path.isdir(self.path) and not self.is_link

    def names(self) -> list[str]:
        """Return the names of files and subfolders; none if the folder is missing."""
        with contextlib.suppress(FileNotFoundError):
            return os.listdir(self.path)
        return []

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each file, by name.

        Returns:
            Dict from the name of a file to its size; empty if there is no folder.

        Raises:
            ValueError: If the folder is a link, or has an entry that is not a regular
                file: it may lead elsewhere, or block readers.
        """
        if self.is_link:
            raise ValueError(
                f"The folder {self.name!r} is a link. Put the folder itself there."
            )
        if not os.path.isdir(self.path):
            return {}  # no error: the caller reports each file as missing
        sizes = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                if not entry.is_file(follow_symlinks=False):
                    raise ValueError(
                        f"The folder {self.name!r} has {entry.name!a} in it, which is "
                        "not a regular file."
                    )
                sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
        return sizes

    def has(self, name: str) -> bool:
        """Return whether a file, folder or link of that name exists."""
        return os.path.lexists(self._path(name))

    def read_text(self, name: str, most_bytes: int) -> str:
        """Read a file as text; raise `ValueError` if it has more than `most_bytes`."""
        return read_text(self._path(name), most_bytes)

    def read_bytes(self, name: str, most_bytes: int) -> bytes:
        """Read the first bytes of a file, at most `most_bytes`.

        Raises:
            NotRegularFile: If it is not a regular file; nothing is read.
        """
        with open_regular(self._path(name)) as file:
            return file.read(most_bytes)

    def write_text(self, name: str, text: str) -> None:
        """Write a text into a new file, and sync the file to the disk."""
        write_text(self._path(name), text)

    def replace_text(self, name: str, text: str, scratch: str) -> None:
        """Replace a file atomically: readers see the old text or the new one.

        Args:
            name: String, name of the file.
            text: String, its new content.
            scratch: String, name of a subfolder for a temporary file.
        """
        scratch_path = os.path.join(self.path, scratch, name)
        with replaced(self._path(name), scratch_path) as temporary:
            write_text(temporary, text)
        sync_folder(self.path)

    @contextlib.contextmanager
    def writing(self) -> Iterator[tuple[str, Publish]]:
        """Yield a local folder to write into, and a function that moves its files here.

        The function takes names of files. For a file system, the local folder is this
        folder, the function does nothing, and the folder is synced to the disk at the
        end.
        """
        yield self.path, lambda names: None
        sync_folder(self.path)

    def rename(self, name: str, new_name: str) -> None:
        """Rename a subfolder of this folder; both names are relative to it."""
        os.rename(self._path(name), self._path(new_name))

    def remove_file(self, name: str) -> None:
        """Remove the file with this name."""
        os.unlink(self._path(name))

    def remove_left_over(self) -> None:
        """Remove the temporary files of processes that were killed."""
        remove_left_over(self.path)

    def remove(self) -> None:
        """Remove the folder and its content; errors are ignored."""
        shutil.rmtree(self.path, ignore_errors=True)

    def remove_if_empty(self) -> None:
        """Remove the folder if it is empty; otherwise leave it, and raise an error.

        Raises:
            OSError: If the folder is not empty.
        """
        os.rmdir(self.path)

    def _path(self, name: str) -> str:
        """Return the path of a file or subfolder by its name."""
        return os.path.join(self.path, name)
