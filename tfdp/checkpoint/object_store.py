"""Storage in an object store, through fsspec: `s3://`, `gs://` and others.

A PUT of an object is seen whole or not at all, and nothing can be moved: so files have
a folder that no other save uses, and the index, which is put last, makes them count.

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
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfdp.checkpoint.storage import Fetch, Publish, Storage, StoreError
from tfdp.ground.base.temporary import TemporaryFolder, is_left_over
from tfdp.ground.text import pluralize

# Who speaks to a store. fsspec knows more of them, and says so itself.
_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "adlfs"),
}
# Whose files are seen while they are written: half of an index would be found.
_FILE_SYSTEMS = frozenset(
    ("file", "local", "ftp", "sftp", "ssh", "smb", "hdfs", "webhdfs", "webdav", "dbfs")
)
# So much of what was downloaded is kept on the local disk, for whoever reads it next.
_KEPT_BYTES = 2**26
# A request may take so long, with all that the client tries again: 8 MB at 30 kB/s.
_REQUEST_SECONDS = 300.0
# What `pathlib` makes of `s3://bucket/run`.
_CUT_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")


def open_storage(path: str) -> Storage:
    """Storage at a path or a URL. Nothing is asked of it yet.

    Args:
        path: String.

    Returns:
        `Storage`.

    Raises:
        ValueError: If it is no URL of an object store, or what speaks to that store
            is not installed.

    Example:

    >>> open_storage("checkpoints").below("latest").path
    'checkpoints/latest'
    """
    if _CUT_URL.match(path):
        raise ValueError(
            "a URL has two slashes; give it as a string, and not as a Path"
        )
    return ObjectStore(path) if "://" in path else Storage(path)


class ObjectStore(Storage):
    """Objects whose names begin alike.

    Credentials, endpoints and timeouts are those of fsspec's configuration. A request
    without an answer is given up after 5 minutes.

    Args:
        path: String, a URL.

    Raises:
        ValueError: If it is no URL of an object store, or what speaks to that store
            is not installed.

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
                f"`{protocol}://` is to be followed by the name of a bucket"
            )
        _check_protocol(protocol)

    @property
    def is_link(self) -> bool:
        """False: there are none."""
        return False

    def below(self, name: str) -> ObjectStore:
        """Objects whose names go on with that name."""
        return ObjectStore(f"{self.path}/{name}")

    def make(self, *, exist_ok: bool = True) -> None:
        """Do nothing: a folder is there when there is an object in it."""

    def is_folder(self) -> bool:
        """True: anything may become one."""
        return True

    def names(self) -> list[str]:
        """Names of all that is in it."""
        return list(self._list())

    def sizes(self) -> dict[str, int]:
        """Bytes of each object."""
        return {
            name: entry["size"]
            for name, entry in self._list().items()
            if entry["type"] == "file"
        }

    def has(self, name: str) -> bool:
        """Whether there is an object of that name."""
        with contextlib.suppress(FileNotFoundError):
            return self._info(name)["type"] == "file"
        return False

    def read_text(self, name: str, most_bytes: int) -> str:
        """Read an object of limited size."""
        num_bytes = self._info(name)["size"]
        if num_bytes > most_bytes:
            raise ValueError(f"it has more than {pluralize(most_bytes, 'byte')}")
        content = self._ask("read", lambda s, path: s.cat_file(f"{path}/{name}"), name)
        return content.decode()

    def write_text(self, name: str, text: str) -> None:
        """Put an object."""
        content = text.encode()
        self._ask(
            "written", lambda s, path: s.pipe_file(f"{path}/{name}", content), name
        )

    def replace_text(self, name: str, text: str, scratch: str) -> None:
        """Replace an object by one PUT."""
        self.write_text(name, text)

    @contextlib.contextmanager
    def writing(self) -> Iterator[tuple[str, Publish]]:
        """Yield a temporary folder, and what uploads files and removes them there."""
        with TemporaryFolder("store") as folder:

            def publish(names: Sequence[str]) -> None:
                for name in names:
                    self._upload(os.path.join(folder, name), name)
                    os.unlink(os.path.join(folder, name))

            yield folder, publish

    @contextlib.contextmanager
    def reading(self) -> Iterator[Fetch]:
        """Yield what downloads objects into a temporary folder of limited size."""
        with TemporaryFolder("store") as folder:
            kept: dict[str, int] = {}  # bytes by name, the latest used last

            def fetch(names: Sequence[str]) -> str:
                for name in names:
                    file = os.path.join(folder, name)
                    if name not in kept:
                        self._download(name, file)
                        kept[name] = os.path.getsize(file)
                    kept[name] = kept.pop(name)
                _drop_oldest(folder, kept, names)
                return folder

            yield fetch

    def rename(self, name: str, new_name: str) -> None:
        """Copy the objects within the store, and remove those that were copied."""
        for path in self._ask("listed", lambda s, path: s.find(f"{path}/{name}"), name):
            self._move(path, name, new_name)

    def remove_file(self, name: str) -> None:
        """Remove an object."""
        self._ask("removed", lambda s, path: s.rm_file(f"{path}/{name}"), name)

    def remove_left_over(self) -> None:
        """Remove the temporary objects of processes that were killed."""
        for name in self.names():
            if is_left_over(name, math.inf) and is_left_over(name, self._age(name)):
                self.remove_file(name)

    def remove(self) -> None:
        """Remove the objects directly in it."""
        names = self.sizes()
        if not names:
            return
        self._ask("removed", lambda s, path: s.rm([f"{path}/{n}" for n in names]))
        if names.keys() & self.sizes().keys():  # s3fs says nothing
            raise StoreError(f"{self.path!r} cannot be removed (the store keeps it)")

    def remove_if_empty(self) -> None:
        """Do nothing: a folder goes with its last object."""

    def _list(self) -> dict[str, dict[str, Any]]:
        """What fsspec knows of all that is in it, by name."""
        try:
            path, entries = self._ask(
                "listed", lambda s, path: (path, s.ls(path, detail=True))
            )
        except FileNotFoundError:
            return {}
        own = path.strip("/") + "/"
        # Some stores list the folder itself, too, and what only begins alike.
        return {
            entry["name"].strip("/").removeprefix(own): entry
            for entry in entries
            if entry["name"].strip("/").startswith(own)
        }

    def _info(self, name: str) -> dict[str, Any]:
        return self._ask("read", lambda s, path: s.info(f"{path}/{name}"), name)

    def _age(self, name: str) -> float | None:
        """Seconds since an object was put, or `None` where the store does not tell."""
        with contextlib.suppress(OSError):
            put = self._ask("read", lambda s, path: s.modified(f"{path}/{name}"), name)
            zone = put.tzinfo or datetime.timezone.utc
            return (
                datetime.datetime.now(zone) - put.replace(tzinfo=zone)
            ).total_seconds()
        return None

    def _upload(self, file: str, name: str) -> None:
        self._ask("written", lambda s, path: s.put_file(file, f"{path}/{name}"), name)

    def _download(self, name: str, file: str) -> None:
        self._ask("read", lambda s, path: s.get_file(f"{path}/{name}", file), name)

    def _move(self, path: str, name: str, new_name: str) -> None:
        """Move an object, given its whole path, from one folder to another."""

        def move(store: Any, own: str) -> None:
            store.cp_file(path, f"{own}/{new_name}" + path[len(f"{own}/{name}") :])
            store.rm_file(path)

        self._ask("moved", move, name)

    def _ask(
        self, verb: str, request: Callable[[Any, str], Any], name: str = ""
    ) -> Any:
        """Make a request of the store, and translate its errors.

        Args:
            verb: String, what it does.
            request: Callable that takes fsspec's file system and the path in it.
            name: String, what it does it to. Defaults to `""`, the folder.

        Returns:
            What `request` returns.

        Raises:
            FileNotFoundError: If what is read or listed is not there.
            StoreError: For anything else: each store has errors of its own.
        """
        try:
            return _in_time(lambda: request(*self._open()))
        except Exception as error:
            if isinstance(error, FileNotFoundError) and verb in ("read", "listed"):
                raise
            where = f"{self.path}/{name}" if name else self.path
            raise StoreError(
                f"{where!r} cannot be {verb} ({_in_one_line(error)})"
            ) from error

    def _open(self) -> tuple[Any, str]:
        """File system of fsspec, and the path in it."""
        # Other workers write, too: what was listed before is of no use.
        core = importlib.import_module("fsspec.core")
        return core.url_to_fs(self.path, use_listings_cache=False)


def _in_time(request: Callable[[], Any]) -> Any:
    """Make a request in a thread, which is left behind when it takes too long.

    s3fs waits without end, whatever its timeouts are, for the answer of a server that
    takes the beginning of a PUT and then stands still.
    """
    answer: concurrent.futures.Future = concurrent.futures.Future()

    def run() -> None:
        try:
            answer.set_result(request())
        except BaseException as error:  # noqa: BLE001 raised where it is waited for
            answer.set_exception(error)

    threading.Thread(target=run, name="tfdp-store", daemon=True).start()
    concurrent.futures.wait([answer], _REQUEST_SECONDS)
    if not answer.done():
        raise TimeoutError(f"no answer in {_REQUEST_SECONDS:g} s")
    return answer.result()


def _drop_oldest(folder: str, kept: dict[str, int], needed: Sequence[str]) -> None:
    """Remove files that were used longest ago, until the others are few enough."""
    for name in list(kept):
        if sum(kept.values()) <= _KEPT_BYTES or name in needed:
            return
        os.unlink(os.path.join(folder, name))
        del kept[name]


def _check_protocol(protocol: str) -> None:
    """Raise unless fsspec is there, with what speaks to the store."""
    if protocol in _FILE_SYSTEMS or "::" in protocol:
        raise ValueError(
            f"`{protocol}://` is no object store; mount it, and give the directory"
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
            f"what speaks to `{protocol}://` cannot be imported ({why}){what_to_do}"
        ) from error
    except ValueError as error:
        raise ValueError(f"fsspec knows no `{protocol}://`") from error


def _in_one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
