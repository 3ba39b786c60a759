"""Start and end of MPI in this process."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any

from tfdp.communication.cluster.launchers import LaunchedRank, has_mpi4py, mpi_rank
from tfdp.communication.cluster.mpi_guard import (
    kill_after_deadline,
    shared_memory_of,
    unlink,
)
from tfdp.communication.cluster.mpi_job import MAX_PAUSE_SECONDS, Backoff, MpiJob
from tfdp.ground.forks import at_exit

# Longest time of MPI_Init if the user sets no limit. MPI itself has none: it would wait
# indefinitely for a process that never starts.
_DEFAULT_START_SECONDS = 300.0
# Tag of the first exchange: an arbitrary number that hardly any program uses, since the
# exchange uses MPI_COMM_WORLD, on which user code may also send messages.
_WORLD_TAG = 20011
# Time limit of completing the remaining requests when all processes end: a message that
# has not arrived by then never arrives.
_REST_SECONDS = 5.0

_job: MpiJob | None = None
_start_lock = threading.Lock()


def current_job() -> MpiJob | None:
    """Return the result of `start_job` in this process, or `None` before that."""
    return _job


def start_job(timeout_seconds: float | None = None) -> MpiJob:
    """Start MPI, unless it has started, and wait for all processes of the job.

    Args:
        timeout_seconds: Float or `None`, the longest wait for the others. Defaults to
            `None`: MPI's own start may take five minutes, and the wait after it has no
            limit, with a warning that names the missing ranks.

    Returns:
        The `MpiJob`.

    Raises:
        ValueError: If mpi4py is missing, belongs to another MPI than the launcher, or
            does not allow calls from threads; if the ranks run different programs.
        TimeoutError: If a process does not join in time.
    """
    global _job
    with _start_lock:
        if _job is None:
            _job = _start(timeout_seconds)
        return _job


def _start(timeout_seconds: float | None) -> MpiJob:
    """Start MPI, check the job, and wait for all of its processes.

    `start_job` calls it once in a process, and keeps the result. The argument and the
    errors are those of `start_job`.
    """
    launched = mpi_rank()
    mpi = import_mpi()
    library = library_of(mpi)
    if not mpi.Is_initialized():
        _check_library(launched, mpi.get_vendor()[0], library)
        _initialize(mpi, launched, timeout_seconds)
    _check_size(launched, mpi.COMM_WORLD.size, library)
    lock = _lock_of(mpi, library)
    world_ranks = tuple(range(mpi.COMM_WORLD.size))
    job = MpiJob(mpi, mpi.COMM_WORLD, lock, world_ranks, library)
    at_exit(functools.partial(_end, job))
    try:
        found = job.exchange({"program": _program()}, timeout_seconds, tag=_WORLD_TAG)
    finally:
        # All ranks of the host have mapped MPICH's shared memory file. So its name is
        # removed now: a job that fails would leave the file behind.
        unlink(shared_memory_of(os.getpid()))
    _check_programs([each["program"] for each in found])
    # `Dup` is collective, and returns soon since all ranks have joined the exchange.
    job.comm = mpi.COMM_WORLD.Dup()
    job.is_complete = True
    return job


def import_mpi() -> Any:
    """Import `mpi4py.MPI` without starting MPI.

    Returns:
        The module.

    Raises:
        ValueError: If mpi4py is not installed, or finds no MPI library.
    """
    if not has_mpi4py():
        raise ValueError(
            "MPI requires mpi4py, which is not installed. Install it: "
            "pip install tfdp[mpi]"
        )
    if "mpi4py.MPI" in sys.modules:
        return sys.modules["mpi4py.MPI"]
    rc = importlib.import_module("mpi4py").rc
    # By default mpi4py starts MPI at its import, and finalizes it at exit, which blocks
    # without a timeout if another process has died.
    rc.initialize = rc.finalize = False
    try:
        with warnings.catch_warnings():
            # mpi4py's warning of a launcher of another MPI is suppressed, since
            # `_check_library` reports the launcher with more advice.
            warnings.filterwarnings("ignore", "suspicious MPI", RuntimeWarning)
            return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"mpi4py cannot load an MPI library ({reason}). Install the MPI of the "
            "launcher, or one as a wheel: pip install mpich"
        ) from error


def library_of(mpi: Any) -> str:
    """Return name and version of the MPI library, such as `"Open MPI 5.0.11"`."""
    name, version = mpi.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def _check_library(launched: LaunchedRank | None, vendor: str, library: str) -> None:
    """Raise `ValueError` if the launcher belongs to another MPI than the library.

    Such a launcher does not connect the processes: they abort, or each runs alone.

    Args:
        launched: `LaunchedRank` of this process, or `None`.
        vendor: String, name of the library, such as `"Open MPI"`.
        library: String, name and version of the library.
    """
    if launched is None:
        return
    is_open = vendor == "Open MPI"
    if launched.launcher == "MPI" and not is_open:
        # Open MPI's launcher can also start another library, if that is built for PMIx.
        if "pmix" not in _configuration():
            raise ValueError(_another_mpi(launched, library, "Open MPI's"))
    elif launched.launcher == "MPICH" and is_open and "PMIX_RANK" not in os.environ:
        raise ValueError(_another_mpi(launched, library, "MPICH's or Intel MPI's"))


def _configuration() -> str:
    """Return the MPI library's description of its build, in lower case."""
    return sys.modules["mpi4py.MPI"].Get_library_version().lower()


def _check_size(launched: LaunchedRank | None, size: int, library: str) -> None:
    """Raise `ValueError` unless MPI has as many processes as the launcher started.

    Args:
        launched: `LaunchedRank` of this process, or `None`.
        size: Int, number of MPI's processes.
        library: String, name and version of the MPI library.
    """
    if launched is not None and size != launched.size:
        raise ValueError(_another_mpi(launched, library, "another"))


def _another_mpi(launched: LaunchedRank, library: str, launcher: str) -> str:
    """Format the error that mpi4py's MPI is not the one of the launcher.

    Args:
        launched: `LaunchedRank` of this process.
        library: String, name and version of mpi4py's MPI library.
        launcher: String, the possessive of the launcher's MPI, such as `"Open MPI's"`.
    """
    return (
        f"mpi4py has loaded {library}, and the job was started by {launcher} mpiexec: "
        "the processes do not see each other. Start the job with the mpiexec of "
        f"{library}, or install mpi4py for the launcher's MPI. Received: "
        f"{launched.variable}"
    )


def _initialize(
    mpi: Any, launched: LaunchedRank | None, timeout_seconds: float | None
) -> None:
    """Run MPI_Init; a guard kills this process if that exceeds the timeout.

    Args:
        mpi: The module `mpi4py.MPI`.
        launched: `LaunchedRank` of this process, for the message; or `None`.
        timeout_seconds: Float, time after which the guard prints a message and kills
            this process; or `None` for five minutes.
    """
    limit = timeout_seconds or _DEFAULT_START_SECONDS
    place = f"rank {launched.rank} of {launched.size}" if launched else "this process"
    sentence = (
        f"Waited {limit:.0f} s for MPI to start ({place}): not all processes of the "
        "job have started it. Start the same script in all of them, and check the end "
        "of their output."
    )
    with kill_after_deadline(sentence, limit):
        mpi.Init_thread(mpi.THREAD_MULTIPLE)


def _lock_of(mpi: Any, library: str) -> contextlib.AbstractContextManager:
    """Return the lock that a thread must hold to call MPI.

    It does nothing if MPI itself allows concurrent calls (`MPI_THREAD_MULTIPLE`).

    Args:
        mpi: The module `mpi4py.MPI`, initialized.
        library: String, name and version of the MPI library, for the error.

    Raises:
        ValueError: If MPI allows calls from one thread only.
    """
    level = mpi.Query_thread()
    if level == mpi.THREAD_MULTIPLE:
        return contextlib.nullcontext()
    if level == mpi.THREAD_SERIALIZED:
        return threading.RLock()
    name = "funneled" if level == mpi.THREAD_FUNNELED else "single"
    raise ValueError(
        "MPI must allow calls from several threads. Build it with thread support or, "
        "if the script initializes MPI itself, request the level MPI.THREAD_MULTIPLE, "
        f"mpi4py's default. Received: level {name!r} of {library}"
    )


def _program() -> str:
    """Return the name of the script or module that this process runs."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    name = spec.name if spec is not None else sys.argv[0] if sys.argv else ""
    return os.path.basename(name)[:200]


def _check_programs(programs: Sequence[str]) -> None:
    """Raise `ValueError` unless all ranks run the same program.

    Args:
        programs: Sequence of strings, the names of the programs, in the order of ranks.
    """
    if len(set(programs)) > 1:
        first = programs[0]
        rank, other = next((r, p) for r, p in enumerate(programs) if p != first)
        raise ValueError(
            "All ranks of an MPI job must run the same program: mpiexec -n "
            f"{len(programs)} python train.py. Received: rank 0 runs {first!r}, rank "
            f"{rank} runs {other!r}"
        )


def _end(job: MpiJob) -> None:
    """Finalize MPI at the end of this process, unless that would block.

    A launcher treats a process that ends without `MPI_Finalize` as failed and ends the
    others, as it should after an error.
    """
    if job.mpi.Is_finalized():
        return
    job.close_communicators("the process has ended")
    # `sys.last_value` is set after an uncaught exception. Other ranks may then wait for
    # this one in a collective, so MPI cannot be finalized.
    has_failed = getattr(sys, "last_value", None) is not None
    is_ours = importlib.import_module("mpi4py").rc.finalize is False
    if job.is_complete and not has_failed and _wait_until_finalizable(job):
        if is_ours:
            job.mpi.Finalize()
    elif not is_ours:
        job.comm.Abort(1)  # else mpi4py finalizes MPI at exit, which blocks


def _wait_until_finalizable(job: MpiJob) -> bool:
    """Wait until all processes are about to exit; return whether MPI can be finalized.

    It can unless a process has pending requests. Processes poll with pauses, since one
    may run for long after the others. If one has failed, the launcher ends all.
    """
    with job.lock:
        barrier = job.comm.Ibarrier()
    backoff = Backoff(MAX_PAUSE_SECONDS)
    while True:
        with job.lock:
            if barrier.Test():
                break
        backoff.pause()
    is_finished = job.finish_kept_requests(_REST_SECONDS)
    try:
        ends = job.exchange({"is_finished": is_finished}, _REST_SECONDS)
    except TimeoutError:
        return False
    return all(each["is_finished"] for each in ends)
