"""Memory that this process can still get."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import psutil

from tfdp.ground import _compat

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(devices: Sequence[str]) -> int | None:
    """Return the bytes that are free for tensors of devices, or `None` if not known.

    Args:
        devices: Sequence of strings. Of GPUs it is not known.
    """
    if any(_compat.device_type(device) != "CPU" for device in devices):
        return None
    found = min(psutil.virtual_memory().available, _left_in_group())
    return int(found)


def _left_in_group() -> float:
    """Bytes until the limit of a container; TensorFlow knows of none."""
    with contextlib.suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        return max(limit - used + _cache_of_group(), 0)
    return float("inf")


def _cache_of_group() -> int:
    """Bytes of cached files, which the kernel gives away."""
    lines = (_CGROUP / "memory.stat").read_text().splitlines()
    fields = dict(line.split() for line in lines)
    return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))
