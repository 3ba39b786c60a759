"""A worker that ends, in whatever phase, is named to all that wait for it."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.tiers import full
from tests.harness.timing import within
from tests.transport.workers import Worker, by_sockets, each_wire, run
from tfdp.communication.transport import (
    Communicator,
    PeerLost,
    SharedMemoryCommunicator,
    SocketCommunicator,
    TransportClosed,
    TransportError,
    flows,
)

LENGTH = 30_000
# What a member calls, and after how many pieces of data the victim ends.
PHASES = {
    "before": ("all_reduce", 0),
    "header": ("all_reduce", 1),
    "reduce-scatter": ("all_reduce", 6),
    "all-gather": ("all_reduce", 25),
    "small": ("small", 0),
    "halves": ("halves", 9),
    "broadcast": ("broadcast", 3),
    "all-to-all": ("all_to_all", 3),
    "barrier": ("barrier", 0),
}


def group(worker: Worker) -> Communicator:
    return worker.group(segment_bytes=4096, small_bytes=2000)


def call(communicator: Communicator, what: str) -> None:
    array = np.ones(LENGTH, np.float16 if what == "halves" else np.float32)
    if what == "all_to_all":
        size = len(communicator.ranks)
        communicator.all_to_all([array] * size, [array.copy() for _ in range(size)], 1)
    elif what == "broadcast":
        communicator.broadcast(array, 0, 1)
    elif what == "barrier":
        communicator.barrier(1)
    else:
        communicator.all_reduce(array[:100] if what == "small" else array, 1)


def call_for_ever(communicator: Communicator, what: str) -> None:
    while True:
        call(communicator, what)


def die_after(num_turns: int, worker: Worker) -> None:
    """Kill this process after so many pieces of data that it sent or received."""
    turns = iter(range(num_turns))

    def counted(flow: flows.Flow, move: Callable[[flows.Flow], bool]) -> bool:
        moved = move(flow)
        if moved and next(turns, None) is None:
            die(worker)
        return moved

    flows.Flow.push = functools.partialmethod(counted, flows.Flow.push)
    flows.Flow.pull = functools.partialmethod(counted, flows.Flow.pull)


def die_at_ready_message(number: int, worker: Worker) -> None:
    """Kill this process after that many ready messages."""
    messages = iter(range(number))
    original = SharedMemoryCommunicator._exchange_ready_messages

    def counted(self: SharedMemoryCommunicator, call: Any) -> None:
        if next(messages, None) is None:
            die(worker)
        original(self, call)

    SharedMemoryCommunicator._exchange_ready_messages = counted  # type: ignore[method-assign]


def die(worker: Worker) -> None:
    worker.store.put("died", str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def lose_one(worker: Worker, victim: int, what: str, num_turns: int) -> float:
    communicator = group(worker)
    call(communicator, what)
    worker.meet("begin")
    if worker.rank == victim:
        if num_turns and worker.wire == "memory" and what != "all_to_all":
            die_at_ready_message(num_turns // 4, worker)
        elif num_turns:
            die_after(num_turns, worker)
        else:
            time.sleep(0.05)  # the others wait by then
            die(worker)
    with pytest.raises(PeerLost) as caught:
        call_for_ever(communicator, what)
    noticed = time.monotonic() - float(worker.store.get("died", 1.0))
    assert caught.value.rank == victim
    with pytest.raises(TransportClosed):
        communicator.barrier(2)
    return noticed


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("wire", "size", "victim"),
    [
        full("unix", 4, 2),
        full("unix", 2, 0),
        ("memory", 3, 1),
        full("tcp", 3, 1),
        full("tcp", 2, 0),
        ("unix", 2, 1),
        full("unix", 3, 0),
        full("memory", 2, 0),
    ],
)
def test_all_others_learn_within_a_second_who_was_killed(size, victim, phase, wire):
    found = run(size, lose_one, victim, *PHASES[phase], lost=(victim,), wire=wire)
    assert found[victim] is None
    assert max(seconds for seconds in found if seconds is not None) < 1.0


def close_meanwhile(worker: Worker, how: str) -> str:
    mesh = worker.mesh()
    communicator = worker.group(mesh)
    worker.meet("begin")
    if worker.rank == 0:
        worker.meet("end")
        return ""
    if worker.rank == 1:
        act = mesh.close if how == "mesh" else communicator.close
        threading.Timer(0.1, functools.partial(act, "the step took too long")).start()
    with within(1.1), pytest.raises((PeerLost, TransportClosed)) as caught:
        communicator.barrier(2)
    worker.meet("end")
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("how", ["communicator", "mesh"])
def test_close_from_another_thread_ends_a_wait_here_and_elsewhere(how):
    _, own, other = run(3, close_meanwhile, how)
    assert own == (
        "TransportClosed: This worker has closed its connections: "
        "the step took too long"
    )
    assert other == (
        "PeerLost: Worker 1 has left its collectives: the step took too long"
    )


def open_files() -> list[str]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(link))
        except FileNotFoundError:  # that of this loop
            continue
    return sorted(found)


def leave_nothing(worker: Worker, how: str) -> None:
    before = open_files(), threading.active_count()
    mesh = worker.mesh()
    communicator = worker.group(mesh)
    communicator.barrier(1)
    assert len(open_files()) > len(before[0])
    worker.meet("open")
    if how == "error" and worker.rank == 0:
        mesh.close("it met an error")
    elif how == "error":
        with pytest.raises(PeerLost, match="it met an error"):
            communicator.barrier(2)
    mesh.close()
    mesh.close()
    communicator.close()
    assert (open_files(), threading.active_count()) == before


@each_wire
@pytest.mark.parametrize("how", ["normal", "error"])
def test_no_file_and_no_thread_is_left_after_close(how, wire):
    run(3, leave_nothing, how, wire=wire)


def fork_and_die(worker: Worker) -> str:
    """The process that a worker has forked lives longer than the worker."""
    communicator = group(worker)
    worker.meet("begin")
    if worker.rank == 0:
        if os.fork() == 0:
            worker.wait_for("end")
            os._exit(0)
        die(worker)
    with pytest.raises(PeerLost) as caught:
        communicator.barrier(2)
    worker.say("end")
    return caught.value.cause


@by_sockets
def test_a_forked_process_does_not_hide_a_workers_death(wire):
    cause = run(2, fork_and_die, wire=wire, lost=(0,))[1]
    assert cause in (
        "its connection was closed",
        "[Errno 104] Connection reset by peer",
    )


def leave_in_good_order(worker: Worker) -> float:
    """The members end one after the other, each with a collective that is complete."""
    mesh = worker.mesh()
    communicator = worker.group(mesh)
    array = np.ones(LENGTH, np.float32)
    for tag in range(3):
        communicator.all_reduce(array, tag)
        communicator.all_reduce(array[:10], tag)
    mesh.close()
    return float(array[-1])


def test_members_that_end_first_disturb_no_other():
    for _ in range(3):
        assert run(4, leave_in_good_order) == [64.0] * 4


def die_before_the_second(worker: Worker, victim: int) -> float:
    mesh = worker.mesh()
    first = mesh.connect(1 - worker.rank, "first")
    first.send(b"1")
    first.receive_into(bytearray(1))
    if worker.rank == victim:
        die(worker)
    with pytest.raises(PeerLost, match="it ended while the workers connected"):
        mesh.connect(victim, "second")
    return time.monotonic() - float(worker.store.get("died", 1.0))


@pytest.mark.parametrize("victim", [0, 1])
def test_nobody_waits_for_the_connection_of_a_worker_that_has_died(victim):
    found = run(2, die_before_the_second, victim, lost=(victim,))
    assert found[1 - victim] < 1.0


def many_lanes(worker: Worker) -> None:
    """Several groups reduce at once, each in a thread of its own."""
    mesh = worker.mesh()
    found: dict[int, float] = {}

    def reduce(lane: int) -> None:
        communicator = SocketCommunicator(mesh, range(worker.num_workers), f"{lane}")
        array = np.full(LENGTH, lane, np.float32)
        for tag in range(5):
            array[:] = lane
            communicator.all_reduce(array, tag)
        found[lane] = float(array.min())

    threads = [threading.Thread(target=reduce, args=(lane,)) for lane in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {lane: lane * worker.num_workers for lane in range(6)}
    assert len(mesh._controls) == worker.num_workers - 1
    worker.meet("end")


def test_lanes_do_not_disturb_each_other():
    run(3, many_lanes)


def disagree_and_learn(worker: Worker) -> tuple[int, str]:
    """Worker 0 is lost to worker 1 alone, which tells the others."""
    communicator = group(worker)
    worker.meet("begin")
    if worker.rank == 0:
        communicator.close("it ran out of memory")
        worker.meet("end")
        return 0, ""
    with pytest.raises(PeerLost) as caught:
        call(communicator, "all_reduce")
    worker.meet("end")
    return caught.value.rank, caught.value.cause


def test_the_reason_reaches_members_that_are_no_neighbours():
    found = run(5, disagree_and_learn)
    assert found[1:] == [(0, "it ran out of memory")] * 4


def run_out_of_files(worker: Worker) -> tuple[str, float]:
    """The worker that accepts connections may open no more files."""
    mesh = worker.mesh(timeout_seconds=3.0 if worker.rank else 10.0)
    if worker.rank == 0:
        worker.say("listens")
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, highest))
        with contextlib.suppress(OSError):
            while True:  # the numbers between those that are taken
                os.dup(0)
        # A link takes no file: the other worker is not to dial before.
        os.link(worker.store.path("said/listens"), worker.store.path("said/is full"))
    else:
        worker.wait_for("is full")
    begin = time.monotonic()
    with pytest.raises((TransportError, PeerLost)) as caught:
        worker.group(mesh)
    seconds = time.monotonic() - begin
    mesh.close(str(caught.value))
    return str(caught.value), seconds


@by_sockets
def test_a_worker_that_may_open_no_more_files_says_so_at_once(wire):
    (text, seconds), _ = run(2, run_out_of_files, wire=wire, deadline_seconds=60.0)
    assert "its limit is" in text
    assert "(`ulimit -n`)" in text
    assert seconds < 5.0  # half of the time that a worker is waited for
