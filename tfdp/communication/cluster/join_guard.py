"""Deadline of a worker that joins its cluster, enforced by a separate process.

TensorFlow joins in native code while it holds the GIL, and some of its waits have no
timeout: if another worker dies during the join, no Python thread or signal handler can
run. The process that enforces the deadline, the guard, runs this file as a script.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

_PROBE_SECONDS = 1.0
_POLL_SECONDS = 0.5
# First shared memory file of an MPICH job. The pattern ends at the line's end, because
# Linux appends "(deleted)" to a file that was removed.
_SHARED_MEMORY = re.compile(r"/dev/shm/mpich_shm_[0-9a-f]+_0$", re.MULTILINE)


@contextlib.contextmanager
def join_deadline(others: Sequence[str], limit_seconds: float) -> Iterator[None]:
    """Kill this process if the block does not end in time.

    Args:
        others: Sequence of strings, `"rank=host:port"` of the other workers.
        limit_seconds: Float, time until the process is killed.
    """
    with _guard(limit_seconds, "--others", *others):
        yield


@contextlib.contextmanager
def start_deadline(sentence: str, limit_seconds: float) -> Iterator[None]:
    """Print a sentence and kill this process if the block does not end in time.

    Args:
        sentence: String, printed before the process is killed.
        limit_seconds: Float, time until the process is killed.
    """
    with _guard(limit_seconds, "--say", sentence):
        yield


@contextlib.contextmanager
def _guard(limit_seconds: float, *arguments: str) -> Iterator[None]:
    """Run the guard process, `main`, during the block.

    Args:
        limit_seconds: Float, time until this process is killed.
        *arguments: Strings, further arguments of the guard: `"--others"` and addresses,
            or `"--say"` and a sentence.
    """
    # Without site packages and user settings the interpreter starts fast.
    script = [sys.executable, "-I", "-S", __file__]
    limits = [str(os.getpid()), str(limit_seconds)]
    # The guard has its own session, because a launcher kills a rank's process group.
    guard = subprocess.Popen(
        [*script, *limits, *arguments], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        # Closing the pipe would not end the guard: a process that was forked meanwhile
        # may hold the pipe open, too.
        guard.kill()
        guard.communicate()


def explain(others: Sequence[str], limit_seconds: float) -> str:
    """Format the message of a join that has timed out.

    Args:
        others: Sequence of strings, `"rank=host:port"`.
        limit_seconds: Float, time that this worker has waited.

    Returns:
        String.

    Example:

    >>> explain(["1=localhost:1"], 60.0)
    'Waited 60 s to join the cluster: worker 1 (localhost:1) does not answer. ...'
    """
    pairs = [other.split("=", 1) for other in others]
    lost = [f"worker {r} ({at})" for r, at in pairs if not _accepts_connections(at)]
    cause = f"{', '.join(lost)} does not answer" if lost else "one of them hangs"
    return (
        f"Waited {limit_seconds:.0f} s to join the cluster: {cause}. All workers had "
        "started. Check the end of their output, and restart all of them."
    )


def _accepts_connections(address: str) -> bool:
    """Whether a worker accepts a TCP connection in time."""
    host, _, port = address.rpartition(":")
    try:
        target = (host.strip("[]"), int(port))
        socket.create_connection(target, timeout=_PROBE_SECONDS).close()
    except OSError:
        return False
    return True


def shared_memory_of(process: int) -> set[str]:
    """Return the files of the shared memory that MPICH has mapped in a process.

    MPICH opens such a file by name only at its start, and removes it in `MPI_Finalize`,
    which a job that fails does not reach: 2 MB would remain. A file that a process has
    mapped belongs to the job of that process.

    Args:
        process: Int, id of a process of the job.

    Returns:
        Set of strings, paths.
    """
    with contextlib.suppress(OSError):
        maps = pathlib.Path(f"/proc/{process}/maps").read_text("utf-8", "replace")
        return set(_SHARED_MEMORY.findall(maps))
    return set()


def unlink(paths: Iterable[str]) -> None:
    """Remove files; ignore those that another process has removed already."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def main() -> None:
    """Wait until the worker has joined, and kill it if its time limit expires."""
    # Ctrl-C is for the worker; a worker that cannot handle it still needs its guard.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker, limit = int(sys.argv[1]), float(sys.argv[2])
    mode, *details = sys.argv[3:]
    memory: set[str] = set()
    deadline = time.monotonic() + limit
    has_ended = False
    while not has_ended and (left := deadline - time.monotonic()) > 0:
        pipe, _, _ = select.select([sys.stdin], [], [], min(left, _POLL_SECONDS))
        memory |= shared_memory_of(worker)
        has_ended = bool(pipe) or os.getppid() != worker
    unlink(memory)
    if has_ended:
        return
    message = explain(details, limit) if mode == "--others" else details[0]
    print(f"tfdp: {message}", file=sys.stderr, flush=True)
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)


if __name__ == "__main__":
    main()
