"""Storage in an object store, through fsspec: `s3://`, `gs://` and others.

A PUT makes an object visible whole or not at all, and objects cannot be moved. So each
save uses a folder of its own, and its index, which is put last, makes it valid.

Source: https://filesystem-spec.readthedocs.io/en/latest/api.html
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import importlib
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfdp.checkpoint.storage import Publish, Storage, StoreError
from tfdp.ground.base.temporary import TemporaryFolder, is_left_over
from tfdp.ground.base.threads import run_on_thread
from tfdp.ground.text import pluralize

# Error messages name the package to install for these protocols. For other protocols,
# fsspec's own message names it.
_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "adlfs"),
}
# URLs of these protocols are refused: their file systems show a file while it is
# written, so a reader could find half of an index.
_FILE_SYSTEMS = frozenset(
    ("file", "local", "ftp", "sftp", "ssh", "smb", "hdfs", "webhdfs", "webdav", "dbfs")
)
# Timeout in seconds of a request, including all retries of the client: even at 30 kB/s,
# a shard of 8 MB arrives in time.
_REQUEST_SECONDS = 300.0
# `pathlib` turns `s3://bucket/run` into `s3:/bucket/run`. Such a path is recognized,
# since it would otherwise be used as a local directory.
_MERGED_SLASHES = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")


def open_storage(path: str) -> Storage:
    """Return the storage of a path or a URL, without a request to it.

    Args:
        path: String, a path or a URL.

    Returns:
        `Storage`.

    Raises:
        ValueError: If `path` is a URL of anything but an object store, or fsspec or its
            package for that store is not installed.

    Example:

    >>> open_storage("checkpoints").below("latest").path
    'checkpoints/latest'
    """
    if _MERGED_SLASHES.match(path):
        raise ValueError(
            "a URL has two slashes; give it as a string, and not as a Path"
        )
    return ObjectStore(path) if "://" in path else Storage(path)


def absolute_path(path: str) -> str:
    """Return a path that stays the same if the working directory changes, or a URL.

    A path or URL that `open_storage` refuses is returned unchanged.
    """
    is_url = "://" in path or _MERGED_SLASHES.match(path)
    return path if is_url or not path else os.path.abspath(path)


class ObjectStore(Storage):
    """Folder of an object store: the objects with a common name prefix.

    Credentials, endpoints and timeouts are those of fsspec's configuration. A request
    times out after 5 minutes.

    Args:
        path: String, a URL.

    Raises:
        ValueError: If `path` is not a URL of an object store, or fsspec or its package
            for that store is not installed.

    Example:

    >>> ObjectStore("memory://bucket/run/").below("step-3").path
    'memory://bucket/run/step-3'

    Source: https://filesystem-spec.readthedocs.io/en/latest/features.html#configuration
    """

    def __init__(self, path: str) -> None:
        super().__init__(path.rstrip("/"))
        protocol, _, rest = path.partition("://")
        if not rest.strip("/"):
            raise ValueError(
                f"`{protocol}://` must be followed by the name of a bucket"
            )
        _check_protocol(protocol)

    @property
    def is_link(self) -> bool:
        """Bool, always false: object stores have no links."""
        return False

    def below(self, name: str) -> ObjectStore:
        """Return the subfolder with this name."""
        return ObjectStore(f"{self.path}/{name}")

    def make(self, *, exist_ok: bool = True) -> None:
        """Do nothing: a folder of an object store exists while it has an object."""

    def is_folder(self) -> bool:
        """Return true, since objects can be put under any prefix."""
        return True

    def names(self) -> list[str]:
        """Return the names of the objects and subfolders in this folder."""
        return list(self._list())

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each object in this folder, by name."""
        return {
            name: entry["size"]
            for name, entry in self._list().items()
            if entry["type"] == "file"
        }

    def has(self, name: str) -> bool:
        """Return whether an object of that name exists in this folder."""
        with contextlib.suppress(FileNotFoundError):
            return self._info(name)["type"] == "file"
        return False

    def read_text(self, name: str, most_bytes: int) -> str:
        """Read an object as text; raise `ValueError` if it exceeds `most_bytes`."""
        num_bytes = self._info(name)["size"]
        if num_bytes > most_bytes:
            raise ValueError(f"it has more than {pluralize(most_bytes, 'byte')}")
        return self.read_bytes(name, num_bytes).decode()

    def read_bytes(self, name: str, most_bytes: int) -> bytes:
        """Read the object with this name, whole; `most_bytes` is ignored."""
        return self._request("read", lambda s, path: s.cat_file(f"{path}/{name}"), name)

    def write_text(self, name: str, text: str) -> None:
        """Put a text as the object with this name."""
        content = text.encode()
        self._request(
            "written", lambda s, path: s.pipe_file(f"{path}/{name}", content), name
        )

    def replace_text(self, name: str, text: str, scratch: str) -> None:
        """Replace an object by a text with one PUT; `scratch` is not used."""
        self.write_text(name, text)

    @contextlib.contextmanager
    def writing(self) -> Iterator[tuple[str, Publish]]:
        """Yield a temporary folder, and a function that uploads files from it.

        Returns:
            Context manager that yields the path of the folder, and a function that
            takes names of files in it, uploads them, and removes them from it.
        """
        with TemporaryFolder("store") as folder:

            def publish(names: Sequence[str]) -> None:
                """Upload files of the folder by name, and remove them from it."""
                for name in names:
                    self._upload(os.path.join(folder, name), name)
                    os.unlink(os.path.join(folder, name))

            yield folder, publish

    def rename(self, name: str, new_name: str) -> None:
        """Copy the objects of a subfolder to a new name, and remove the old ones."""
        for path in self._request(
            "listed", lambda s, path: s.find(f"{path}/{name}"), name
        ):
            self._move(path, name, new_name)

    def remove_file(self, name: str) -> None:
        """Remove the object with this name."""
        self._request("removed", lambda s, path: s.rm_file(f"{path}/{name}"), name)

    def remove_left_over(self) -> None:
        """Remove the temporary objects of processes that were killed."""
        for name in self.names():
            if is_left_over(name, math.inf) and is_left_over(name, self._age(name)):
                self.remove_file(name)

    def remove(self) -> None:
        """Remove the objects of this folder, but not those of its subfolders.

        Raises:
            StoreError: If the store refuses, or an object still exists afterwards.
        """
        names = self.sizes()
        if not names:
            return
        self._request("removed", lambda s, path: s.rm([f"{path}/{n}" for n in names]))
        # The objects are listed again, since s3fs raises no error if the store refuses
        # to delete an object.
        if names.keys() & self.sizes().keys():
            raise StoreError(f"{self.path!r} cannot be removed (the store keeps it)")

    def remove_if_empty(self) -> None:
        """Do nothing, since a folder ceases to exist with its last object."""

    def _list(self) -> dict[str, dict[str, Any]]:
        """Return fsspec's entries of this folder's objects and subfolders, by name."""
        try:
            path, entries = self._request(
                "listed", lambda s, path: (path, s.ls(path, detail=True))
            )
        except FileNotFoundError:
            return {}
        folder = path.strip("/") + "/"
        # Some stores also list the folder itself, and names that only share its prefix,
        # such as `run-2` for `run`. Such entries are left out.
        return {
            entry["name"].strip("/").removeprefix(folder): entry
            for entry in entries
            if entry["name"].strip("/").startswith(folder)
        }

    def _info(self, name: str) -> dict[str, Any]:
        """Return fsspec's entry of one object in this folder."""
        return self._request("read", lambda s, path: s.info(f"{path}/{name}"), name)

    def _age(self, name: str) -> float | None:
        """Return the seconds since an object was put, or `None` if unknown."""
        with contextlib.suppress(OSError):
            put_time = self._request(
                "read", lambda s, path: s.modified(f"{path}/{name}"), name
            )
            zone = put_time.tzinfo or datetime.timezone.utc
            return (
                datetime.datetime.now(zone) - put_time.replace(tzinfo=zone)
            ).total_seconds()
        return None

    def _upload(self, file: str, name: str) -> None:
        """Put a local file, by its path, as the object with this name."""
        self._request(
            "written", lambda s, path: s.put_file(file, f"{path}/{name}"), name
        )

    def _move(self, path: str, name: str, new_name: str) -> None:
        """Move one object to the renamed folder.

        Args:
            path: String, full path of the object.
            name: String, old name of its folder.
            new_name: String, new name of its folder.
        """

        def move(store: Any, root: str) -> None:
            """Copy the object to its new name, and remove the old one.

            Args:
                store: The file system of fsspec.
                root: String, path of this folder in it.
            """
            store.cp_file(path, f"{root}/{new_name}" + path[len(f"{root}/{name}") :])
            store.rm_file(path)

        self._request("moved", move, name)

    def _request(
        self, verb: str, request: Callable[[Any, str], Any], name: str = ""
    ) -> Any:
        """Send a request to the store; raise `StoreError` for errors of the client.

        Args:
            verb: String, past participle of the request for error messages.
            request: Callable that takes fsspec's file system and this folder's path.
            name: String, the object of the request. Defaults to `""`, the folder.

        Returns:
            Result of `request`.

        Raises:
            FileNotFoundError: If the object to read or the folder to list is missing.
            StoreError: For any other error, whose classes differ between stores.
        """
        try:
            return _with_timeout(lambda: request(*self._open()), _REQUEST_SECONDS)
        except Exception as error:
            if isinstance(error, FileNotFoundError) and verb in ("read", "listed"):
                raise
            where = f"{self.path}/{name}" if name else self.path
            raise StoreError(
                f"{where!r} cannot be {verb} ({_in_one_line(error)})"
            ) from error

    def _open(self) -> tuple[Any, str]:
        """Return fsspec's file system and the path of this folder in it."""
        # fsspec must not cache listings, since they would lack the files that other
        # workers write.
        core = importlib.import_module("fsspec.core")
        return core.url_to_fs(self.path, use_listings_cache=False)


def _with_timeout(request: Callable[[], Any], seconds: float) -> Any:
    """Return the result of a request, or raise `TimeoutError` after `seconds`.

    The timeouts of s3fs do not suffice: it waits indefinitely for a server that
    receives the beginning of a PUT and then hangs.
    """
    answer = run_on_thread("tfdp-store", request)
    concurrent.futures.wait([answer], seconds)
    if not answer.done():
        raise TimeoutError(f"no answer in {seconds:g} s")
    return answer.result()


def _check_protocol(protocol: str) -> None:
    """Raise `ValueError` unless a protocol is that of an object store, and can be used.

    fsspec and its package for the protocol must be installed.

    Args:
        protocol: String, part of the URL before `://`, such as `"s3"`.
    """
    if protocol in _FILE_SYSTEMS or "::" in protocol:
        raise ValueError(
            f"`{protocol}://` is not an object store; mount it, and give the directory"
        )
    package = _PACKAGES.get(protocol, "")
    try:
        fsspec = importlib.import_module("fsspec")
    except ImportError as error:
        packages = f"tfdp[fsspec] {package}".rstrip()
        raise ValueError(
            f"`{protocol}://` needs fsspec; `pip install {packages}`"
        ) from error
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        why = _in_one_line(error.__cause__ or error)
        what_to_do = f"; `pip install {package}`" if package else ""
        raise ValueError(
            f"the client of `{protocol}://` cannot be imported ({why}){what_to_do}"
        ) from error
    except ValueError as error:
        raise ValueError(f"fsspec does not support `{protocol}://`") from error


def _in_one_line(error: BaseException) -> str:
    """Format an error as one line: `"TimeoutError: no answer in 300 s"`."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
