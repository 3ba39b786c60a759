"""Proof of both ends of a connection that they have the job's secret.

The end that listens greets with a nonce. The one that dials answers with a nonce of its
own and an HMAC-SHA256 of both; then the other proves itself in the same way, with
another role, so that no proof can be sent back. The secret itself never travels. Both
nonces make the keys of the connection's seals.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from typing import Any

from tfdp.rendezvous.channel import Channel
from tfdp.rendezvous.errors import RendezvousError, Stranger
from tfdp.rendezvous.messages import Seal, decode, encode

PROTOCOL = "rendezvous/1"
_NONCE_BYTES = 32
_HEX = re.compile(r"[0-9a-f]{64}")
_REFUSED = {"refused": "secret"}


async def accept(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str
) -> Channel:
    """Greet who has dialled, and check its proof.

    Args:
        reader: `asyncio.StreamReader` of the connection.
        writer: `asyncio.StreamWriter` of it.
        secret: String, the job's.

    Returns:
        `Channel`.

    Raises:
        Stranger: If the other end has not the secret.
    """
    greeting = secrets.token_hex(_NONCE_BYTES)
    writer.write(encode({"tfdp": PROTOCOL, "nonce": greeting}))
    claim = decode(await read_line(reader))
    nonce, proof = _hex(claim, "nonce"), _hex(claim, "proof")
    if not hmac.compare_digest(proof, _proof(secret, "dials", greeting, nonce)):
        writer.write(encode(_REFUSED))
        raise Stranger("it has not the secret of this job")
    writer.write(encode({"proof": _proof(secret, "listens", greeting, nonce)}))
    dials, listens = _seals(secret, greeting, nonce)
    return Channel(reader, writer, outgoing=listens, incoming=dials)


async def dial(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    secret: str,
    place: str,
) -> Channel:
    """Prove this end to who listens, and check the proof of that one.

    Args:
        reader: `asyncio.StreamReader` of the connection.
        writer: `asyncio.StreamWriter` of it.
        secret: String, the job's.
        place: String, the address, for messages.

    Returns:
        `Channel`.

    Raises:
        RendezvousError: If what listens is none of this job.
        Stranger: If it sends what nobody should.
    """
    greeting = await _greeting(reader, place)
    nonce = secrets.token_hex(_NONCE_BYTES)
    proof = _proof(secret, "dials", greeting, nonce)
    writer.write(encode({"nonce": nonce, "proof": proof}))
    answer = decode(await read_line(reader))
    expected = _proof(secret, "listens", greeting, nonce)
    is_right = answer != _REFUSED and hmac.compare_digest(
        _hex(answer, "proof"), expected
    )
    if not is_right:
        raise RendezvousError(
            f"The secret of this node is not that of node 0 at {place}: paste the line "
            "that node 0 has printed, or give both the same file. "
            "Received: another TFDP_JOB_SECRET_FILE"
        )
    dials, listens = _seals(secret, greeting, nonce)
    return Channel(reader, writer, outgoing=dials, incoming=listens)


async def read_line(reader: asyncio.StreamReader) -> bytes:
    """Read one line of limited length.

    Args:
        reader: `asyncio.StreamReader`.

    Returns:
        Bytes that end with a line feed.

    Raises:
        Stranger: If the line is too long, or the connection ends within it.
    """
    try:
        return await reader.readuntil(b"\n")
    except asyncio.LimitOverrunError as error:
        raise Stranger("it sends a line without an end") from error
    except (asyncio.IncompleteReadError, OSError) as error:
        raise Stranger("it ended the connection") from error


async def _greeting(reader: asyncio.StreamReader, place: str) -> str:
    line = await read_line(reader)
    try:
        greeting = decode(line)
        nonce = _hex(greeting, "nonce")
    except Stranger as error:
        raise RendezvousError(
            f"What listens at {place} is no rendezvous of `tfdp run`; give the address "
            "of node 0, and a port that nothing else uses. "
            f"Received: {line[:40]!r}"
        ) from error
    if greeting.get("tfdp") != PROTOCOL:
        raise RendezvousError(
            f"Node 0 at {place} has another version of tfdp; install the same one on "
            f"all machines. Received: protocol {str(greeting.get('tfdp'))[:40]!r}, "
            f"here {PROTOCOL!r}"
        )
    return nonce


def _hex(message: dict[str, Any], key: str) -> str:
    value = message.get(key)
    if not isinstance(value, str) or not _HEX.fullmatch(value):
        raise Stranger
    return value


def _proof(secret: str, role: str, greeting: str, nonce: str) -> str:
    text = " ".join((PROTOCOL, role, greeting, nonce))
    return hmac.digest(secret.encode(), text.encode(), "sha256").hex()


def _seals(secret: str, greeting: str, nonce: str) -> tuple[Seal, Seal]:
    """Return the seals of the end that dials and of the one that listens."""
    keys = [
        _proof(secret, f"{end} sends", greeting, nonce) for end in ("dial", "listen")
    ]
    return Seal(bytes.fromhex(keys[0])), Seal(bytes.fromhex(keys[1]))
