"""Messages of the store: JSON objects of limited length, each behind its length."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import struct
from typing import Any

_LENGTH = struct.Struct("!I")
# Largest length of a message. All texts of an all-gather are in one message.
MOST_BYTES = 1 << 26


def own_version() -> str:
    """Return the installed version of tfdp, or `"not installed"`."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("tfdp")
    return "not installed"


class MessageTooLong(ValueError):
    """Error: a message is longer than the store allows.

    Args:
        num_bytes: Int, length of the message.
    """

    def __init__(self, num_bytes: int) -> None:
        super().__init__(
            "A text that workers exchange is too long for the job's store: the limit "
            f"is {MOST_BYTES >> 20} MiB. Received: {num_bytes / (1 << 20):.1f} MiB"
        )


def encode(message: dict[str, Any]) -> bytes:
    r"""Encode a message with its length in front.

    Args:
        message: Dict of values that JSON supports.

    Raises:
        MessageTooLong: If it exceeds the limit.

    Example:

    >>> encode({"id": 1})
    b'\x00\x00\x00\x08{"id":1}'
    """
    text = json.dumps(message, separators=(",", ":")).encode()
    if len(text) > MOST_BYTES:
        raise MessageTooLong(len(text))
    return _LENGTH.pack(len(text)) + text


class Decoder:
    """Messages out of a stream of bytes that arrives in parts.

    Example:

    >>> decoder = Decoder()
    >>> decoder.feed(encode({"id": 1}) + encode({"id": 2})[:3])
    [{'id': 1}]
    >>> decoder.feed(encode({"id": 2})[3:])
    [{'id': 2}]
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> list[dict[str, Any]]:
        """Add received bytes, and return the messages that are complete.

        Args:
            received: Bytes of the stream.

        Raises:
            ValueError: If the stream does not consist of such messages.
        """
        self._buffer += received
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MOST_BYTES:
                raise MessageTooLong(length)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            message = json.loads(bytes(self._buffer[_LENGTH.size : end]))
            if not isinstance(message, dict):
                raise ValueError("A message of the store must be a JSON object.")
            messages.append(message)
            del self._buffer[:end]
        return messages
