"""Deadline of a worker that joins its cluster, kept by a process of its own.

TensorFlow joins in native code with the interpreter locked, and has no limit for some
of its waits: when another worker dies in that moment, no thread and no signal handler
of Python's runs any more. Run as a script, by its path, this file is the guard.
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
# The first that a job makes; one that was removed has a word behind it.
_SHARED_MEMORY = re.compile(r"/dev/shm/mpich_shm_[0-9a-f]+_0$", re.MULTILINE)


@contextlib.contextmanager
def join_deadline(others: Sequence[str], limit_seconds: float) -> Iterator[None]:
    """Kill this process if the block does not end in time.

    Args:
        others: Sequence of strings, `"rank=host:port"` of the other workers.
        limit_seconds: Float.
    """
    with _guard(limit_seconds, "--others", *others):
        yield


@contextlib.contextmanager
def start_deadline(sentence: str, limit_seconds: float) -> Iterator[None]:
    """Kill this process, with a sentence, if the block does not end in time.

    Args:
        sentence: String, what is then said.
        limit_seconds: Float.
    """
    with _guard(limit_seconds, "--say", sentence):
        yield


@contextlib.contextmanager
def _guard(limit_seconds: float, *arguments: str) -> Iterator[None]:
    # Nothing of the user's is imported, so that it starts in a moment.
    script = [sys.executable, "-I", "-S", __file__]
    own = [str(os.getpid()), str(limit_seconds)]
    # In a session of its own: a launcher kills the whole group of a rank.
    guard = subprocess.Popen(
        [*script, *own, *arguments], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        # By hand: a process that was forked meanwhile has the pipe as well, whose end
        # is for a worker that is killed.
        guard.kill()
        guard.communicate()


def explain(others: Sequence[str], limit_seconds: float) -> str:
    """Format the error message of a join that has timed out.

    Args:
        others: Sequence of strings, `"rank=host:port"`.
        limit_seconds: Float, how long this worker has waited.

    Returns:
        String.

    Example:

    >>> explain(["1=localhost:1"], 60.0)
    'Waited 60 s to join the cluster: worker 1 (localhost:1) does not answer. ...'
    """
    pairs = [other.split("=", 1) for other in others]
    lost = [f"worker {r} ({at})" for r, at in pairs if not _accepts_connections(at)]
    cause = f"{', '.join(lost)} does not answer" if lost else "one of them stands still"
    return (
        f"Waited {limit_seconds:.0f} s to join the cluster: {cause}. All workers were "
        "there before: see the end of their output, and start all of them again."
    )


def _accepts_connections(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        target = (host.strip("[]"), int(port))
        socket.create_connection(target, timeout=_PROBE_SECONDS).close()
    except OSError:
        return False
    return True


def shared_memory_of(process: int) -> set[str]:
    """Files of the memory by which MPICH connects the ranks of a host.

    MPICH opens such a file by name in its start only, and removes it in `MPI_Finalize`,
    to which a job that fails does not come: 2 MB would stay. What a process of a job
    has mapped is that job's.

    Args:
        process: Int, the id of a process, which has mapped them.

    Returns:
        Set of strings, paths.
    """
    with contextlib.suppress(OSError):
        maps = pathlib.Path(f"/proc/{process}/maps").read_text("utf-8", "replace")
        return set(_SHARED_MEMORY.findall(maps))
    return set()


def unlink(paths: Iterable[str]) -> None:
    """Remove files; those that are missing were removed by another process."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def main() -> None:
    """Wait until the worker has joined, and kill it at the limit."""
    # Ctrl-C is for the worker; while that one cannot hear it, this one stays.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker, limit = int(sys.argv[1]), float(sys.argv[2])
    mode, *words = sys.argv[3:]
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
    said = explain(words, limit) if mode == "--others" else words[0]
    print(f"tfdp: {said}", file=sys.stderr, flush=True)
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)


if __name__ == "__main__":
    main()
