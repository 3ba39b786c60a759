"""The end of a handshake that dials."""

from __future__ import annotations

import os
import socket
import time

from tfdp.transport import handshake

# After which a busy or silent end is tried again.
_ATTEMPT_SECONDS = 10.0


class Failed(Exception):
    """The other end was not reached, or has ended the connection."""


class WrongSecret(Exception):
    """The other end does not belong to this job."""


def dial(
    sock: socket.socket,
    address: tuple | str,
    claim: handshake.Claim,
    secret: bytes,
    timeout_seconds: float,
) -> None:
    """Connect a socket to another worker, and prove to each other who they are.

    Args:
        sock: `socket.socket`, not connected yet.
        address: Tuple or string, as `socket.connect` takes it.
        claim: `Claim` of this worker.
        secret: Bytes, the job's.
        timeout_seconds: Float, the longest wait.

    Raises:
        Failed: If the other end was not reached in time, or has ended the connection.
        WrongSecret: If it does not belong to this job.
    """
    deadline = time.monotonic() + min(timeout_seconds, _ATTEMPT_SECONDS)
    try:
        sock.settimeout(_left(deadline))
        sock.connect(address)
        greeting = _received(sock, handshake.GREETING_BYTES, deadline)
        if not handshake.is_greeting(greeting):
            raise WrongSecret
        sock.sendall(handshake.signed(claim, greeting, secret))
        proof = _received(sock, handshake.WELCOME_BYTES, deadline)
    except OSError as error:
        # A time-out of Python's own has no number, and another text.
        raise Failed(os.strerror(error.errno) if error.errno else "no answer") from None
    if not handshake.is_welcome(proof, claim, greeting, secret):
        raise WrongSecret


def _received(sock: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Receive a message of a fixed length."""
    received = b""
    while len(received) < num_bytes:
        sock.settimeout(_left(deadline))
        part = sock.recv(num_bytes - len(received))
        if not part:
            raise Failed("it ended the connection, as to one that has not its secret")
        received += part
    return received


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
