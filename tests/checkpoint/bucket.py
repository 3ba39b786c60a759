"""An object store in a folder of this machine, `bucket://`, with faults on demand.

It has what S3 has: flat names, PUTs that are seen whole, no move and no folders.
Every process of a test that installs it sees the same objects.
"""

from __future__ import annotations

import datetime
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import fsspec

# Told of each request before it is made, and again after: the verb, the name of the
# object, and whether it was made. What it raises is the store's answer.
Hook = Callable[[str, str, bool], None]


class Bucket(fsspec.AbstractFileSystem):
    """The store, of which `install` says where its objects are."""

    protocol = "bucket"
    folder = Path()
    hook: Hook | None = None

    def ls(self, path: str, detail: bool = True, **_: Any) -> list:
        self._tell("list", path, False)
        beginning = f"{path.strip('/')}/"
        found: dict[str, dict[str, Any]] = {}
        for name, file in objects(self.folder).items():
            if name.startswith(beginning):
                first, slash, _rest = name[len(beginning) :].partition("/")
                size = 0 if slash else file.stat().st_size
                kind = "directory" if slash else "file"
                found[first] = {"name": beginning + first, "size": size, "type": kind}
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else list(found)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        self._tell("head", path, False)
        file = self._file(path)
        return {"name": path, "size": file.stat().st_size, "type": "file"}

    def modified(self, path: str) -> datetime.datetime:
        seconds = self._file(path).stat().st_mtime
        return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)

    def cat_file(
        self, path: str, start: Any = None, end: Any = None, **_: Any
    ) -> bytes:
        assert start is None
        assert end is None
        self._tell("get", path, False)
        return self._file(path).read_bytes()

    def get_file(self, path: str, lpath: str, *_: Any, **__: Any) -> None:
        self._tell("get", path, False)
        shutil.copyfile(self._file(path), lpath)
        self._tell("get", path, True)

    def pipe_file(self, path: str, value: bytes, *_: Any, **__: Any) -> None:
        self._tell("put", path, False)
        self._put(path, value)
        self._tell("put", path, True)

    def put_file(self, lpath: str, path: str, *_: Any, **__: Any) -> None:
        # What is written and not sent yet is one shard, of two files.
        assert len(os.listdir(os.path.dirname(lpath))) <= 2
        self.pipe_file(path, Path(lpath).read_bytes())

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        self._tell("copy", path1, False)
        self._put(path2, self._file(path1).read_bytes())

    def _rm(self, path: str) -> None:
        self._tell("delete", path, False)
        self._file(path).unlink(missing_ok=True)  # as S3
        self._tell("delete", path, True)

    def mv(self, *_: Any, **__: Any) -> None:
        raise AssertionError("an object store has no move")

    def _open(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("what is opened may be written in parts")

    def _put(self, path: str, value: bytes) -> None:
        temporary = self.folder / f".{uuid.uuid4().hex}"
        temporary.write_bytes(value)
        temporary.replace(self._file(path))

    def _file(self, path: str) -> Path:
        return self.folder / quote(self._strip_protocol(path), safe="")

    def _tell(self, verb: str, path: str, is_done: bool) -> None:
        if Bucket.hook is not None:
            Bucket.hook(verb, self._strip_protocol(path), is_done)


def install(folder: Path, hook: Hook | None = None) -> None:
    """Makes `bucket://` known to fsspec in this process.

    Args:
        folder: Path, where the objects are.
        hook: Callable, or `None`.
    """
    Bucket.folder, Bucket.hook = folder, hook
    fsspec.register_implementation("bucket", Bucket, clobber=True)


def objects(folder: Path) -> dict[str, Path]:
    """The files of a store by the names of the objects."""
    files = sorted(folder.iterdir())
    return {unquote(f.name): f for f in files if not f.name.startswith(".")}
