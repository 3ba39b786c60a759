"""Messages of a JSON head and arrays of any shapes and dtypes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tfdp.communication.transport.communicator import Array
from tfdp.communication.transport.schedules import bytes_of

_LENGTH = struct.Struct("!I")
# Largest length of a head in bytes. A larger number shows that the other end sends
# another format, and must not make this end allocate that much memory.
_MAX_HEAD_BYTES = 1 << 22


class Link(Protocol):
    """Interface of a connection for messages: `send`, and `receive_into` a buffer."""

    def send(self, *buffers: bytes | memoryview) -> None:
        """Send buffers, one after another."""

    def receive_into(self, view: bytearray | memoryview) -> None:
        """Receive into a buffer until it is full."""


def send_frame(
    link: Link, head: Mapping[str, Any], arrays: Sequence[Array] = ()
) -> None:
    """Send a message: a head in JSON, which also describes the arrays, then the arrays.

    Args:
        link: `Link`.
        head: Mapping of values that JSON supports.
        arrays: Sequence of arrays. Defaults to none.
    """
    converted = [np.asarray(array) for array in arrays]
    specs = [(array.dtype.name, array.shape) for array in converted]
    text = json.dumps({**head, "arrays": specs}).encode()
    link.send(_LENGTH.pack(len(text)) + text, *map(_view, converted))


def receive_frame(link: Link) -> tuple[dict[str, Any], list[Array]]:
    """Receive a message that `send_frame` has sent.

    Args:
        link: `Link`.

    Returns:
        Tuple of the head, and a list of arrays.

    Raises:
        EOFError: If the other end sends another format.
    """
    length = bytearray(_LENGTH.size)
    link.receive_into(length)
    (num_bytes,) = _LENGTH.unpack(length)
    if num_bytes > _MAX_HEAD_BYTES:
        raise EOFError
    text = bytearray(num_bytes)
    link.receive_into(text)
    head = json.loads(text)
    arrays = [np.empty(shape, np.dtype(dtype)) for dtype, shape in head.pop("arrays")]
    for array in arrays:
        link.receive_into(_view(array))
    return head, arrays


def _view(array: Array) -> memoryview:
    """Return the bytes of an array, contiguous and flat."""
    return bytes_of(np.ascontiguousarray(array).reshape(-1))
