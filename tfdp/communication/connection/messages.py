"""JSON messages over an authenticated connection, each with an HMAC.

A message is its length, an HMAC-SHA256 of its number and text, and the text. So an
attacker between the two ends cannot add, alter, repeat or reorder messages.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from tfdp.communication.connection.acceptor import Acceptor
from tfdp.communication.connection.handshake import (
    NO_SIGNAL,
    Authenticated,
    ConnectionFailed,
)

# Head of a message: the length of its text, so that the receiver finds the end, and the
# HMAC of its number and text.
_HEAD = struct.Struct("!I32s")
_NUMBER = struct.Struct("!Q")
# Limits in bytes, so that a damaged length cannot exhaust memory: of a text, which may
# contain all texts of an all-gather, and of the fields that the store adds to it.
MAX_BYTES, _MAX_ADDED_BYTES = 1 << 26, 1 << 20
_RECEIVE_BYTES = 1 << 16
# A shared encoder: `json.dumps` would create one for each message, which takes as long
# as the encoding itself.
_compact_json = json.JSONEncoder(separators=(",", ":")).encode


class MessageTooLong(ValueError):
    """Error: a message is longer than the store allows.

    Args:
        num_bytes: Int, length of the message.
    """

    def __init__(self, num_bytes: int) -> None:
        super().__init__(
            "A text that workers exchange is too long for the job's store: the limit "
            f"is {MAX_BYTES >> 20} MiB. Received: {num_bytes / (1 << 20):.1f} MiB"
        )


def encode(message: Mapping[str, Any], *, is_added_to: bool = False) -> bytes:
    """Encode a message as compact JSON in UTF-8.

    Args:
        message: Mapping of values that JSON supports.
        is_added_to: Bool, whether to raise the limit by 1 MiB, for the fields that the
            store adds to a text of legal length. Defaults to `False`.

    Raises:
        MessageTooLong: If it exceeds the limit of 64 MiB.

    Example:

    >>> encode({"id": 1})
    b'{"id":1}'
    """
    text = _compact_json(message).encode()
    if len(text) > MAX_BYTES + is_added_to * _MAX_ADDED_BYTES:
        raise MessageTooLong(len(text))
    return text


class MessageAuthenticator:
    """Source of the HMACs of the numbered messages in one direction of a connection.

    Args:
        key: Bytes, the key of this connection and direction.
    """

    def __init__(self, key: bytes) -> None:
        # Copying an HMAC that has hashed the key takes less time than hashing the key
        # again for each message.
        self._keyed = hmac.new(key, digestmod="sha256")
        self._number = 0

    def next_mac(self, text: bytes) -> bytes:
        """Return the HMAC of the next message, of its number and text.

        Args:
            text: Bytes, from `encode`.
        """
        mac = self._keyed.copy()
        mac.update(_NUMBER.pack(self._number))
        mac.update(text)
        self._number += 1
        return mac.digest()


class MessageConnection:
    """Connection that carries messages in both directions.

    Any thread may send. A non-blocking socket may not take all bytes at once: its
    reader must then call `proceed` to send the remaining ones.

    Args:
        sock: `socket.socket`, after the handshake.
        keys: `Authenticated`, the result of the handshake.
        most_bytes: Int, largest length of a received text. Defaults to 65 MiB.
        acceptor: `Acceptor` whose thread is the only one that uses this connection, and
            calls `proceed`. Defaults to `None`.

    Attributes:
        sock: The socket.
    """

    def __init__(
        self,
        sock: socket.socket,
        keys: Authenticated,
        most_bytes: int = MAX_BYTES + _MAX_ADDED_BYTES,
        acceptor: Acceptor | None = None,
    ) -> None:
        self.sock, self.fileno = sock, sock.fileno
        if sock.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):  # the connection may have ended already
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._most_bytes = most_bytes
        self._outgoing, self._incoming = (
            MessageAuthenticator(keys.outgoing),
            MessageAuthenticator(keys.incoming),
        )
        self._input, self._output = bytearray(), bytearray()
        self._lock = threading.Lock()
        self._acceptor = acceptor

    @property
    def has_output(self) -> bool:
        """Bool, whether bytes wait until the socket takes them."""
        return bool(self._output)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, or nothing if the connection has ended.

        Args:
            message: Mapping of values that JSON supports.

        Raises:
            MessageTooLong: If it exceeds the limit.
        """
        self.send_encoded(encode(message))

    def send_encoded(self, text: bytes) -> bool:
        """Send a message, as far as the socket takes it now.

        Args:
            text: Bytes, from `encode`.

        Returns:
            Bool, false if the connection has ended, which also shows when it is read.
        """
        with self._lock:
            self._output += _HEAD.pack(len(text), self._outgoing.next_mac(text))
            self._output += text
            is_open = self._flush()
        if self._output and self._acceptor is not None:
            self._acceptor.watch_output(self, waits=True)
        return is_open

    def receive(self, *, waits: bool = False) -> list[dict[str, Any]]:
        """Receive the messages that have arrived, none if their bytes are incomplete.

        Args:
            waits: Bool, whether to wait for bytes. Defaults to `False`.

        Raises:
            ConnectionFailed: If the connection has ended, or was tampered with.
        """
        try:
            flags = 0 if waits else socket.MSG_DONTWAIT
            received = self.sock.recv(_RECEIVE_BYTES, flags)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ConnectionFailed("has closed its connection") from error
        if not received:
            raise ConnectionFailed("has closed its connection")
        self._input += received
        try:
            return list(self._complete_messages())
        except (ValueError, RecursionError) as error:
            raise ConnectionFailed("has sent an invalid message") from error

    def proceed(self) -> list[dict[str, Any]]:
        """Send waiting bytes as far as the socket takes them, and receive messages.

        Returns:
            List of the messages that have arrived, as from `receive`.
        """
        if self._output:
            with self._lock:
                self._flush()
        if self._acceptor is not None:
            self._acceptor.watch_output(self, waits=bool(self._output))
        return self.receive()

    def close(self) -> None:
        """Close the connection, once no thread sends: its descriptor may be reused."""
        with self._lock:
            self.sock.close()

    def _complete_messages(self) -> Iterator[dict[str, Any]]:
        """Remove the complete messages from the input, and decode them.

        Raises:
            ValueError: If a message is too long, is not a JSON object, or is not the
                next one that the other end has sent.
        """
        while len(self._input) >= _HEAD.size:
            length, mac = _HEAD.unpack_from(self._input)
            if length > self._most_bytes:
                raise ValueError(length)
            end = _HEAD.size + length
            if len(self._input) < end:
                return
            text = bytes(self._input[_HEAD.size : end])
            if not hmac.compare_digest(mac, self._incoming.next_mac(text)):
                raise ValueError(mac)
            message = json.loads(text.decode())
            if not isinstance(message, dict):
                raise ValueError(message)
            del self._input[:end]
            yield message

    def _flush(self) -> bool:
        """Send bytes that have waited; return false if the connection has ended."""
        try:
            while self._output:
                sent = self.sock.send(self._output, NO_SIGNAL)
                del self._output[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._output.clear()
            return False
        return True
