"""Processes that were started together, by what tfdp does not read."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tfdp.communication.cluster.mpi_launcher import mpi_rank

# What launchers set to the number of processes, and which of them it is.
_SIZES = {
    "torchrun": ("WORLD_SIZE", "RANK"),
    "horovodrun": ("HOROVOD_SIZE", "HOROVOD_RANK"),
}


def processes_apart(environ: Mapping[str, str] = os.environ) -> str | None:
    """Describe processes that were started together and do not know of each other.

    Args:
        environ: Mapping of environment variables, without `TF_CONFIG`. Defaults to
            `os.environ`.

    Returns:
        String, a clause; or `None` where there is one process.

    Example:

    >>> processes_apart({"PMI_SIZE": "4", "PMI_RANK": "1"})
    'MPICH has started 4 processes (PMI_SIZE=4)'
    >>> processes_apart({}) is None
    True
    """
    own = mpi_rank(environ)
    if own is not None:
        count = str(own.size)
        return f"{own.launcher} has started {count} processes ({own.variable})"
    for name, (size, rank) in _SIZES.items():
        count = environ.get(size, "")
        if rank in environ and count.isdecimal() and int(count) > 1:
            return f"{name} has started {count} processes ({size}={count})"
    return None
