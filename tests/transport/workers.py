"""Run a function in forked processes, which share a store of files."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from tfdp.communication.transport import (
    Communicator,
    Mesh,
    SharedMemoryCommunicator,
    SocketCommunicator,
    mesh,
)

DEADLINE_SECONDS = 30.0
each_wire = pytest.mark.parametrize("wire", ["unix", "tcp", "memory"])
by_sockets = pytest.mark.parametrize("wire", ["unix", "tcp"])
_fork = multiprocessing.get_context("fork")


class FileStore:
    """Store of a directory: one file a key."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)

    def path(self, key: str) -> Path:
        return self._directory / key.replace("/", "%")

    def put(self, key: str, text: str) -> None:
        path = self.path(key)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(text)
        partial.rename(path)

    def get(self, key: str, timeout_seconds: float) -> str:
        path = self.path(key)
        deadline = time.monotonic() + timeout_seconds
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(key)
            time.sleep(0.002)
        return path.read_text()


@dataclasses.dataclass(frozen=True)
class Worker:
    """What a function of a worker gets."""

    rank: int
    num_workers: int
    store: FileStore
    wire: str = "unix"

    def mesh(self, **options: Any) -> Mesh:
        options = {"host": "localhost", "timeout_seconds": 10.0} | options
        options.setdefault("use_unix", self.wire != "tcp")
        return Mesh(self.rank, self.num_workers, self.store, **options)

    def group(self, mesh: Mesh | None = None, **options: Any) -> Communicator:
        """A communicator of all workers, `options` are those of sockets."""
        mesh, members = mesh or self.mesh(), range(self.num_workers)
        if self.wire != "memory":
            return SocketCommunicator(mesh, members, "test", **options)
        small = {"chunks_bytes": 8192, "small_bytes": 1024} if options else {}
        return SharedMemoryCommunicator(mesh, members, "test", **small)

    def say(self, word: str) -> None:
        """Say something that `wait_for` of all workers hears."""
        self.store.put(f"said/{word}", "")

    def wait_for(self, word: str) -> None:
        self.store.get(f"said/{word}", 10.0)

    def meet(self, word: str) -> None:
        """Return when all workers are here, without a transport."""
        self.say(f"{word} {self.rank}")
        for rank in range(self.num_workers):
            self.wait_for(f"{word} {rank}")


class Failed(AssertionError):
    """A worker has raised, or hangs."""


def run(
    num_workers: int,
    function: Callable[..., Any],
    *arguments: Any,
    lost: tuple[int, ...] = (),
    deadline_seconds: float = DEADLINE_SECONDS,
    **options: Any,
) -> list[Any]:
    """Call a function with a `Worker` in each process, and return the results.

    Those of `lost` may end without a result, `None`.
    """
    with started(num_workers, function, *arguments, **options) as workers:
        return collect(workers, lost, deadline_seconds)


@contextlib.contextmanager
def started(
    num_workers: int, function: Callable[..., Any], *arguments: Any, **options: Any
) -> Iterator[dict[Connection, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        store = FileStore(directory)
        workers = {}
        try:
            for rank in range(num_workers):
                worker = Worker(rank, num_workers, store, **options)
                receiver, sender = _fork.Pipe(duplex=False)
                process = _fork.Process(
                    target=_call, args=(sender, function, worker, arguments)
                )
                process.start()
                sender.close()
                workers[receiver] = process
            yield workers
        finally:
            for receiver, process in workers.items():
                if process.is_alive():
                    process.kill()
                process.join()
                receiver.close()


def collect(
    workers: dict[Connection, Any], lost: tuple[int, ...], deadline_seconds: float
) -> list[Any]:
    deadline = time.monotonic() + deadline_seconds
    results: dict[Connection, Any] = {}
    waiting = list(workers)
    while waiting:
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            ranks = [list(workers).index(receiver) for receiver in waiting]
            for receiver in waiting:
                os.kill(workers[receiver].pid, signal.SIGABRT)
            raise Failed(f"Workers {ranks} hang")
        for receiver in ready:
            waiting.remove(receiver)
            rank = list(workers).index(receiver)
            try:
                succeeded, result = receiver.recv()
            except EOFError:
                succeeded, result = rank in lost, None
            if not succeeded:
                raise Failed(f"Worker {rank}: {result or 'it ended'}")
            results[receiver] = result
    return [results[receiver] for receiver in workers]


def _call(
    sender: Connection, function: Callable[..., Any], worker: Worker, arguments: tuple
) -> None:
    import faulthandler

    faulthandler.enable()  # SIGABRT shows where it hangs
    try:
        sender.send((True, function(worker, *arguments)))
        mesh._close_all()  # as at the end of a script, which this is not
    except BaseException:  # noqa: BLE001 (the test shows it)
        sender.send((False, traceback.format_exc()))
