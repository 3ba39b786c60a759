"""GPUs of this machine, divided between its workers without calls of CUDA."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Mapping, Sequence

# CUDA accepts the name of a GPU only if it begins with an index or the prefix of a
# UUID. Any other name hides the GPUs that follow it.
_GPU_NAME = re.compile(r"\d|GPU-|MIG-")


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """List the GPUs by their names in `CUDA_VISIBLE_DEVICES`, without CUDA.

    Args:
        environ: Environment variables. Defaults to `os.environ`.

    Returns:
        List of strings: the entries of `CUDA_VISIBLE_DEVICES` if it is set, or else
        the index of each NVIDIA device file.
    """
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",") if name.strip()]
        # CUDA ignores an invalid name, such as -1, and all names after it.
        return list(itertools.takewhile(_GPU_NAME.match, names))
    with contextlib.suppress(OSError):
        files = [f for f in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", f)]
        return [str(index) for index in range(len(files))]
    return []


def gpu_environment(index: int, count: int, gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment that gives a worker its part of this machine's GPUs.

    NCCL refuses two workers on one GPU.

    Args:
        index: Int, index of the worker among those of this machine.
        count: Int, number of workers of this machine.
        gpus: Sequence of strings, from `visible_gpus`.

    Returns:
        Dict of environment variables, empty with one worker or with fewer GPUs than
        workers.

    Example:

    >>> gpu_environment(1, 2, ["0", "1", "2", "3"])
    {'CUDA_VISIBLE_DEVICES': '2,3'}
    """
    each = len(gpus) // count
    if each == 0 or count == 1:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[index * each : (index + 1) * each])}
