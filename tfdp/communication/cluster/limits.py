"""Limits of a process: open files and threads, compared with what a worker needs."""

from __future__ import annotations

import errno
import os
import resource

from tfdp.ground.text import pluralize

# Measured by /proc/self/fd, with TensorFlow 2.19 to 2.21: polling and the sockets of a
# server of two workers; each further worker is one more connection of the first one.
_SERVER_FILES = 8
# The listening sockets of a mesh, and the pair that wakes its thread.
_MESH_FILES = 4
# Channels of collectives between the replicas, and one of small values.
_LANES = 5
# Measured with two workers on two cores, by /proc/self/status: 138.
_THREADS, _THREADS_PER_CORE = 120, 8
# Python's own at its start; a guard, a file of data and a log at some moment.
_OWN_FILES = _OTHER_FILES = 8


def needed_files(num_workers: int, *, one_host: bool, connects: bool) -> int:
    """Count the files that a worker opens to train with others.

    Args:
        num_workers: Int, of the job.
        one_host: Bool, whether all are on one host, and so share memory.
        connects: Bool, whether tfdp connects the workers itself, unlike NCCL.

    Returns:
        Int, beside what the process has open before.

    Example:

    >>> needed_files(2, one_host=True, connects=True)
    42
    """
    if num_workers == 1:
        return 0
    needed = _SERVER_FILES + num_workers + _OTHER_FILES
    if connects:
        connections = (_LANES + 1) * (num_workers - 1)
        # A lane maps the memory of each member, and holds its descriptor until then.
        memory = (_LANES + 2) * num_workers if one_host else 0
        needed += _MESH_FILES + connections + memory
    return needed


def limit_for(num_workers: int, *, connects: bool) -> int:
    """Return the limit of open files that a worker needs, all on one host.

    Args:
        num_workers: Int, of the job.
        connects: Bool, see `needed_files`.
    """
    return _OWN_FILES + needed_files(num_workers, one_host=True, connects=connects)


def check_limits(num_workers: int, *, one_host: bool, connects: bool) -> None:
    """Check that this process may have the files and threads that a worker needs.

    Args:
        num_workers: Int, of the job.
        one_host: Bool, see `needed_files`.
        connects: Bool, see `needed_files`.

    Raises:
        ValueError: If a limit is lower.
    """
    if num_workers > 1:
        _check_files(num_workers, one_host=one_host, connects=connects)
        _check_threads()


def needed_threads() -> int:
    """Return how many threads a worker has, by the number of cores."""
    return _THREADS + _THREADS_PER_CORE * (os.cpu_count() or 1)


def limit_of_threads() -> int | None:
    """Return how many threads and processes this user may have, `None` for any."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    # The system does not apply it to root.
    return None if limit == resource.RLIM_INFINITY or not os.geteuid() else limit


def _check_threads() -> None:
    limit, needed = limit_of_threads(), needed_threads()
    if limit is None:
        return
    # Interpreters of benchmarks import this room without the packages of tfdp.
    import psutil

    used = sum(
        process.info["num_threads"] or 0
        for process in psutil.process_iter(["uids", "num_threads"])
        if process.info["uids"] and process.info["uids"].real == os.getuid()
    )
    if used + needed > limit:
        raise ValueError(
            f"This user may have {pluralize(limit, 'thread')} (`ulimit -u`) and has "
            f"{used}, and a worker needs {needed}. Raise the limit where the workers "
            "are started, or stop other processes."
        )


def _check_files(num_workers: int, *, one_host: bool, connects: bool) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    needed = len(os.listdir("/dev/fd")) + needed_files(
        num_workers, one_host=one_host, connects=connects
    )
    if needed > limit:
        raise ValueError(
            f"This worker may open {pluralize(limit, 'file')} (`ulimit -n`), and needs "
            f"{needed} to train with {pluralize(num_workers, 'worker')}. "
            f"{_remedy(needed)}"
        )


def lack_of_files(error: OSError) -> str | None:
    """Explain an error by the limit of open files, if that is its cause.

    Args:
        error: `OSError`.

    Returns:
        String, or `None` if the error has another cause.
    """
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"This process may open no more files: {error.strerror}, and its limit is "
        f"{limit} (`ulimit -n`). {_remedy(2 * limit)}"
    )


def _remedy(needed: int) -> str:
    enough = 1 << max(10, needed.bit_length())
    return f"Raise the limit where the workers are started, by `ulimit -n {enough}`."
