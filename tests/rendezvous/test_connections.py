"""Server and members of a rendezvous on the loopback: proofs, garbage, time limits."""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import errno
import os
import re
import select
import socket
import threading
import time
from typing import Any

import pytest

from tests.harness.timing import wait_until, within
from tests.rendezvous.test_coordinator import HELLO
from tfdp.communication.connection import acceptor
from tfdp.launch.rendezvous import address as address_module
from tfdp.launch.rendezvous import node_0_connection as member_module
from tfdp.launch.rendezvous import server as server_module
from tfdp.launch.rendezvous.address import listen, own_address
from tfdp.launch.rendezvous.coordinator import Coordinator
from tfdp.launch.rendezvous.failure import RendezvousError
from tfdp.launch.rendezvous.link import (
    MAX_BYTES,
    MAX_REPORT_BYTES,
    HeartbeatConnection,
)
from tfdp.launch.rendezvous.node_0_connection import Node0Connection
from tfdp.launch.rendezvous.restarts import Restarts
from tfdp.launch.rendezvous.roster import Hello
from tfdp.launch.rendezvous.server import Server

SECRET = "0123456789abcdef"
DEADLINE_SECONDS = 20.0
GREETING = b"tfdp/2 rendezvous".ljust(32) + b"0" * 32


class Bed:
    """A server of a job of two nodes, and what connects to it."""

    def __init__(self) -> None:
        self.stack = contextlib.ExitStack()
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = own_address(listener)
        coordinator = Coordinator(HELLO, DEADLINE_SECONDS, Restarts)
        self.server = Server(listener, SECRET, coordinator)
        self.stack.callback(self.server.close)

    def member(
        self, secret: str = SECRET, seconds: float = 5.0, **said: Any
    ) -> Node0Connection:
        hello = dataclasses.replace(HELLO, **said)
        member = Node0Connection(self.address, secret, hello, seconds)
        self.stack.callback(member.close)
        return member

    def outsider(self) -> socket.socket:
        sock = socket.create_connection(self.address, DEADLINE_SECONDS)
        self.stack.callback(sock.close)
        return sock


@pytest.fixture
def bed() -> collections.abc.Iterator[Bed]:
    bed = Bed()
    with bed.stack:
        yield bed


def next_of(member: Node0Connection, kind: str) -> dict[str, Any]:
    """The next message of a kind."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        if (message := member.pop_message()) is not None:
            if message["type"] == kind:
                return message
            continue
        assert select.select([member], [], [], deadline - time.monotonic())[0], kind


def meet(bed: Bed) -> tuple[Node0Connection, Node0Connection]:
    """Two nodes, both of which were asked for their ports."""
    members = bed.member(), bed.member(node_rank=None)
    for member in members:
        next_of(member, "prepare")
    return members


def test_nodes_with_the_secret_meet_and_start_together(bed):
    members = meet(bed)
    for index, member in enumerate(members):
        member.send({"type": "ports", "attempt": 1, "ports": [index + 1, index + 11]})
    started = [next_of(member, "start") for member in members]
    assert started[0] == started[1]
    assert started[0]["nodes"] == [["127.0.0.1", [1, 11]], ["127.0.0.1", [2, 12]]]


def test_a_wrong_secret_is_told_at_once_and_the_job_waits_on(bed):
    member = bed.member(secret="f" * 16, node_rank=1)
    text = next_of(member, "refused")["text"]
    assert text.startswith("The secret of this node differs from that of node 0 at")
    meet(bed)


def test_a_node_that_does_not_fit_gets_its_sentence(bed):
    bed.member()
    text = next_of(bed.member(node_rank=1, version="9"), "refused")["text"]
    assert text == (
        "Node 0 has tfdp 1.0, host has tfdp 9. Install the same version on all "
        "machines."
    )


def answers(listener: socket.socket, reply: bytes) -> None:
    with contextlib.suppress(OSError):
        while True:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(reply)
                sock.settimeout(1.0)
                with contextlib.suppress(OSError):
                    sock.recv(4096)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "is not a rendezvous of `tfdp run`"),
        (b'{"a": 1}\n', "is not a rendezvous of `tfdp run`"),
        (b"x" * 2_000_000, "is not a rendezvous of `tfdp run`"),
        (GREETING.replace(b"/2", b"/3"), "another version .* protocol '3', here '2'"),
        (b"tfdp/2 hub".ljust(64), "is not a rendezvous of `tfdp run`"),
        (
            GREETING + bytes(32),
            "The secret of this node differs from that of node 0",
        ),
    ],
)
def test_who_listens_without_the_secret_is_not_believed(reply, words):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answers, args=(listener, reply), daemon=True).start()
        member = Node0Connection(own_address(listener), SECRET, HELLO, 0.5)
        with contextlib.closing(member):
            message = wait_until(member.pop_message, "a message", DEADLINE_SECONDS)
        listener.shutdown(socket.SHUT_RDWR)
    assert re.search(words, message["text"]), message


def test_a_node_0_that_is_not_there_is_waited_for_and_then_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = own_address(listener)
    with within(5, least=0.1):
        member = Node0Connection(address, SECRET, HELLO, 0.4, place="host0:29400")
        with contextlib.closing(member):
            text = next_of(member, "unreachable")["text"]
    assert text.startswith(
        "waited 0.4 s for node 0, and nothing answers at host0:29400 ("
    )


def test_a_node_may_come_before_node_0(monkeypatch):
    dial, num_attempts = Node0Connection._dial, 0

    def counted(member: Node0Connection) -> HeartbeatConnection:
        nonlocal num_attempts
        num_attempts += 1
        return dial(member)

    monkeypatch.setattr(Node0Connection, "_dial", counted)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = own_address(listener)
    with contextlib.ExitStack() as stack:
        late = Node0Connection(
            address, SECRET, dataclasses.replace(HELLO, node_rank=1), DEADLINE_SECONDS
        )
        stack.callback(late.close)
        wait_until(lambda: num_attempts > 1, "an attempt to fail", DEADLINE_SECONDS)
        coordinator = Coordinator(HELLO, DEADLINE_SECONDS, Restarts)
        server = Server(socket.create_server(address), SECRET, coordinator)
        stack.callback(server.close)
        first = Node0Connection(address, SECRET, HELLO, DEADLINE_SECONDS)
        stack.callback(first.close)
        assert next_of(late, "prepare")["node_rank"] == 1


GARBAGE = [
    b"\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"{}\n",
    b"0" * 64,
    GREETING,
    b"[" * 60_000 + b"\n",
    b"x" * 1_000_000,
    b"\xff\xfe\n" * 1000,
]


def test_garbage_does_no_harm(bed):
    random = [os.urandom(size) for size in (1, 100, 5000, 100_000)]
    for data in GARBAGE + random:
        sock = bed.outsider()
        with contextlib.suppress(OSError):
            sock.sendall(data)
    meet(bed)


def test_garbage_behind_a_true_proof_ends_that_connection_alone(bed, monkeypatch):
    monkeypatch.setattr(Hello, "to_message", lambda hello: {"type": "garbage"})
    next_of(bed.member(node_rank=1), "lost")
    monkeypatch.undo()
    meet(bed)


def test_connections_that_say_nothing_have_to_go(bed, monkeypatch):
    monkeypatch.setattr(acceptor, "_PROOF_SECONDS", 0.2)
    silent = [bed.outsider() for _ in range(20)]
    half = bed.outsider()
    half.sendall(b"0" * 10)
    for sock in [*silent, half]:
        sock.settimeout(DEADLINE_SECONDS)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(4096):
                pass
    meet(bed)


def test_a_flood_of_outsiders_does_not_keep_nodes_out(bed, monkeypatch):
    monkeypatch.setattr(acceptor, "_MAX_UNAUTHENTICATED", 16)
    is_over = threading.Event()
    num_made = 0

    def flood() -> None:
        nonlocal num_made
        socks: collections.deque[socket.socket] = collections.deque(maxlen=100)
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                socks.append(socket.create_connection(bed.address, 1.0))
                num_made += 1
                socks[-1].send(b"x" * 100)
            time.sleep(0.001)
        for sock in socks:
            sock.close()

    floods = [threading.Thread(target=flood) for _ in range(2)]
    for thread in floods:
        thread.start()
    try:
        wait_until(lambda: num_made > 100, "a flood", DEADLINE_SECONDS)
        members = [
            bed.member(seconds=DEADLINE_SECONDS),
            bed.member(seconds=DEADLINE_SECONDS, node_rank=1),
        ]
        for member in members:
            next_of(member, "prepare")
    finally:
        is_over.set()
        for thread in floods:
            thread.join()


@contextlib.contextmanager
def between(
    bed: Bed, change: collections.abc.Callable[[bytes], bytes]
) -> collections.abc.Iterator[Node0Connection]:
    """Node 1, and somebody on its way to node 0 who changes what passes."""

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                target.sendall(change(data))
            target.shutdown(socket.SHUT_WR)

    def pass_on(middle: socket.socket) -> None:
        with contextlib.suppress(OSError):
            near, _ = middle.accept()
            far = socket.create_connection(bed.address)
            for pair in ((near, far), (far, near)):
                threading.Thread(target=copy, args=pair, daemon=True).start()

    hello = dataclasses.replace(HELLO, node_rank=1)
    with socket.create_server(("127.0.0.1", 0)) as middle:
        threading.Thread(target=pass_on, args=(middle,), daemon=True).start()
        member = Node0Connection(own_address(middle), SECRET, hello, DEADLINE_SECONDS)
        with contextlib.closing(member):
            yield member


def test_the_secret_never_travels(bed):
    seen = bytearray()

    def keep(data: bytes) -> bytes:
        seen.extend(data)
        return data

    bed.member()
    with between(bed, keep) as member:
        next_of(member, "prepare")
    assert GREETING[:32] in seen
    assert b"hello" in seen
    assert SECRET.encode() not in seen
    assert SECRET.encode().hex().encode() not in seen


def test_who_alters_a_message_on_the_way_ends_the_connection(bed):
    def alter(data: bytes) -> bytes:
        return data.replace(b'"num_workers":2', b'"num_workers":3')

    with between(bed, alter) as member:
        assert "has closed its connection" in next_of(member, "lost")["text"]
    meet(bed)


def test_a_node_0_that_has_gone_is_known_at_once(bed):
    _, second = meet(bed)
    bed.server.close()
    assert "has closed its connection" in next_of(second, "lost")["text"]


def make_impatient(monkeypatch, thread: str) -> None:
    """Let the end in a thread of this name wait for two seconds, and none beat."""
    tick = HeartbeatConnection.tick

    def impatient(link: HeartbeatConnection) -> None:
        if threading.current_thread().name == thread:
            link.most_silent_seconds = 2.0
        tick(link)

    monkeypatch.setattr(HeartbeatConnection, "tick", impatient)
    monkeypatch.setattr("tfdp.launch.rendezvous.link.BEAT_SECONDS", 1000.0)


def test_a_node_0_that_says_nothing_is_given_up(bed, monkeypatch):
    make_impatient(monkeypatch, "tfdp connection to node 0")
    assert "has not answered for 2 s" in next_of(bed.member(), "lost")["text"]


def test_a_node_that_says_nothing_is_given_up(bed, monkeypatch):
    members = meet(bed)
    for port, member in enumerate(members, start=1):
        member.send({"type": "ports", "attempt": 1, "ports": [port, port + 10]})
    next_of(members[0], "start")
    make_impatient(monkeypatch, "tfdp acceptor rendezvous")

    def stop_order() -> dict[str, Any] | None:
        members[0].send({"type": "still here"})
        message = members[0].pop_message()
        return message if message and message["type"] == "stop" else None

    text = wait_until(stop_order, "an order to stop", DEADLINE_SECONDS)["text"]
    assert "node 1 (host, 127.0.0.1) was lost: it has not answered for 2 s; " in text


def test_a_node_that_does_not_describe_itself_is_given_up(bed, monkeypatch):
    monkeypatch.setattr(server_module, "_HELLO_SECONDS", 0.5)
    monkeypatch.setattr("tfdp.launch.rendezvous.link.BEAT_SECONDS", 1000.0)
    monkeypatch.setattr(Hello, "to_message", lambda hello: {"type": "beat"})
    with within(DEADLINE_SECONDS / 2):
        text = next_of(bed.member(node_rank=1), "lost")["text"]
    assert "has closed its connection" in text
    monkeypatch.undo()
    meet(bed)


def test_a_message_that_would_be_too_long_is_not_written(bed):
    first, second = meet(bed)
    with pytest.raises(ValueError, match="too long"):
        first.send({"text": "x" * MAX_BYTES})
    # One that only node 0 may send ends the connection of another node.
    second.send({"text": "x" * MAX_REPORT_BYTES})
    assert "has closed its connection" in next_of(second, "lost")["text"]
    first.send({"type": "ports", "attempt": 1, "ports": [1, 11]})
    meet_again = bed.member(node_rank=1)
    assert next_of(meet_again, "prepare")["attempt"] == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_who_waits_hears_of_an_error_that_nobody_has_foreseen(bed, monkeypatch):
    def broken(sock: socket.socket, *_: Any) -> None:
        sock.close()
        raise ZeroDivisionError

    monkeypatch.setattr(member_module, "authenticate", broken)
    member = bed.member()
    assert "the connection to node 0 at" in next_of(member, "lost")["text"]
    member._thread.join(DEADLINE_SECONDS)


def full_of(link: HeartbeatConnection) -> None:
    """Send more than the kernel holds on a connection whose other end does not read."""
    for _ in range(500):
        link.send({"type": "notice", "text": "x" * 60_000})
    assert link.has_output


def test_a_member_ends_though_node_0_reads_nothing(bed, monkeypatch):
    monkeypatch.setattr(Server, "_read_link", lambda server, link: True)
    member = bed.member()
    full_of(wait_until(lambda: member._link, "a connection", DEADLINE_SECONDS))
    with within(5.0, least=1.9):
        member.close()


def test_node_0_ends_though_a_node_reads_nothing(bed, monkeypatch):
    is_deaf = threading.Event()
    proceed = Node0Connection._exchange_messages

    def deaf(member: Node0Connection, link: HeartbeatConnection) -> None:
        time.sleep(0.05) if is_deaf.is_set() else proceed(member, link)

    monkeypatch.setattr(Node0Connection, "_exchange_messages", deaf)
    meet(bed)
    is_deaf.set()
    time.sleep(0.1)
    full_of(list(bed.server._links)[1])
    with within(5.0, least=1.9):
        bed.server.close()


def test_a_member_that_still_connects_ends_at_once():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        member = Node0Connection(own_address(silent), SECRET, HELLO, DEADLINE_SECONDS)
        with within(DEADLINE_SECONDS / 2):
            time.sleep(0.2)
            member.close()


def test_what_is_sent_before_the_end_arrives():
    for _ in range(5):
        bed = Bed()
        with bed.stack:
            first, second = meet(bed)
            leave = {"type": "leaving", "attempt": 1, "why": "x", "code": 130}
            first.send({**leave, "signal": 2})
            first.close()
            assert next_of(second, "end")["code"] == 130


def test_only_the_machine_of_the_address_listens(monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    assert listen("192.0.2.1", 29555, is_node_0=False) is None  # of documentation
    with listen("127.0.0.1", 0, is_node_0=False) as listener:
        host, port = own_address(listener)
        assert host == "127.0.0.1"
        assert listen("127.0.0.1", port, is_node_0=False) is None
        with pytest.raises(
            Exception, match=rf"Node 0 cannot open port {port}: another"
        ):
            listen("127.0.0.1", port, is_node_0=True)
    # Only a taken port may be that of another node here.
    monkeypatch.setattr(address_module, "listen_at", refuse)
    with pytest.raises(RendezvousError, match="open port 80: Permission denied"):
        listen("127.0.0.1", 80, is_node_0=False)
    monkeypatch.undo()
    # What is on no interface may lead here all the same, if the user says so.
    with listen("192.0.2.1", port, is_node_0=True) as listener:
        assert own_address(listener) == ("127.0.0.1", port)


def test_a_name_that_only_this_machine_understands_is_opened_to_others(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with listen("myself", 0, is_node_0=False) as listener:
        assert listener.getsockname()[0] in ("::", "0.0.0.0")


def test_a_name_that_nobody_knows_is_told():
    with pytest.raises(
        RendezvousError, match=r"does not resolve here .* Received: no\.such"
    ):
        listen("no.such.host.invalid", 29400, is_node_0=False)
    # What no resolver is asked for, since it is no name.
    for host in ("a..b", "a" * 64):
        with pytest.raises(
            RendezvousError, match=rf"not a valid host name.*Received: {host}"
        ):
            listen(host, 29400, is_node_0=False)


def test_nothing_waits_longer_than_the_handshake(monkeypatch):
    """A port that accepts and says nothing."""
    monkeypatch.setattr(member_module, "_HANDSHAKE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        member = Node0Connection(own_address(listener), SECRET, HELLO, 0.5)
        with contextlib.closing(member):
            assert "(no answer)" in next_of(member, "unreachable")["text"]
