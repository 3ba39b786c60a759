"""Messages over a connection: limited, and sealed against who stands between."""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import struct
import threading
import time
import types
from collections.abc import Iterator

import pytest

from tfdp.communication.connection.handshake import Authenticated, ConnectionFailed
from tfdp.communication.connection.messages import (
    MessageAuthenticator,
    MessageConnection,
    encode,
)

MESSAGE = {"type": "start", "nodes": [["10.0.0.1", [1, 2]]], "text": "ü"}
HEAD_BYTES = 4 + 32
MAX_BYTES = 1 << 20


class Between:
    """A connection of two ends, and somebody between them who passes on the bytes."""

    def __init__(self, near_keys: tuple[bytes, bytes] = (b"one", b"two")) -> None:
        ends = [socket.socketpair() for _ in range(2)]
        (self.near_sock, self.out), (self.into, self.far_sock) = ends
        self.near = MessageConnection(self.near_sock, Authenticated(b"", *near_keys))
        self.far = MessageConnection(
            self.far_sock, Authenticated(b"", b"two", b"one"), MAX_BYTES
        )

    def sealed(self, text: bytes) -> bytes:
        """What the near end sends of a text."""
        assert self.near.send_encoded(text)
        return self.out.recv(1 << 16)

    def received(self, *parts: bytes) -> list[dict]:
        """What the far end makes of bytes."""
        found = []
        for part in parts:
            self.into.sendall(part)
            found += self.far.receive()
        return found

    def close(self) -> None:
        for sock in (self.near_sock, self.out, self.into, self.far_sock):
            sock.close()


@pytest.fixture
def between() -> Iterator[Between]:
    with contextlib.closing(Between()) as between:
        yield between


def test_a_message_comes_back_as_it_was_and_the_key_of_each_direction_counts(between):
    assert between.received(between.sealed(encode(MESSAGE))) == [MESSAGE]
    between.far.send(MESSAGE)
    between.out.sendall(between.into.recv(1 << 16))
    assert between.near.receive(waits=True) == [MESSAGE]
    assert between.near.receive() == []


NO_MESSAGES = (
    *(b"", b"\n", b"GET / HTTP/1.1\r\n", b"[1]\n", b"1\n", b'"x"\n', b"\xff\n"),
    *(b"[" * 10_000, b'{"a":' * 10_000),
)


@pytest.mark.parametrize("text", NO_MESSAGES, ids=lambda text: repr(text[:8]))
def test_what_is_no_object_of_json_ends_the_connection(between, text: bytes):
    with pytest.raises(ConnectionFailed, match="has sent an invalid message"):
        between.received(between.sealed(text))


def test_a_message_that_is_longer_than_the_limit_is_not_waited_for(between):
    text = b'{"a":"' + b"x" * (MAX_BYTES - 8) + b'"}'
    threading.Thread(target=between.near.send_encoded, args=(text,)).start()
    found = []
    while not found:
        found = between.received(between.out.recv(1 << 16))
    assert found == [json.loads(text)]
    begin = struct.pack("!I", MAX_BYTES + 1) + bytes(32)
    with pytest.raises(ConnectionFailed, match="has sent an invalid message"):
        between.received(begin)


@pytest.mark.parametrize(
    "changed",
    [
        lambda one, two: one.replace(b"one", b"two"),
        lambda one, two: two,  # reordered, or the first one left out
        lambda one, two: one + one,  # repeated
        lambda one, two: one[:4] + bytes(32) + one[HEAD_BYTES:],
        lambda one, two: one[:4] + two[4:HEAD_BYTES] + one[HEAD_BYTES:],
        lambda one, two: struct.pack("!I", 2) + one[4:],
        lambda one, two: one[:-1] + b" ",
        lambda one, two: bytes(HEAD_BYTES),
        lambda one, two: b"\xff" * HEAD_BYTES,
    ],
)
def test_an_altered_repeated_or_reordered_message_breaks_the_seal(between, changed):
    sent = [between.sealed(encode({"type": name})) for name in ("one", "two")]
    with pytest.raises(ConnectionFailed, match="has sent an invalid message"):
        between.received(changed(*sent))


def test_a_message_of_another_key_or_sent_back_breaks_the_seal():
    invalid = pytest.raises(ConnectionFailed, match="has sent an invalid message")
    with contextlib.closing(Between((b"another", b"two"))) as between, invalid:
        between.received(between.sealed(encode(MESSAGE)))
    with contextlib.closing(Between()) as between, invalid:
        between.out.sendall(between.sealed(encode(MESSAGE)))
        between.near.receive()


@pytest.mark.parametrize("num_bytes", [0, 1, 32, 64])
def test_a_seal_is_the_hmac_of_the_number_and_the_text(num_bytes: int):
    key = bytes(range(num_bytes))
    seal = MessageAuthenticator(key)
    for number, text in enumerate([b"one", b"", b"three" * 1000]):
        expected = hmac.digest(key, struct.pack("!Q", number) + text, "sha256")
        assert seal.next_mac(text) == expected


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_messages_are_found_in_a_stream_of_any_parts(between, step: int):
    sent = [{"id": number, "text": "é" * number} for number in range(50)]
    stream = b"".join(between.sealed(encode(message)) for message in sent)
    parts = [stream[i : i + step] for i in range(0, len(stream), step)]
    assert between.received(*parts) == sent


def test_what_a_socket_does_not_take_is_sent_later_and_in_order(between):
    between.near_sock.setblocking(False)
    sent = [{"id": number, "text": "x" * 50_000} for number in range(20)]
    for message in sent:
        between.near.send(message)
    assert between.near.has_output
    found: list[dict] = []
    while len(found) < len(sent):
        found += between.received(between.out.recv(1 << 16))
        between.near.proceed()
    assert found == sent
    assert not between.near.has_output


def test_threads_that_send_at_once_do_not_mix_their_messages(between):
    numbers = range(200)

    def send(name: str) -> None:
        for number in numbers:
            between.near.send({"name": name, "number": number})

    threads = [threading.Thread(target=send, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    found: list[dict] = []
    while len(found) < 3 * len(numbers):
        found += between.received(between.out.recv(1 << 16))
    for name in "abc":
        assert [m["number"] for m in found if m["name"] == name] == list(numbers)


def test_the_end_of_a_connection_shows_when_it_is_read_or_written(between):
    between.into.close()
    with pytest.raises(ConnectionFailed, match="has closed its connection"):
        between.far.receive()
    deadline = time.monotonic() + 5.0
    while between.far.send_encoded(b"{}"):
        assert time.monotonic() < deadline
    assert not between.far.has_output


def test_a_connection_is_not_watched_for_output_that_another_message_took_along():
    waits: list[bool] = []
    acceptor = types.SimpleNamespace(
        watch_output=lambda connection, **given: waits.append(given["waits"])
    )
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        far.settimeout(5)
        keys = Authenticated(b"", b"one", b"two")
        connection = MessageConnection(near, keys, acceptor=acceptor)
        connection.send({"text": "x" * (4 << 20)})
        assert waits == [True]
        while connection.has_output:
            far.recv(1 << 20)
            connection.send({})
        connection.proceed()
    assert waits[-1] is False
