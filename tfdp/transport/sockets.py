"""Sockets as a mesh opens them."""

from __future__ import annotations

import contextlib
import secrets
import socket

from tfdp.transport.addresses import family_of, socket_address
from tfdp.transport.connections import own

_BACKLOG = 512
_UNIX_BUFFER_BYTES = 1 << 20


def listen_tcp(address: str) -> socket.socket:
    """Listen on one address, and a port that the system chooses."""
    sock = own(socket.socket(family_of(address), socket.SOCK_STREAM))
    sock.bind(socket_address(address, 0))
    sock.listen(_BACKLOG)
    return sock


def listen_unix() -> socket.socket:
    """Listen under a name that nobody guesses, and that leaves no file."""
    sock = own(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    sock.bind(f"\0tfdp-{secrets.token_hex(16)}")
    sock.listen(_BACKLOG)
    return sock


def tune(sock: socket.socket) -> None:
    """Set what pays: large buffers of Unix sockets; those of TCP grow by themselves."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that has gone without a word is noticed after half a minute of silence.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def shut_down(sock: socket.socket) -> None:
    """End what waits on a socket, here and at its other end."""
    with contextlib.suppress(OSError):  # not connected yet, or ended
        sock.shutdown(socket.SHUT_RDWR)
