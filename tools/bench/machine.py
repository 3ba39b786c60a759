"""What a benchmark ran on: without it a number says nothing."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """The machine, how busy it is, the versions and the command."""
    return {
        "machine": f"{_cpu_name()}, {len(os.sched_getaffinity(0))} cores",
        "load_average_1_min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("tensorflow", "keras", "numpy", "tfdp")},
        "command": " ".join(["python -m tools.bench", *sys.argv[1:]]),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
