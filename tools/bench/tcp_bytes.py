"""Bytes that the TCP connections of this process have carried, as Linux counts them."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")
# `tcpi_bytes_acked` of `struct tcp_info`: data that has arrived, each byte once.
_ACKED = struct.Struct("<Q")
_ACKED_OFFSET = 120


def tcp_bytes_sent() -> int:
    """Data that the open TCP connections of this process have sent so far.

    Those of all libraries in the process count: of tfdp's `"direct"`, of TensorFlow's
    gRPC, and of MPI. What goes through shared memory does not, nor do headers.

    Returns:
        Int, bytes whose arrival has been confirmed; 0 on other systems than Linux.
    """
    return sum(map(_acked, _tcp_sockets()))


def _tcp_sockets() -> Iterator[socket.socket]:
    if not _DESCRIPTORS.is_dir():
        return
    for entry in list(_DESCRIPTORS.iterdir()):
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            # A copy: closing it leaves the connection as it is.
            found = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # closed meanwhile
            continue
        with found:
            is_ip = found.family in (socket.AF_INET, socket.AF_INET6)
            if is_ip and found.type == socket.SOCK_STREAM:
                yield found


def _acked(sock: socket.socket) -> int:
    size = _ACKED_OFFSET + _ACKED.size
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    return _ACKED.unpack_from(info, _ACKED_OFFSET)[0] if len(info) == size else 0
