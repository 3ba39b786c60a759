"""Storage of checkpoints: what writer, reader and backups ask of the place of a folder.

They do not know whether it is on a file system or in an object store.
"""

from __future__ import annotations

import abc
import contextlib
import os
from collections.abc import Callable, Sequence

# Takes files that were written into a local folder to the storage.
Publish = Callable[[Sequence[str]], None]
# Makes files of the storage readable in a local folder, and returns its path.
Fetch = Callable[[Sequence[str]], str]


class StoreError(OSError):
    """Object store that does not answer, or refuses."""


class Storage(abc.ABC):
    """Folder with files, and folders below it.

    Args:
        path: String, its path or URL.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """String, the last part of its path."""
        return os.path.basename(self.path)

    @abc.abstractmethod
    def below(self, name: str) -> Storage:
        """Folder of that name in it."""

    @abc.abstractmethod
    def make(self, *, exist_ok: bool = True) -> None:
        """Make the folder, where there are folders."""

    @property
    @abc.abstractmethod
    def is_link(self) -> bool:
        """Whether it is a link to a folder."""

    @abc.abstractmethod
    def is_folder(self) -> bool:
        """Whether files can be written into it: it was made, and is no link."""

    @abc.abstractmethod
    def names(self) -> list[str]:
        """Names of all that is in it; none if it is not there."""

    @abc.abstractmethod
    def sizes(self) -> dict[str, int]:
        """Bytes of each of its files, which have to be regular ones."""

    @abc.abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""

    @abc.abstractmethod
    def read_text(self, name: str, most_bytes: int) -> str:
        """Read a file of limited size, see `tfdp.base.files.read_text`."""

    @abc.abstractmethod
    def write_text(self, name: str, text: str) -> None:
        """Write a new file."""

    @abc.abstractmethod
    def replace_text(self, name: str, text: str, scratch: str) -> None:
        """Replace a file: whoever reads meanwhile finds the old text or the new one.

        Args:
            name: String.
            text: String.
            scratch: String, a folder in this one, for a temporary file.
        """

    @abc.abstractmethod
    def writing(self) -> contextlib.AbstractContextManager[tuple[str, Publish]]:
        """Yield a local folder to write into, and what takes files of it here."""

    @abc.abstractmethod
    def reading(self) -> contextlib.AbstractContextManager[Fetch]:
        """Yield what makes files readable in a local folder, which it returns."""

    @abc.abstractmethod
    def rename(self, name: str, new_name: str) -> None:
        """Rename a folder in it."""

    @abc.abstractmethod
    def remove_file(self, name: str) -> None:
        """Remove a file."""

    @abc.abstractmethod
    def remove_left_over(self) -> None:
        """Remove the temporary files of processes that were killed."""

    @abc.abstractmethod
    def remove(self) -> None:
        """Remove the folder with all that is in it, as far as that can be done."""

    @abc.abstractmethod
    def remove_if_empty(self) -> None:
        """Remove the folder, where there are folders and nothing is in it."""
