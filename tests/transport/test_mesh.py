"""Workers find each other, and talk over connections that have proved who they are."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

from tests.transport.workers import Worker, by_sockets, run
from tfdp.communication.transport import PeerLost, flows
from tfdp.communication.transport.flows import Flow, Piece


def talk(worker: Worker) -> list:
    mesh = worker.mesh()
    found = []
    for peer in range(worker.num_workers):
        if peer == worker.rank:
            continue
        connection = mesh.connect(peer, "talk")
        connection.send(f"{worker.rank} to ".encode(), bytes([peer]))
        received = bytearray(6)
        connection.receive_into(received)
        found.append((connection.is_unix, bytes(received)))
    by_unix = worker.wire == "unix"
    assert mesh.share_host(range(worker.num_workers)) == by_unix
    mesh.close()
    return found


@by_sockets
def test_three_workers_talk_to_each_other(wire):
    for rank, found in enumerate(run(3, talk, wire=wire)):
        expected = [
            (wire == "unix", f"{peer} to ".encode() + bytes([rank]))
            for peer in range(3)
            if peer != rank
        ]
        assert found == expected


def exchange(worker: Worker, size: int) -> list[int]:
    mesh = worker.mesh()
    connection = mesh.connect(1 - worker.rank, "lane")
    sent = bytes([worker.rank + 1]) * size
    parts = [bytearray(size // 2), bytearray(size - size // 2)]
    order: list[int] = []
    incoming = [
        Piece(memoryview(part), then=functools.partial(order.append, index))
        for index, part in enumerate(parts)
    ]
    with connection:
        flows.run([Flow(connection, [Piece(memoryview(sent))], incoming)])
    assert b"".join(parts) == bytes([2 - worker.rank]) * size
    mesh.close()
    return order


@by_sockets
@pytest.mark.parametrize("size", [10, 12_000_000])
def test_both_ends_send_at_once_more_than_buffers_hold(wire, size):
    assert run(2, exchange, size, wire=wire) == [[0, 1]] * 2


def pass_a_file(worker: Worker) -> bytes:
    mesh = worker.mesh()
    connection = mesh.connect(1 - worker.rank, "lane")
    if worker.rank == 0:
        descriptor = os.memfd_create("test")
        os.write(descriptor, b"shared")
        connection.send_descriptor(descriptor)
        os.close(descriptor)
    else:
        descriptor = connection.receive_descriptor()
        text = os.pread(descriptor, 10, 0)
        os.close(descriptor)
    mesh.close()
    return b"shared" if worker.rank == 0 else text


def test_an_open_file_is_passed_to_a_worker_of_this_host():
    assert run(2, pass_a_file) == [b"shared", b"shared"]


def end_and_wait(worker: Worker, end: str) -> str:
    mesh = worker.mesh()
    connection = mesh.connect(1 - worker.rank, "lane")
    if worker.rank == 0:
        worker.wait_for("ready")
        if end == "close":
            mesh.close("the batch is bad")
            return ""
        os._exit(1)
    worker.say("ready")
    with pytest.raises(PeerLost) as caught:
        connection.receive_into(bytearray(1))
    with pytest.raises(PeerLost):
        connection.receive_into(bytearray(1))
    mesh.close()
    assert caught.value.rank == 0
    return caught.value.cause


@by_sockets
def test_a_worker_that_closes_says_why(wire):
    found = run(2, end_and_wait, "close", wire=wire)
    assert found == ["", "the batch is bad"]


@by_sockets
def test_a_worker_whose_peer_has_died_is_told(wire):
    found = run(2, end_and_wait, "die", wire=wire, lost=(0,))
    assert found == [None, "its connection was closed"]


def test_the_transport_does_not_load_tensorflow():
    code = "import sys, tfdp.communication.transport as _; "
    code += "sys.exit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
