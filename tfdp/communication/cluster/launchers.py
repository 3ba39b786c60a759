"""What launchers tell a process of its rank: those of MPI, torchrun and horovodrun."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Mapping

# By launcher: the variable of this process's rank, and those that may have the number
# of processes.
_OF_MPI = {
    "MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE"),  # Intel MPI and MVAPICH, too
    # PMIx gives no size; Slurm, which starts tasks by it, does.
    "PMIx": ("PMIX_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
}
_OF_OTHERS = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE"),
}


@dataclasses.dataclass(frozen=True)
class LaunchedRank:
    """One of several processes that were started together.

    Args:
        launcher: String, such as `"MPI"` (Open MPI), `"MPICH"` (and its relatives) or
            `"PMIx"`.
        variable: String, the variable that tells the number of processes, with its
            value.
        rank: Int, this process's rank.
        size: Int, number of processes.
    """

    launcher: str
    variable: str
    rank: int
    size: int


def mpi_rank(environ: Mapping[str, str] = os.environ) -> LaunchedRank | None:
    """Find this process's rank in an MPI job, without a word to MPI.

    Args:
        environ: Mapping of environment variables. Defaults to `os.environ`.

    Returns:
        `LaunchedRank`, or `None` outside of MPI and in a job of one process.

    Example:

    >>> mpi_rank({"PMI_SIZE": "4", "PMI_RANK": "1"}).rank
    1
    >>> mpi_rank({"PMI_SIZE": "1", "PMI_RANK": "0"}) is None
    True
    """
    return _find(_OF_MPI, environ)


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
    own = _find(_OF_MPI | _OF_OTHERS, environ)
    if own is None:
        return None
    return f"{own.launcher} has started {own.size} processes ({own.variable})"


def has_mpi4py() -> bool:
    """Whether mpi4py is installed; it is not imported, which would start MPI.

    Returns:
        Bool.
    """
    return importlib.util.find_spec("mpi4py") is not None


def _find(
    launchers: Mapping[str, tuple[str, ...]], environ: Mapping[str, str]
) -> LaunchedRank | None:
    for launcher, (rank_name, *size_names) in launchers.items():
        rank = environ.get(rank_name, "")
        for name in size_names:
            size = environ.get(name, "")
            if rank.isdecimal() and size.isdecimal() and int(size) > 1:
                return LaunchedRank(launcher, f"{name}={size}", int(rank), int(size))
    return None
