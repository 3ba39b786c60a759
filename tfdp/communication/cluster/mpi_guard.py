"""Deadline of the start of MPI, enforced by a separate process.

`MPI_Init` may wait in native code without a timeout for a process that has died, while
no Python thread or signal handler can run. The process that enforces the deadline, the
guard, runs this file as a script.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator

_POLL_SECONDS = 0.5
# Path of the first shared memory file of an MPICH job, in /proc/PID/maps. The pattern
# ends at the line's end, because Linux appends "(deleted)" to a removed file.
_SHARED_MEMORY = re.compile(r"/dev/shm/mpich_shm_[0-9a-f]+_0$", re.MULTILINE)


@contextlib.contextmanager
def kill_after_deadline(sentence: str, limit_seconds: float) -> Iterator[None]:
    """Print a sentence and kill this process if the block does not end in time.

    Args:
        sentence: String, printed before the process is killed.
        limit_seconds: Float, time until the process is killed.
    """
    # Without site packages and user settings (`-I -S`), the guard's interpreter starts
    # fast.
    script = [sys.executable, "-I", "-S", __file__]
    limits = [str(os.getpid()), str(limit_seconds)]
    # The guard has its own session: if a launcher kills the process group of a rank,
    # the guard must still remove the rank's shared memory.
    guard = subprocess.Popen(
        [*script, *limits, sentence], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        # Closing the pipe would not end the guard: a process that was forked meanwhile
        # may also hold the pipe open.
        guard.kill()
        guard.communicate()


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
    """Run the guard: kill the parent process if MPI has not started at the deadline.

    `kill_after_deadline` starts it with the process's id, the time limit in seconds and
    the sentence to print as arguments. MPICH's shared memory of the process is removed
    at the deadline, or if the process ends before.
    """
    # The guard ignores Ctrl-C: the guarded process may be blocked in native code and
    # unable to handle it, and then still needs the guard.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process, limit, sentence = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    memory: set[str] = set()
    deadline = time.monotonic() + limit
    has_ended = False
    while not has_ended and (left := deadline - time.monotonic()) > 0:
        pipe, _, _ = select.select([sys.stdin], [], [], min(left, _POLL_SECONDS))
        memory |= shared_memory_of(process)
        has_ended = bool(pipe) or os.getppid() != process
    unlink(memory)
    if has_ended:
        return
    print(f"tfdp: {sentence}", file=sys.stderr, flush=True)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    main()
