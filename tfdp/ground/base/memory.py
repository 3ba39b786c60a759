"""Free memory of this process's host or container."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

# Folder of the memory limit of a container (cgroup v2).
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """Return the free bytes of the host, or below a limit of container or process.

    Example:

    >>> free_bytes() > 0
    True
    """
    available = psutil.virtual_memory().available
    return int(min(available, _free_in_container(), _free_of_process()))


def _free_of_process() -> float:
    """Return the free bytes below this process's own limit, infinity without one."""
    if resource is None:
        return float("inf")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return float("inf")
    return max(limit - psutil.Process().memory_info().vms, 0)


def _free_in_container() -> float:
    """Return the free bytes below the limit of the container, infinity without one."""
    with contextlib.suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        return max(limit - used + _cache_of_container(), 0)
    return float("inf")


def _cache_of_container() -> int:
    """Return the bytes of cached files, which the kernel frees when needed."""
    lines = (_CGROUP / "memory.stat").read_text().splitlines()
    fields = dict(line.split() for line in lines)
    return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))
