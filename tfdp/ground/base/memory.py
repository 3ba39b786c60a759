"""Free memory of this process's host or container."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

# Folder of this process's counters.
_PROCESS = Path("/proc/self")
# Folder of the memory limit of a container (cgroup v2).
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """Return the free bytes of the host, or below a limit of container or process.

    Example:

    >>> free_bytes() > 0
    True
    """
    available = psutil.virtual_memory().available
    return int(min(available, free_in_container(), free_of_process()))


def free_in_container() -> float:
    """Return the free bytes below the limit of the container, infinity without one."""
    with contextlib.suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        return max(limit - used + _cache_of_container(), 0)
    return float("inf")


def reset_peak() -> bool:
    """Begin to measure the peak of this process's memory; return whether it can be.

    Source: proc(5), `/proc/pid/clear_refs`.
    """
    try:
        (_PROCESS / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes(*, is_virtual: bool = False) -> int:
    """Return the most memory that this process has had, in bytes.

    Args:
        is_virtual: Bool, whether the address space is meant, since the process began,
            and not the memory in use since `reset_peak`. Defaults to `False`.

    Example:

    >>> 0 < peak_bytes() < peak_bytes(is_virtual=True)
    True
    """
    lines = (_PROCESS / "status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["VmPeak" if is_virtual else "VmHWM"].split()[0]) * 1024


def free_of_process() -> float:
    """Return the free bytes below this process's own limits, infinity without one."""
    if resource is None:
        return float("inf")
    used = psutil.Process().memory_info()
    free = [
        limit - now
        for kind, now in (
            (resource.RLIMIT_AS, used.vms),
            (resource.RLIMIT_DATA, getattr(used, "data", 0)),
        )
        if (limit := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY
    ]
    return max(min(free, default=float("inf")), 0)


def _cache_of_container() -> int:
    """Return the bytes of cached files, which the kernel frees when needed."""
    lines = (_CGROUP / "memory.stat").read_text().splitlines()
    fields = dict(line.split() for line in lines)
    return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))
