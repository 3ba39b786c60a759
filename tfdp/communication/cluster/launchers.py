"""Ranks in environment variables of the launchers of MPI, torchrun and horovodrun."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Mapping

# Environment variables that each launcher sets for a process: first the one of its
# rank, then those that may hold the number of processes.
_MPI_VARIABLES = {
    "MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE"),  # also set by Intel MPI and MVAPICH
    # PMIx sets no size; Slurm, which can start tasks by PMIx, sets one.
    "PMIx": ("PMIX_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
}
_OTHER_VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE"),
}


@dataclasses.dataclass(frozen=True)
class LaunchedRank:
    """Rank of this process among processes that one launcher has started.

    Args:
        launcher: String, such as `"MPI"` (Open MPI), `"MPICH"` (and its relatives) or
            `"PMIx"`.
        variable: String, `"NAME=value"` of the variable with the number of processes.
        rank: Int, this process's rank.
        size: Int, number of processes.
    """

    launcher: str
    variable: str
    rank: int
    size: int


def mpi_rank(environ: Mapping[str, str] = os.environ) -> LaunchedRank | None:
    """Find this process's rank in an MPI job, without starting MPI.

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
    return _find(_MPI_VARIABLES, environ)


def unconnected_processes(environ: Mapping[str, str] = os.environ) -> str | None:
    """Describe processes that a launcher has started without a cluster to connect them.

    Args:
        environ: Mapping of environment variables, without `TF_CONFIG`. Defaults to
            `os.environ`.

    Returns:
        String, a clause; or `None` if there is only one process.

    Example:

    >>> unconnected_processes({"PMI_SIZE": "4", "PMI_RANK": "1"})
    'MPICH has started 4 processes (PMI_SIZE=4)'
    >>> unconnected_processes({}) is None
    True
    """
    rank = _find(_MPI_VARIABLES | _OTHER_VARIABLES, environ)
    if rank is None:
        return None
    return f"{rank.launcher} has started {rank.size} processes ({rank.variable})"


def has_mpi4py() -> bool:
    """Return whether mpi4py is installed, without an import, which starts MPI.

    Returns:
        Bool.
    """
    return importlib.util.find_spec("mpi4py") is not None


def _find(
    launchers: Mapping[str, tuple[str, ...]], environ: Mapping[str, str]
) -> LaunchedRank | None:
    """Find the rank that a launcher of several processes has set for this process.

    A launcher counts only if its variables hold a rank and a number of several
    processes. If either is missing, the next launcher is tried.

    Args:
        launchers: Mapping from a launcher to names of variables: that of the rank, then
            those that may hold the number of processes.
        environ: Mapping of environment variables.

    Returns:
        `LaunchedRank` by the first launcher that counts, or `None` if none does.
    """
    for launcher, (rank_name, *size_names) in launchers.items():
        rank = environ.get(rank_name, "")
        for name in size_names:
            size = environ.get(name, "")
            if rank.isdecimal() and size.isdecimal() and int(size) > 1:
                return LaunchedRank(launcher, f"{name}={size}", int(rank), int(size))
    return None
