"""Handshake in which both ends of a connection prove that they share a secret.

The listener sends the protocol's version, its service and a nonce. The dialer answers
with its own nonce, a claim, such as its rank, and an HMAC-SHA256 of all of these. The
listener then sends an HMAC with another role in it, so that a proof cannot be sent
back. The secret itself is never sent, and each message has a fixed length.

The steps of an end are a generator that does no I/O itself: it yields bytes to send, or
the largest number of bytes to receive next, and is sent the received bytes.
"""

from __future__ import annotations

import dataclasses
import hmac
import secrets
import socket
import time
from collections.abc import Generator
from typing import TypeAlias

VERSION = "2"
_PROTOCOL = b"tfdp/"
# First bytes of the JSON that launchers of an early tfdp send. It is recognized so that
# the error can report the different version.
_FIRST_PROTOCOL = b'{"tfdp"'
_HEAD_BYTES = 32
_NONCE_BYTES = _PROOF_BYTES = 32
GREETING_BYTES = _HEAD_BYTES + _NONCE_BYTES

# Flag of `send` on a connection that may have ended: `send` then only raises an error,
# and the process receives no SIGPIPE. Systems without the flag never send Python this
# signal.
NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class ConnectionFailed(Exception):
    """Error: the other end was not reached, or has ended the connection."""


class UnauthenticatedPeer(Exception):
    """Error: the other end has not proved that it belongs to the job.

    Args:
        reason: String, a clause. Defaults to the clause that it lacks the secret.
    """

    def __init__(self, reason: str = "it does not have this job's secret") -> None:
        super().__init__(reason)


class WrongService(UnauthenticatedPeer):
    """Error: the listener is another service, or has another protocol version.

    Args:
        received: Bytes, the first ones that it sent.
    """

    def __init__(self, received: bytes) -> None:
        super().__init__("it is another service")
        self.received = received

    @property
    def version(self) -> str | None:
        """String, the other end's protocol version if it differs, else `None`."""
        if self.received.startswith(_FIRST_PROTOCOL):
            return "0"
        if not self.received.startswith(_PROTOCOL):
            return None
        text = self.received[len(_PROTOCOL) : _HEAD_BYTES].decode(errors="replace")
        version = text.partition(" ")[0]
        return None if version == VERSION else version


@dataclasses.dataclass(frozen=True)
class Authenticated:
    """Result of a handshake: the dialer's claim and the keys of the connection.

    Args:
        claim: Bytes, from the dialer, such as its rank.
        outgoing: Bytes, the key of messages that this end sends.
        incoming: Bytes, the key of messages that this end receives.
    """

    claim: bytes
    outgoing: bytes = dataclasses.field(repr=False)
    incoming: bytes = dataclasses.field(repr=False)


# An end of a handshake is a generator that does no I/O itself, so both a blocking
# socket and the acceptor's thread can run it. It yields bytes to send, or the largest
# number of bytes to receive next.
Steps: TypeAlias = Generator[bytes | int, bytes | None, Authenticated]


def dial_steps(secret: str, service: str, claim: bytes = b"") -> Steps:
    """Return the dialer's side of the handshake, a generator that does no I/O itself.

    Args:
        secret: String, the secret of the job.
        service: String, name of the expected service, at most 25 characters.
        claim: Bytes, of the length that the service expects. Defaults to none.

    Returns:
        Generator, to run like that of `accept_steps`; it returns `Authenticated`.

    Raises:
        ConnectionFailed: If the other end has ended the connection.
        UnauthenticatedPeer: If the other end is another service, or has another secret.
    """
    greeting = yield from _receive(GREETING_BYTES, _head(service))
    nonce_and_claim = secrets.token_bytes(_NONCE_BYTES) + claim
    yield nonce_and_claim + _proof(secret, b"dials", greeting, nonce_and_claim)
    proof = yield from _receive(_PROOF_BYTES)
    if not hmac.compare_digest(
        proof, _proof(secret, b"listens", greeting, nonce_and_claim)
    ):
        raise UnauthenticatedPeer
    dials, listens = _keys(secret, greeting, nonce_and_claim)
    return Authenticated(claim, outgoing=dials, incoming=listens)


def accept_steps(secret: str, service: str, claim_bytes: int = 0) -> Steps:
    """Return the listener's side of the handshake, a generator that does no I/O itself.

    Args:
        secret: String, the secret of the job.
        service: String, name of the service of this end, at most 25 characters.
        claim_bytes: Int, length of the dialer's claim. Defaults to 0.

    Returns:
        Generator. It yields bytes, which the caller sends to the other end, or an int,
        the largest number of bytes to receive, which the caller then passes to the
        generator's `send`. It returns `Authenticated`: the dialer's claim and the keys
        of the connection.

    Raises:
        ConnectionFailed: If the other end has ended the connection.
        UnauthenticatedPeer: If the other end has another secret.
    """
    greeting = _head(service) + secrets.token_bytes(_NONCE_BYTES)
    yield greeting
    answer = yield from _receive(_NONCE_BYTES + claim_bytes + _PROOF_BYTES)
    nonce_and_claim, proof = answer[:-_PROOF_BYTES], answer[-_PROOF_BYTES:]
    if not hmac.compare_digest(
        proof, _proof(secret, b"dials", greeting, nonce_and_claim)
    ):
        # Zeros, which are not a valid proof, tell the dialer not to try again.
        yield bytes(_PROOF_BYTES)
        raise UnauthenticatedPeer
    yield _proof(secret, b"listens", greeting, nonce_and_claim)
    dials, listens = _keys(secret, greeting, nonce_and_claim)
    return Authenticated(
        nonce_and_claim[_NONCE_BYTES:], outgoing=listens, incoming=dials
    )


def authenticate(
    sock: socket.socket,
    steps: Steps,
    seconds: float,
    address: tuple | str | None = None,
) -> Authenticated:
    """Run a handshake over a socket; close the socket if the handshake fails.

    Afterwards the socket still has a timeout.

    Args:
        sock: `socket.socket`.
        steps: Generator, from `dial_steps`.
        seconds: Float, time limit of connecting and of the handshake together.
        address: Tuple or string for `socket.connect`, to connect to first. Defaults to
            `None`, for a connected socket.

    Returns:
        `Authenticated`.

    Raises:
        ConnectionFailed: If the other end was not reached, or has ended the connection.
        UnauthenticatedPeer: If the other end has not proved that it has the secret.
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


def reason_of(error: OSError) -> str:
    """Return the reason of a connection's failure: `"Connection refused"`."""
    # A timeout that Python raises has no error number, unlike one of the system, and so
    # no `strerror` that could be returned.
    if isinstance(error, TimeoutError) and not error.errno:
        return "no answer"
    return error.strerror or str(error)


def _head(service: str) -> bytes:
    """Return the first 32 bytes of the listener's greeting: version and service."""
    return (_PROTOCOL + f"{VERSION} {service}".encode()).ljust(_HEAD_BYTES)


def _receive(num_bytes: int, begin: bytes = b"") -> Generator[int, bytes | None, bytes]:
    """Receive `num_bytes` in the steps of a handshake, and return them.

    Raises `WrongService` unless they start with `begin`, and `ConnectionFailed` at the
    end of the connection.
    """
    received = b""
    while len(received) < num_bytes:
        part = yield num_bytes - len(received)
        if not part:
            raise ConnectionFailed("it closed the connection")
        received += part
        if not begin.startswith(received[: len(begin)]):
            raise WrongService(received)
    return received


def _proof(secret: str, role: bytes, greeting: bytes, nonce_and_claim: bytes) -> bytes:
    """Return the HMAC by which one end proves that it has the secret, 32 bytes.

    Args:
        secret: String, the secret of the job.
        role: Bytes that differ between the two ends.
        greeting: Bytes, the listener's first message.
        nonce_and_claim: Bytes, from the dialer.
    """
    return hmac.digest(secret.encode(), role + greeting + nonce_and_claim, "sha256")


def _keys(secret: str, greeting: bytes, nonce_and_claim: bytes) -> tuple[bytes, bytes]:
    """Return two HMAC keys: of the dialer's messages, and of the listener's.

    The arguments are those of `_proof`.
    """
    dials = _proof(secret, b"dial sends ", greeting, nonce_and_claim)
    return dials, _proof(secret, b"listen sends ", greeting, nonce_and_claim)
