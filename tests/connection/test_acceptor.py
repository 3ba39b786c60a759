"""The thread that accepts connections: limits on those that prove nothing."""

from __future__ import annotations

import collections.abc
import contextlib
import errno
import os
import queue
import socket
import threading
import time

import pytest

from tests.harness.timing import wait_until, within
from tfdp.communication.connection import acceptor
from tfdp.communication.connection.acceptor import Acceptor
from tfdp.communication.connection.handshake import (
    Authenticated,
    ConnectionFailed,
    UnauthenticatedPeer,
    authenticate,
    dial_steps,
)

SECRET = "0123456789abcdef"
DEADLINE_SECONDS = 20.0


class Bed:
    """An acceptor, what it has accepted and what it has said."""

    def __init__(self, listening: socket.socket | None = None) -> None:
        self.stack = contextlib.ExitStack()
        self.listening = listening or socket.create_server(("127.0.0.1", 0))
        self.address = self.listening.getsockname()
        self.accepted: queue.Queue[socket.socket] = queue.Queue()
        self.lacks: list[str] = []
        self.refused: list[str] = []
        self.acceptor = Acceptor(
            SECRET,
            "test",
            [self.listening],
            self._take,
            lacks_files=self.lacks.append,
            log=lambda text, *values: self.refused.append(text % values),
        )
        self.stack.callback(self.acceptor.close)

    def _take(self, sock: socket.socket, authenticated: Authenticated) -> None:
        assert authenticated.claim == b""
        self.stack.callback(sock.close)
        self.accepted.put(sock)

    def outsider(self) -> socket.socket:
        sock = socket.create_connection(self.address, DEADLINE_SECONDS)
        self.stack.callback(sock.close)
        return sock

    def dial(self, secret: str = SECRET) -> socket.socket:
        sock = self.outsider()
        authenticate(sock, dial_steps(secret, "test"), DEADLINE_SECONDS)
        return sock

    def dial_until_in(self) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            try:
                self.dial()
                return
            except ConnectionFailed:  # closed in place of one that says nothing
                assert time.monotonic() < deadline


@pytest.fixture
def bed() -> collections.abc.Iterator[Bed]:
    bed = Bed()
    with bed.stack:
        yield bed


def read_to_end(sock: socket.socket) -> None:
    sock.settimeout(DEADLINE_SECONDS)
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(4096):
            pass


def test_both_ends_have_a_connection_that_carries_what_follows(bed):
    dialled = bed.dial()
    dialled.sendall(b"first")
    accepted = bed.accepted.get(timeout=DEADLINE_SECONDS)
    accepted.setblocking(True)
    assert accepted.recv(5) == b"first"


def test_a_wrong_secret_is_known_at_once(bed):
    with within(DEADLINE_SECONDS / 2), pytest.raises(UnauthenticatedPeer):
        bed.dial("another secret")
    bed.dial()
    bed.accepted.get(timeout=DEADLINE_SECONDS)
    assert bed.accepted.empty()
    assert "it does not have this job's secret" in bed.refused[0]


def test_silent_and_slow_ends_are_closed_after_one_deadline(bed, monkeypatch):
    monkeypatch.setattr(acceptor, "_PROOF_SECONDS", 0.5)
    silent, slow = bed.outsider(), bed.outsider()
    begin = time.monotonic()
    with contextlib.suppress(OSError):
        while time.monotonic() - begin < DEADLINE_SECONDS:
            slow.send(b"x")  # each byte is no respite
            time.sleep(0.1)
    assert time.monotonic() - begin < DEADLINE_SECONDS / 2
    read_to_end(silent)
    bed.dial()


def test_a_flood_of_silent_ends_keeps_nobody_out(bed, monkeypatch):
    monkeypatch.setattr(acceptor, "_MAX_UNAUTHENTICATED", 8)
    for _ in range(40):
        bed.outsider()
    for _ in range(2):
        bed.dial_until_in()
    assert any("too many connections" in line for line in bed.refused)
    assert len(bed.refused) < 20


def test_many_workers_that_come_at_once_and_answer_late_all_get_in(bed, monkeypatch):
    monkeypatch.setattr(acceptor, "_MAX_UNAUTHENTICATED", 8)

    def dial() -> None:
        while True:
            steps = dial_steps(SECRET, "test")
            with contextlib.suppress(ConnectionFailed, OSError):
                sock = bed.outsider()
                sock.settimeout(DEADLINE_SECONDS)
                greeting = sock.recv(next(steps))
                time.sleep(0.05)
                sock.sendall(steps.send(greeting))
                authenticate(sock, steps, DEADLINE_SECONDS)
                return

    workers = [threading.Thread(target=dial, daemon=True) for _ in range(60)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(DEADLINE_SECONDS)
        assert not worker.is_alive()


def test_garbage_harms_nobody(bed):
    request = b"GET / HTTP/1.1\r\n\r\n" * 1000
    for data in (request, b"\xff" * 64, b"\0" * 1_000_000, b""):
        with contextlib.suppress(OSError), bed.outsider() as sock:
            sock.sendall(data)
    bed.dial()


def test_an_acceptor_closes_all_that_it_has_open(bed):
    outsider = bed.outsider()
    ours, theirs = socket.socketpair()
    bed.acceptor.watch(ours, lambda: bool(ours.recv(10)))
    bed.dial()
    bed.acceptor.close()
    for sock in (outsider, theirs):
        read_to_end(sock)
    assert (ours.fileno(), bed.listening.fileno()) == (-1, -1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(bed.address, DEADLINE_SECONDS)


def test_what_is_watched_is_read_until_its_end(bed):
    ours, theirs = socket.socketpair()
    received: queue.Queue[bytes] = queue.Queue()

    def read() -> bool:
        received.put(data := ours.recv(10))
        return bool(data)

    bed.acceptor.watch(ours, read)
    theirs.sendall(b"one")
    assert received.get(timeout=DEADLINE_SECONDS) == b"one"
    theirs.close()
    assert received.get(timeout=DEADLINE_SECONDS) == b""


def test_a_forked_process_keeps_nothing_open(bed):
    outsider, dialled = bed.outsider(), bed.dial()
    accepted = bed.accepted.get(timeout=DEADLINE_SECONDS)
    begin = time.monotonic()
    if (pid := os.fork()) == 0:
        time.sleep(DEADLINE_SECONDS)
        os._exit(0)
    try:
        accepted.close()
        bed.acceptor.close()
        for sock in (outsider, dialled):
            read_to_end(sock)
        assert time.monotonic() - begin < DEADLINE_SECONDS / 2
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


class Full(socket.socket):
    """Listening socket of a process that may open no more files."""

    is_full = True

    def accept(self):
        if self.is_full:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_a_lack_of_files_is_told_and_waited_for():
    server = Full()
    server.bind(("127.0.0.1", 0))
    server.listen()
    bed = Bed(server)
    with bed.stack:
        outsider = bed.outsider()
        wait_until(lambda: bed.lacks, "a lack of files", DEADLINE_SECONDS)
        server.is_full = False
        authenticate(outsider, dial_steps(SECRET, "test"), DEADLINE_SECONDS)
    assert "cannot open more files" in bed.lacks[0]


def test_an_end_that_says_nothing_fails_those_who_dial():
    with socket.create_server(("127.0.0.1", 0)) as server:
        sock = socket.socket()
        steps = dial_steps(SECRET, "test")
        with sock, pytest.raises(ConnectionFailed, match="no answer"):
            authenticate(sock, steps, 0.2, server.getsockname())
        assert sock.fileno() == -1


def test_a_slow_end_has_no_more_time_than_a_silent_one():
    ours, theirs = socket.socketpair()
    is_over = threading.Event()

    def drip() -> None:
        for byte in b"tfdp/2 test".ljust(32):
            if is_over.wait(0.1):
                return
            with contextlib.suppress(BrokenPipeError):  # given up in this moment
                theirs.send(bytes([byte]))

    thread = threading.Thread(target=drip)
    thread.start()
    with ours, theirs:
        with within(2.0), pytest.raises(ConnectionFailed, match="no answer"):
            authenticate(ours, dial_steps(SECRET, "test"), 0.5)
        is_over.set()
        thread.join()
