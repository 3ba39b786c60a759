"""Sockets as a mesh opens them."""

from __future__ import annotations

import contextlib
import secrets
import socket

from tfdp.communication.transport.addresses import family_of, socket_address
from tfdp.ground.forks import close_in_forks

_BACKLOG = 512
_UNIX_BUFFER_BYTES = 1 << 20
# Between processes of one host a buffer that grows to megabytes is read when the cache
# has lost it: with this one all-reduces took four fifths of the processor's time. The
# kernel takes twice of it, or what `net.core.wmem_max` grants, which served as well.
_LOCAL_TCP_BUFFER_BYTES = 512 << 10


def listen_tcp(address: str) -> socket.socket:
    """Listen on one address, and a port that the system chooses."""
    sock = close_in_forks(socket.socket(family_of(address), socket.SOCK_STREAM))
    sock.bind(socket_address(address, 0))
    sock.listen(_BACKLOG)
    return sock


def listen_unix() -> socket.socket:
    """Listen under a name that nobody guesses, and that leaves no file."""
    sock = close_in_forks(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    sock.bind(f"\0tfdp-{secrets.token_hex(16)}")
    sock.listen(_BACKLOG)
    return sock


def tune(sock: socket.socket) -> None:
    """Set what pays: the size of buffers on one host; between hosts they grow."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        return
    if _is_within_host(sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_TCP_BUFFER_BYTES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that has gone without a word is noticed after half a minute of silence.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _is_within_host(sock: socket.socket) -> bool:
    try:
        return bool(sock.getsockname()[0] == sock.getpeername()[0])
    except OSError:  # it has ended already; whoever uses it will see
        return False


def shut_down(sock: socket.socket) -> None:
    """End what waits on a socket, here and at its other end."""
    with contextlib.suppress(OSError):  # not connected yet, or ended
        sock.shutdown(socket.SHUT_RDWR)
