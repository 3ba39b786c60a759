"""Rank of this process in an MPI job, as the launcher's variables tell it."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Mapping

# By launcher: the number of processes, and which of them this one is.
_VARIABLES = {
    "MPI": (("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_RANK"),
    "MPICH": (("PMI_SIZE",), "PMI_RANK"),  # Intel MPI and MVAPICH, too
    # PMIx gives no size; Slurm, which starts tasks by it, does.
    "PMIx": (("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "PMIX_RANK"),
}


@dataclasses.dataclass(frozen=True)
class MpiRank:
    """One process of an MPI job of several.

    Args:
        launcher: String, `"MPI"` (Open MPI), `"MPICH"` (and its relatives) or
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


def mpi_rank(environ: Mapping[str, str] = os.environ) -> MpiRank | None:
    """Find this process's rank in an MPI job, without a word to MPI.

    Args:
        environ: Mapping of environment variables. Defaults to `os.environ`.

    Returns:
        `MpiRank`, or `None` outside of MPI and in a job of one process.

    Example:

    >>> mpi_rank({"PMI_SIZE": "4", "PMI_RANK": "1"}).rank
    1
    >>> mpi_rank({"PMI_SIZE": "1", "PMI_RANK": "0"}) is None
    True
    """
    for launcher, (sizes, rank_name) in _VARIABLES.items():
        rank = environ.get(rank_name, "")
        for name in sizes:
            size = environ.get(name, "")
            if not rank.isdecimal() or not size.isdecimal() or int(size) <= 1:
                continue
            return MpiRank(launcher, f"{name}={size}", int(rank), int(size))
    return None


def has_mpi4py() -> bool:
    """Whether mpi4py is installed; it is not imported, which would start MPI.

    Returns:
        Bool.
    """
    return importlib.util.find_spec("mpi4py") is not None
