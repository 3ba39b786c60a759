"""Open files and threads that a worker needs, compared with the limits of a process."""

from __future__ import annotations

import errno
import os
import resource

from tfdp.ground.text import pluralize

# File descriptors of TensorFlow's server with two workers: polling and sockets.
# Measured in /proc/self/fd with TensorFlow 2.19 to 2.21; each further worker adds one
# connection.
_SERVER_FILES = 8
# File descriptors of a worker's store: listening sockets, the selector of its thread,
# the socket pair that wakes the thread, and the worker's own connection. The store of
# worker 0 also has a connection to each worker, which is not counted here.
_STORE_FILES = 8
# File descriptors of the mesh, which connects each worker to every other one: its
# listening sockets, and those of the selector of its thread.
_MESH_FILES = 5
# Lanes of a worker, each with a connection to every other worker: four channels for
# collectives of replicas, and one for small values of the workers.
_NUM_LANES = 5
# Estimate of the threads of a worker, and of TensorFlow's server. On two cores
# /proc/self/status shows at most 35 in a `fit` over the direct transport, and 129 with
# the server (TensorFlow 2.21).
_THREADS, _THREADS_PER_CORE, _SERVER_THREADS = 24, 8, 96
# File descriptors that Python opens at its start, and an estimate of those for a data
# file, a log and the like.
_PYTHON_FILES = _OTHER_FILES = 8


def needed_files(num_workers: int, *, one_host: bool, connects: bool) -> int:
    """Count the files that a worker opens to train with others.

    Args:
        num_workers: Int, number of workers of the job.
        one_host: Bool, whether all workers are on one host, and so share memory.
        connects: Bool, whether tfdp connects the workers, rather than TensorFlow's
            server, which NCCL needs.

    Returns:
        Int, files in addition to those that the process has open before.

    Example:

    >>> needed_files(2, one_host=True, connects=True)
    43
    """
    if num_workers == 1:
        return 0
    needed = _STORE_FILES + num_workers + _OTHER_FILES
    if not connects:
        needed += _SERVER_FILES + num_workers
    else:
        connections = (_NUM_LANES + 1) * (num_workers - 1)
        # While a lane maps the shared memory of a member, `mmap` holds a duplicate of
        # its descriptor. Lanes that are still being opened also hold the originals, for
        # which two further sets of descriptors are counted. Too low a count would let
        # workers start that fail at the limit of open files later.
        memory = (_NUM_LANES + 2) * num_workers if one_host else 0
        needed += _MESH_FILES + connections + memory
    return needed


def limit_for(num_workers: int, *, connects: bool) -> int:
    """Return the limit of open files that a worker needs if all are on one host.

    Args:
        num_workers: Int, number of workers of the job.
        connects: Bool, whether tfdp connects the workers, rather than TensorFlow's
            server.
    """
    return _PYTHON_FILES + needed_files(num_workers, one_host=True, connects=connects)


def check_limits(num_workers: int, *, one_host: bool, connects: bool) -> None:
    """Check that the limits of this process allow the files and threads of a worker.

    Args:
        num_workers: Int, number of workers of the job.
        one_host: Bool, whether all workers are on one host, as in `needed_files`.
        connects: Bool, whether tfdp connects the workers, rather than TensorFlow's
            server.

    Raises:
        ValueError: If a limit is too low.
    """
    if num_workers > 1:
        _check_files(num_workers, one_host=one_host, connects=connects)
        _check_threads(connects=connects)


def needed_threads(*, connects: bool) -> int:
    """Estimate the number of threads of a worker from the number of cores.

    Args:
        connects: Bool, whether tfdp connects the workers, rather than TensorFlow's
            server.
    """
    own = _THREADS + _THREADS_PER_CORE * (os.cpu_count() or 1)
    return own if connects else own + _SERVER_THREADS


def limit_of_threads() -> int | None:
    """Return this user's limit of threads and processes, `None` if unlimited."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    # Linux does not apply RLIMIT_NPROC to root, which therefore has no limit.
    return None if limit == resource.RLIM_INFINITY or not os.geteuid() else limit


def _check_threads(*, connects: bool) -> None:
    """Raise `ValueError` if one more worker exceeds this user's limit of threads.

    Args:
        connects: Bool, whether tfdp connects the workers, rather than TensorFlow's
            server, which needs further threads.
    """
    limit, needed = limit_of_threads(), needed_threads(connects=connects)
    if limit is None:
        return
    # The import is here, since benchmarks import this module without psutil.
    import psutil

    used = sum(
        process.info["num_threads"] or 0
        for process in psutil.process_iter(["uids", "num_threads"])
        if process.info["uids"] and process.info["uids"].real == os.getuid()
    )
    if used + needed > limit:
        raise ValueError(
            f"This user may have {pluralize(limit, 'thread')} (`ulimit -u`) and has "
            f"{used}, but a worker needs {needed}. Raise the limit where the workers "
            "are started, or stop other processes."
        )


def _check_files(num_workers: int, *, one_host: bool, connects: bool) -> None:
    """Raise `ValueError` if the limit of open files is below what a worker needs.

    Args:
        num_workers: Int, number of workers of the job.
        one_host: Bool, whether all workers are on one host, as in `needed_files`.
        connects: Bool, whether tfdp connects the workers, rather than TensorFlow's
            server.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    needed = len(os.listdir("/dev/fd")) + needed_files(
        num_workers, one_host=one_host, connects=connects
    )
    if needed > limit:
        raise ValueError(
            f"This worker may open {pluralize(limit, 'file')} (`ulimit -n`), but needs "
            f"{needed} to train with {pluralize(num_workers, 'worker')}. "
            f"{_remedy(needed)}"
        )


def lack_of_files(error: OSError) -> str | None:
    """Return an explanation of an error that the limit of open files has caused.

    Args:
        error: `OSError`, from an attempt to open a file or a socket.

    Returns:
        String, or `None` if the error has another cause.
    """
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"This process cannot open more files: {error.strerror}, and its limit is "
        f"{limit} (`ulimit -n`). {_remedy(2 * limit)}"
    )


def _remedy(needed: int) -> str:
    """Return a sentence that advises to raise the limit of open files.

    Args:
        needed: Int, number of files; the limit in the advice is a larger power of two.
    """
    enough = 1 << max(10, needed.bit_length())
    return f"Raise the limit where the workers are started: `ulimit -n {enough}`."
