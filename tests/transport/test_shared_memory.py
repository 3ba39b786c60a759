"""Workers of one host that get no shared memory exchange their data all the same."""

from __future__ import annotations

import errno
import logging
import os
import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.transport.test_unauthenticated_peers import logged
from tests.transport.workers import Worker, run
from tfdp.communication.transport import new_communicator, shared_memory

NUM_WORKERS = 3
# More than goes over sockets anyway.
LENGTH = 30_000


def grant_no_memory() -> None:
    """Let the system refuse files, those in memory too, of more than 64 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))


def grant_no_mapping() -> None:
    """Refuse to map memory, which others of the group have been given."""

    def refused(*args: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    shared_memory.mmap.mmap = refused  # type: ignore[assignment, misc]


LACKS = {
    "memory": (grant_no_memory, "File too large"),
    "mapping": (grant_no_mapping, "Cannot allocate memory"),
}


def reduce_without(worker: Worker, poor: int, lack: Callable[[], None]) -> tuple:
    mesh, lines = worker.mesh(), logged()
    members = range(worker.num_workers)
    if worker.rank == poor:
        lack()
    lanes = [new_communicator(mesh, members, lane) for lane in ("a", "b")]
    for tag, communicator in enumerate(lanes):
        array = np.full(LENGTH, 1.0 + worker.rank, np.float32)
        communicator.all_reduce(array, tag)
        assert set(array) == {6.0}
        communicator.all_gather(array, [0, 10, 20, LENGTH], tag)
        communicator.broadcast(array, poor, tag)
    left = [name for name in map(os.readlink, descriptors()) if "memfd" in name]
    worker.meet("end")
    return [communicator.name for communicator in lanes], lines.lines, left


def descriptors() -> list[str]:
    numbers = os.listdir("/proc/self/fd")
    return [f"/proc/self/fd/{number}" for number in numbers if is_open(int(number))]


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:  # that of the listing itself
        return False
    return True


@pytest.mark.parametrize("poor", [0, 2])
@pytest.mark.parametrize("lack", LACKS)
def test_if_one_worker_gets_no_shared_memory_all_take_sockets_and_it_says_so(
    lack, poor
):
    act, reason = LACKS[lack]
    found = run(NUM_WORKERS, reduce_without, poor, act)
    for rank, (names, lines, left) in enumerate(found):
        assert names == ["unix sockets"] * 2
        assert left == []
        if rank != poor:
            assert lines == []
            continue
        (line,) = lines  # though both lanes have asked
        assert line.startswith("This worker gets no shared memory")
        assert f"({reason})" in line


def say_by_what(worker: Worker) -> list[str]:
    logging.getLogger("tfdp.transport").setLevel(logging.INFO)
    mesh, lines = worker.mesh(), logged()
    new_communicator(mesh, range(worker.num_workers), "lane")
    worker.meet("end")
    return lines.lines


@pytest.mark.parametrize(("wire", "name"), [("unix", "shared memory"), ("tcp", "tcp")])
def test_the_log_says_by_what_workers_communicate(wire, name):
    found = run(NUM_WORKERS, say_by_what, wire=wire)
    assert found[1] == [f"Worker 1 communicates with workers 0, 2 by {name}"]
