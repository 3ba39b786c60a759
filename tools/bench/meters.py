"""Wall time, CPU time, memory and TCP bytes of a process; needs nothing but Python."""

from __future__ import annotations

import os
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tfdp.launch.bench.channel import Variant

Times = dict[str, float]
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc(5)
_DESCRIPTORS = Path("/proc/self/fd")
# `tcpi_bytes_acked` of `struct tcp_info`: data that has arrived, each byte once.
_ACKED = struct.Struct("<Q")
_ACKED_OFFSET = 120


def metered(
    step: Callable[[], Any],
    finish: Callable[[Any], Any] = lambda result: None,
    meet: Callable[[], Any] | None = None,
) -> Variant:
    """Seconds and CPU seconds per step, of all threads of this process.

    A step before the first is not timed, as in `tfdp.launch.bench.channel.timed`.

    Args:
        step: Callable that starts a step and returns what `finish` is given.
        finish: Callable that returns when the step has ended. Defaults to nothing.
        meet: Callable that returns when all workers have called it, in the place of
            the step that is not timed, or `None`. Defaults to `None`.

    Returns:
        Callable that takes a number of steps and returns a dict.
    """

    def run(steps: int) -> Times:
        if meet is None:
            finish(step())
        else:
            meet()
        begin, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            result = step()
        finish(result)
        cpu_seconds = time.process_time() - cpu
        seconds = time.perf_counter() - begin
        return {"seconds": seconds / steps, "cpu_seconds": cpu_seconds / steps}

    return run


def of_all(workers: Sequence[Times]) -> Times:
    """The time of the slowest worker, and the CPU time of each in the mean."""
    return {
        "seconds": max(found["seconds"] for found in workers),
        "cpu_seconds": statistics.mean(found["cpu_seconds"] for found in workers),
    }


def resident_bytes() -> int:
    """Int, the memory that this process has now."""
    return _read("VmRSS")


def peak_bytes() -> int:
    """Int, the most that this process has had since `reset_peak`."""
    return _read("VmHWM")


def reset_peak() -> None:
    """Begin to measure a peak."""
    _CLEAR.write_text(_RESET_PEAK, "ascii")


def peak_of(step: Callable[[], Any]) -> Variant:
    """Make a callable that takes so many steps and returns the peak in them.

    Args:
        step: Callable that returns when a step has ended.
    """

    def run(steps: int) -> int:
        reset_peak()
        for _ in range(steps):
            step()
        return peak_bytes()

    return run


def _read(name: str) -> int:
    for line in _STATUS.read_text("ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no {name}")


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


def pin_to_core(rank: int) -> None:
    """Keep this process and all its threads on one core.

    Args:
        rank: Int, the worker's; workers beyond the number of cores share them.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
