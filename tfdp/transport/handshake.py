"""Proof of both ends of a connection that they have the job's secret.

The worker that accepts greets with a nonce. The one that dials answers with a claim:
who it is, whom it dials, on which lane, a nonce of its own, and an HMAC-SHA256 of all
of it. The other one welcomes it with an HMAC of both nonces. All three have a fixed
length, and nothing else is read before.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import secrets
import struct

_MAGIC = b"tfdp/tr1"
_NONCE_BYTES = 32
_CLAIM = struct.Struct("!32sII32s")
_PROOF_BYTES = 32
GREETING_BYTES = len(_MAGIC) + _NONCE_BYTES
CLAIM_BYTES = _CLAIM.size + _PROOF_BYTES
WELCOME_BYTES = _PROOF_BYTES


class HandshakeError(Exception):
    """What was received proves nothing."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a worker that dials says.

    Args:
        nonce: Bytes, drawn at random.
        rank: Int, the worker that dials.
        peer: Int, the worker that it means to reach.
        lane: Bytes, the digest of the lane's name.
    """

    nonce: bytes
    rank: int
    peer: int
    lane: bytes

    def packed(self) -> bytes:
        """Pack all fields."""
        return _CLAIM.pack(self.nonce, self.rank, self.peer, self.lane)


def lane_digest(lane: str) -> bytes:
    """Return the digest that stands for a lane's name.

    Args:
        lane: String.

    Returns:
        Bytes, 32 of them.
    """
    return hashlib.sha256(lane.encode()).digest()


def new_greeting() -> bytes:
    """Return a greeting with a fresh nonce."""
    return _MAGIC + secrets.token_bytes(_NONCE_BYTES)


def is_greeting(received: bytes) -> bool:
    """Whether something that was received is a greeting."""
    return len(received) == GREETING_BYTES and received.startswith(_MAGIC)


def new_claim(rank: int, peer: int, lane: str) -> Claim:
    """Return the claim of a worker that dials another one.

    Args:
        rank: Int, the worker that dials.
        peer: Int, the other one.
        lane: String, the lane's name.
    """
    return Claim(secrets.token_bytes(_NONCE_BYTES), rank, peer, lane_digest(lane))


def signed(claim: Claim, greeting: bytes, secret: bytes) -> bytes:
    """Return a claim with its proof, as it is sent.

    Args:
        claim: `Claim`.
        greeting: Bytes, what the other end greeted with.
        secret: Bytes, the job's.
    """
    packed = claim.packed()
    return packed + _proof(secret, b"claim", greeting, packed)


def checked_claim(received: bytes, greeting: bytes, secret: bytes, rank: int) -> Claim:
    """Return a claim whose proof is right.

    Args:
        received: Bytes, `CLAIM_BYTES` of them.
        greeting: Bytes, what this worker greeted with.
        secret: Bytes, the job's.
        rank: Int, this worker's.

    Raises:
        HandshakeError: If the proof is wrong, or another worker is meant.
    """
    packed, proof = received[: _CLAIM.size], received[_CLAIM.size :]
    if not hmac.compare_digest(proof, _proof(secret, b"claim", greeting, packed)):
        raise HandshakeError("it has not the secret of this job")
    claim = Claim(*_CLAIM.unpack(packed))
    if claim.peer != rank:
        raise HandshakeError(f"it looks for worker {claim.peer}")
    return claim


def welcome(claim: Claim, greeting: bytes, secret: bytes) -> bytes:
    """Return the proof of the end that accepts.

    Args:
        claim: `Claim` of the other end.
        greeting: Bytes, what this worker greeted with.
        secret: Bytes, the job's.
    """
    return _proof(secret, b"welcome", greeting, claim.packed())


def is_welcome(received: bytes, claim: Claim, greeting: bytes, secret: bytes) -> bool:
    """Whether the end that was dialled has the secret, too."""
    return hmac.compare_digest(received, welcome(claim, greeting, secret))


def _proof(secret: bytes, role: bytes, greeting: bytes, packed: bytes) -> bytes:
    return hmac.digest(secret, role + greeting + packed, "sha256")
