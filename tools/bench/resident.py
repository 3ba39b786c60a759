"""Resident memory of a process and its peak; needs nothing but Linux and Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfdp.launch.bench.channel import Arm

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc(5)


def resident_bytes() -> int:
    """Int, the memory that this process has now."""
    return _read("VmRSS")


def peak_bytes() -> int:
    """Int, the most that this process has had since `reset_peak`."""
    return _read("VmHWM")


def reset_peak() -> None:
    """Begin to measure a peak."""
    _CLEAR.write_text(_RESET_PEAK, "ascii")


def peak_of(step: Callable[[], Any]) -> Arm:
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
