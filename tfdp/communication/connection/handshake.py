"""Handshake by which both ends of a connection prove that they have one secret.

The end that listens greets with the protocol's version, its service and a nonce. The
end that dials answers with a nonce of its own, a claim, such as its rank, and an
HMAC-SHA256 of all of it. The end that listens then proves itself in the same way, in
another role, so that no proof can be sent back. The secret itself never travels, and
each message has a fixed length.

The steps of an end are a generator that does no input or output: it yields bytes to
send, or the largest number of bytes to receive next, and gets what was received.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import secrets
import socket
import time
from collections.abc import Generator
from typing import TypeAlias

VERSION = "1"
_PROTOCOL = b"tfdp/"
# With which launchers began before there was one protocol for all.
_FIRST_PROTOCOL = b'{"tfdp"'
_HEAD_BYTES = 32
_NONCE_BYTES = _PROOF_BYTES = 32
GREETING_BYTES = _HEAD_BYTES + _NONCE_BYTES


class ConnectionFailed(Exception):
    """The other end was not reached, or has ended the connection; the text says why."""


class UnauthenticatedPeer(Exception):
    """The other end has not proved that it belongs to the job.

    Args:
        reason: String. Defaults to that its secret is wrong.
    """

    def __init__(self, reason: str = "it has not the secret of this job") -> None:
        super().__init__(reason)


class WrongService(UnauthenticatedPeer):
    """What was dialled is something else, or speaks another version of the protocol.

    Args:
        received: Bytes, with which it began.
    """

    def __init__(self, received: bytes) -> None:
        super().__init__("it is another service")
        self.received = received

    @property
    def version(self) -> str | None:
        """String, the version if it is another one of this protocol, or `None`."""
        if self.received.startswith(_FIRST_PROTOCOL):
            return "0"
        if not self.received.startswith(_PROTOCOL):
            return None
        text = self.received[len(_PROTOCOL) : _HEAD_BYTES].decode(errors="replace")
        version = text.partition(" ")[0]
        return None if version == VERSION else version


@dataclasses.dataclass(frozen=True)
class Authenticated:
    """What a handshake has established.

    Args:
        claim: Bytes, what the end that dials says of itself.
        outgoing: Bytes, a key of this connection for what this end sends.
        incoming: Bytes, a key for what it receives.
    """

    claim: bytes
    outgoing: bytes = dataclasses.field(repr=False)
    incoming: bytes = dataclasses.field(repr=False)


Steps: TypeAlias = Generator[bytes | int, bytes | None, Authenticated]


def dial_steps(secret: str, service: str, claim: bytes = b"") -> Steps:
    """Return the steps of the end that dials.

    Args:
        secret: String, the job's.
        service: String, what is dialled, of at most 25 characters.
        claim: Bytes, of the length that the service expects. Defaults to none.

    Raises:
        ConnectionFailed: If the other end has ended the connection.
        UnauthenticatedPeer: If it is another service, or has another secret.
    """
    greeting = yield from _received(GREETING_BYTES, _head(service))
    own = secrets.token_bytes(_NONCE_BYTES) + claim
    yield own + _proof(secret, b"dials", greeting, own)
    proof = yield from _received(_PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"listens", greeting, own)):
        raise UnauthenticatedPeer
    dials, listens = _keys(secret, greeting, own)
    return Authenticated(claim, outgoing=dials, incoming=listens)


def accept_steps(secret: str, service: str, claim_bytes: int = 0) -> Steps:
    """Return the steps of the end that listens.

    Args:
        secret: String, the job's.
        service: String, what this end is, of at most 25 characters.
        claim_bytes: Int, the length of the other end's claim. Defaults to 0.

    Raises:
        ConnectionFailed: If the other end has ended the connection.
        UnauthenticatedPeer: If it has another secret.
    """
    greeting = _head(service) + secrets.token_bytes(_NONCE_BYTES)
    yield greeting
    answer = yield from _received(_NONCE_BYTES + claim_bytes + _PROOF_BYTES)
    own, proof = answer[:-_PROOF_BYTES], answer[-_PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"dials", greeting, own)):
        yield bytes(_PROOF_BYTES)  # no proof: the other end need not try again
        raise UnauthenticatedPeer
    yield _proof(secret, b"listens", greeting, own)
    dials, listens = _keys(secret, greeting, own)
    return Authenticated(own[_NONCE_BYTES:], outgoing=listens, incoming=dials)


def authenticate(
    sock: socket.socket,
    steps: Steps,
    seconds: float,
    address: tuple | str | None = None,
) -> Authenticated:
    """Run a handshake over a socket, which is closed if that fails.

    The socket is left with a time limit.

    Args:
        sock: `socket.socket`.
        steps: Generator, from `dial_steps`.
        seconds: Float, the longest that all of it may take.
        address: Tuple or string as `socket.connect` takes it, to connect to first.
            Defaults to `None`, for a socket that is connected.

    Raises:
        ConnectionFailed: If the other end was not reached, or has ended the connection.
        UnauthenticatedPeer: If it has not proved itself.
    """
    deadline = time.monotonic() + seconds
    received = None
    try:
        if address is not None:
            sock.settimeout(max(0.001, seconds))
            sock.connect(address)
        while True:
            step = steps.send(received)
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            received = None
            if isinstance(step, bytes):
                sock.sendall(step)
            else:
                received = sock.recv(step)
    except StopIteration as end:
        return end.value
    except (OSError, ConnectionFailed, UnauthenticatedPeer) as error:
        sock.close()
        if isinstance(error, OSError):
            raise ConnectionFailed(reason_of(error)) from error
        raise


async def authenticate_stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, steps: Steps
) -> Authenticated:
    """Run a handshake over the streams of a connection, see `authenticate`."""
    received = None
    try:
        while True:
            step = steps.send(received)
            received = None
            if isinstance(step, bytes):
                writer.write(step)
            else:
                received = await reader.read(step)
    except StopIteration as end:
        return end.value
    except OSError as error:
        raise ConnectionFailed(reason_of(error)) from error


def reason_of(error: OSError) -> str:
    """Say why a connection has failed."""
    if isinstance(error, TimeoutError) and not error.errno:  # of a time limit
        return "no answer"
    return error.strerror or str(error)


def _head(service: str) -> bytes:
    return (_PROTOCOL + f"{VERSION} {service}".encode()).ljust(_HEAD_BYTES)


def _received(
    num_bytes: int, begin: bytes = b""
) -> Generator[int, bytes | None, bytes]:
    """Receive a number of bytes, of which the first ones are given."""
    received = b""
    while len(received) < num_bytes:
        part = yield num_bytes - len(received)
        if not part:
            raise ConnectionFailed("it ended the connection")
        received += part
        if not begin.startswith(received[: len(begin)]):
            raise WrongService(received)
    return received


def _proof(secret: str, role: bytes, greeting: bytes, own: bytes) -> bytes:
    return hmac.digest(secret.encode(), role + greeting + own, "sha256")


def _keys(secret: str, greeting: bytes, own: bytes) -> tuple[bytes, bytes]:
    """Return the keys of what the end that dials sends, and of what the other does."""
    dials = _proof(secret, b"dial sends ", greeting, own)
    return dials, _proof(secret, b"listen sends ", greeting, own)
