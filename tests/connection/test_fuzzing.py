"""The store's host is fuzzed by connections that do not authenticate themselves.

A case changes the answer of a dialer that has the secret, or sends the answer of an
earlier connection; or it changes the first message after a valid handshake.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.harness.timing import wait_until
from tests.store.clusters import of_rank
from tfdp.communication.cluster import Cluster, free_ports
from tfdp.communication.cluster.address import split_address
from tfdp.communication.connection.handshake import GREETING_BYTES, dial_steps
from tfdp.communication.connection.messages import MessageAuthenticator, encode
from tfdp.communication.store import Membership
from tfdp.communication.store.admission import CLAIM, SERVICE, Admission

NUM_CASES = 500
SECONDS = 10.0
PAUSE_SECONDS = 0.002
# A member's first request, as `MessageConnection` sends it: length, HMAC, text.
HEAD = struct.Struct("!I32s")
REQUEST = encode({"id": 1, "oldest": 1, "do": "put", "key": "fuzzed", "text": "x"})
# Start of the proof in the answer of a handshake, which follows a nonce and the claim.
PROOF = 32 + CLAIM.size


def flip(chance: random.Random, sent: bytes, begin: int = 0) -> list[bytes]:
    changed = bytearray(sent)
    for _ in range(chance.randint(1, 8)):
        changed[chance.randrange(begin, len(sent))] ^= 1 << chance.randrange(8)
    return [bytes(changed)] if changed != sent else flip(chance, sent, begin)


def cut(chance: random.Random, sent: bytes) -> list[bytes]:
    return [sent[: chance.randrange(len(sent))]]


def repeat(chance: random.Random, sent: bytes) -> list[bytes]:
    begin, end = sorted(chance.sample(range(len(sent) + 1), 2))
    return [sent[:end] + sent[begin:end] * chance.randint(1, 50) + sent[end:]]


def pause(chance: random.Random, sent: bytes) -> list[bytes]:
    """Sends a changed answer in pieces."""
    (changed,) = flip(chance, sent)
    at = sorted(chance.sample(range(1, len(sent)), 3))
    return [changed[a:b] for a, b in zip([0, *at], [*at, len(sent)], strict=True)]


def change_proof(chance: random.Random, sent: bytes) -> list[bytes]:
    return flip(chance, sent, PROOF)


HANDSHAKES: list[Callable[[random.Random, bytes], list[bytes]]]
HANDSHAKES = [flip, cut, repeat, pause, change_proof]


def message(chance: random.Random, key: bytes) -> bytes:
    """A first message with a wrong length, HMAC or text, or only a part of its head."""
    mac = MessageAuthenticator(key).next_mac(REQUEST)
    size = len(REQUEST)
    match chance.randrange(4):
        case 0:
            length = chance.choice([0, size - 1, 1 << 27, 0xFFFFFFFF, size + 5])
            return HEAD.pack(length, mac) + REQUEST + b"}" * 8
        case 1:
            return HEAD.pack(size, *flip(chance, mac)) + REQUEST
        case 2:
            return HEAD.pack(size, mac) + flip(chance, REQUEST)[0]
        case _:
            return HEAD.pack(size, mac)[: chance.randrange(HEAD.size)]


@pytest.fixture
def host() -> Iterator[Membership]:
    """The host of a job of two workers by TCP, which waits for the other worker."""
    workers = tuple(f"127.0.0.1:{port}" for port in free_ports(2))
    member = Membership(Cluster(workers, secret="0123456789abcdef"))
    yield member
    member.leave()


def attack(member: Membership, chance: random.Random, recorded: list[bytes]) -> None:
    """One connection, which sends something wrong and reads the answers."""
    admission = Admission.of(member.cluster)
    steps = dial_steps(admission.secret, SERVICE, CLAIM.pack(1, 0, b"another worker"))
    next(steps)
    target = split_address(member.cluster.workers[0])
    with socket.create_connection(target, SECONDS) as sock:
        greeting = sock.recv(GREETING_BYTES, socket.MSG_WAITALL)
        answer = steps.send(greeting)
        assert isinstance(answer, bytes)
        if is_handshake := chance.random() < 0.7:
            pieces = chance.choice(HANDSHAKES)(chance, answer)
            if recorded and chance.random() < 0.1:
                pieces = [chance.choice(recorded)]
        else:
            sock.sendall(answer)
            next(steps)
            with pytest.raises(StopIteration) as end:
                steps.send(sock.recv(32, socket.MSG_WAITALL))
            pieces = [message(chance, end.value.value.outgoing)]
        with contextlib.suppress(OSError):  # closed before all is sent
            for number, piece in enumerate(pieces):
                time.sleep(PAUSE_SECONDS * bool(number))
                sock.sendall(piece)
            sock.shutdown(socket.SHUT_WR)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while part := sock.recv(4096):
                received += part
        recorded.append(answer)
        # The answer itself is valid if only the bytes that follow it are wrong.
        if is_handshake and b"".join(pieces)[: len(answer)] != answer:
            assert not any(received)


def resources() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/dev/fd"))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full)])
def test_after_mutated_handshakes_a_member_joins_and_nothing_is_left(
    host: Membership, seed: int
):
    before, chance = resources(), random.Random(seed)
    recorded: list[bytes] = []
    for _ in range(NUM_CASES):
        attack(host, chance, recorded)
    wait_until(lambda: resources() == before, "the end of the connections", SECONDS)
    second = Membership(of_rank(host.cluster, 1))
    try:
        joins = threading.Thread(target=host.join, args=(SECONDS,))
        joins.start()
        second.join(SECONDS)
        joins.join(SECONDS)
        second.store.put("key", "text")
        assert host.store.get("key", SECONDS) == "text"
        with pytest.raises(TimeoutError):
            host.store.get("fuzzed", 0.01)
    finally:
        second.leave()
