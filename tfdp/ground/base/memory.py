"""Free memory of this process's host or container."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

try:
    import resource
except ImportError:  # Windows, where processes have no limits of their own
    resource = None  # type: ignore[assignment]

# Linux provides the memory and the cgroups of this process as files in this folder,
# `status` and `cgroup`.
_PROCESS = Path("/proc/self")
# A container or service may use less memory than the host has. Its limits are in the
# cgroups below this folder.
_CGROUPS = Path("/sys/fs/cgroup")


class _Names(NamedTuple):
    """Names of the files of a memory cgroup, which differ between versions 1 and 2.

    Args:
        limit: String, name of the file with the limit in bytes.
        used: String, name of the file with the bytes in use.
        prefix: String, prefix of the names in the file `memory.stat`.
    """

    limit: str
    used: str
    prefix: str


_V2 = _Names("memory.max", "memory.current", "")
_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def free_bytes() -> int:
    """Return the bytes of memory that this process may still use.

    They are the free bytes of the host, or fewer by limits of container and process.

    Example:

    >>> free_bytes() > 0
    True
    """
    available = psutil.virtual_memory().available
    return int(min(available, free_in_container(), free_of_process()))


def free_in_container() -> float:
    """Return the free bytes below the limits of cgroups, infinity without a limit.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html
    """
    found = []
    for folder, names in _cgroups():
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / names.limit).read_text())
            used = int((folder / names.used).read_text())
            if limit < psutil.virtual_memory().total:
                found.append(max(limit - used + _cached(folder, names), 0))
    return min(found, default=float("inf"))


def reset_peak() -> bool:
    """Reset the peak of this process's memory; return whether that has worked.

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
        is_virtual: Bool, `True` for the address space since the process began,
            `False` for the memory in use since `reset_peak`. Defaults to `False`.

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


def _cgroups() -> Iterator[tuple[Path, _Names]]:
    """Yield the folder and file names of each memory cgroup of this process.

    Each folder is inside the previous one. In a container the first one may be that of
    the container's own cgroup.
    """
    with contextlib.suppress(OSError):
        for line in (_PROCESS / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root, names = (_CGROUPS / "memory", _V1) if controllers else (_CGROUPS, _V2)
            parts = Path(path).parts[1:]
            for end in range(len(parts) + 1):
                yield root.joinpath(*parts[:end]), names


def _cached(folder: Path, names: _Names) -> int:
    """Return the bytes of files in the page cache of the memory cgroup in `folder`."""
    lines = (folder / "memory.stat").read_text().splitlines()
    fields = dict(line.split() for line in lines)
    kinds = ("inactive_file", "active_file")
    return sum(int(fields.get(names.prefix + kind, 0)) for kind in kinds)
