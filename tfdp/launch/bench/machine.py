"""Machine, load and package versions of a benchmark run."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from tfdp.ground.text import pluralize

_PACKAGES = ("tensorflow", "keras", "numpy", "tfdp")
# A caption is a single line, and lists only these packages, in this order, by their
# display names.
_NAMES = {
    "tfdp": "tfdp",
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "torch": "PyTorch",
    "python": "Python",
}
HOW_TO_GET_TORCH = (
    "get it with `pip install torch` (its CPU build is enough), or name an "
    "interpreter that has it with --torch-python"
)


def describe(program: str | None = None) -> dict[str, Any]:
    """Describe the machine, its load, the versions and the command.

    Args:
        program: String, name of this program in the described command, or `None` for
            the name by which it was called. Defaults to `None`.

    Returns:
        Dict of JSON values: `"machine"`, `"kernels"`, `"load_average_1_min"`,
        `"system"`, `"python"` and `"command"`, and the version of each package under
        the package's name.

    Example:

    >>> described = describe("tfdp bench compare")
    >>> "core" in described["machine"], "tensorflow" in described
    (True, True)
    """
    # `cpu_kernels` is imported late, since it imports TensorFlow, which takes seconds.
    from tfdp.communication.cluster import cpu_kernels

    return {
        "machine": f"{_cpu_name()}, {pluralize(num_cores(), 'core')}",
        "kernels": cpu_kernels.describe_kernels(),
        "load_average_1_min": load(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: version_of(name) for name in _PACKAGES},
        "command": " ".join([program or Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def caption(described: Mapping[str, Any]) -> str:
    """Format the machine, its CPU kernels and the versions as one line, for a plot.

    Args:
        described: Mapping from `describe`, which may have `torch` in addition.

    Returns:
        String, one line.

    Example:

    >>> caption({"machine": "a CPU, 2 cores", "tfdp": "0.1.0", "torch": None})
    'a CPU, 2 cores; tfdp 0.1.0'
    """
    versions = [f"{_NAMES[k]} {described[k]}" for k in _NAMES if described.get(k)]
    kernels = f" ({described['kernels']})" if "kernels" in described else ""
    return f"{described['machine']}{kernels}; {', '.join(versions)}"


def load() -> float:
    """Return the machine's load average of the last minute, to two decimals."""
    return round(os.getloadavg()[0], 2)


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    """Return the model name of the CPU, or its architecture if Linux names none."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def version_of(name: str) -> str:
    """Return the version of an installed package, or `"not installed"`."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def torch_version(python: str) -> str | None:
    """Return the version of PyTorch that an interpreter has.

    Args:
        python: String, name or path of the interpreter.

    Returns:
        String, the version, or `None` if there is no such interpreter, or it has no
        PyTorch with Gloo.

    Example:

    >>> torch_version("no such interpreter") is None
    True
    >>> torch_version("true") is None  # it ends without an error, too
    True
    """
    if shutil.which(python) is None:
        return None
    program = (
        "import torch, torch.distributed as d; assert d.is_gloo_available(); "
        "print(torch.__version__)"
    )
    done = subprocess.run(
        [python, "-c", program], capture_output=True, text=True, check=False
    )
    return (done.stdout.strip() or None) if done.returncode == 0 else None
