"""Kill processes with all that they have started, also when their launcher is gone.

Run as a script, by its path, this file is the guard of a job: a process that outlives
a launcher killed by SIGKILL. It waits for the pipe from the launcher to close.

Why not `prctl(PR_SET_PDEATHSIG)`, which the kernel would see to: it has to be
called in the child between fork and exec, where Python code is not safe; and
it reaches the workers but not the processes that they start, such as the pool
of a `PyDataset`, which would wait for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import signal
import sys
import time
from collections.abc import Collection

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # of <linux/prctl.h>


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends; Linux only.

    So nobody who ends at once in favour of a child, in a session of its own and with
    another environment, gets out of sight.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Return the ids of this process's children that were started by its main thread.

    Zombies and adopted orphans are among them.
    """
    pid = os.getpid()
    with contextlib.suppress(OSError):
        # A hundred times faster than to look at all processes, so that one that lives
        # for milliseconds is still there.
        text = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii")
        return {int(word) for word in text.split()}
    return {child.pid for child in psutil.Process().children()}


def reap_children(others: Collection[int]) -> None:
    """Reap the children that have ended, but for some.

    Args:
        others: Ids of children that somebody else reaps.
    """
    for pid in children().difference(others):
        _has_ended(pid)


def kill_children(
    others: Collection[int],
    keep_zombies: Collection[int],
    timeout_seconds: float = 5.0,
) -> None:
    """Kill and reap all descendants; this process has to `adopt_orphans`.

    Args:
        others: Ids of children that are left alone.
        keep_zombies: Ids of children that are killed and not reaped.
        timeout_seconds: Float, when to give up: a process inside a system call
            that cannot be interrupted does not die. Defaults to `5.0`.
    """
    done = set(others)
    deadline = time.monotonic() + timeout_seconds
    # Who has ended has left its children to us before, so that an end is known one
    # round before the list in which nobody else stands.
    while (left := children() - done) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            if pid in keep_zombies and _has_ended(pid, os.WNOWAIT):
                done.add(pid)
            elif pid not in keep_zombies:
                _has_ended(pid)
        time.sleep(0.001)


def _has_ended(pid: int, options: int = 0) -> bool:
    """Tell whether a child has ended, and reap it unless `os.WNOWAIT` is given."""
    try:
        return bool(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | options))
    except ChildProcessError:
        return True


def find_processes(sessions: Collection[int], job: str = "") -> list[psutil.Process]:
    """Find the running processes of some sessions and all that these have started.

    Args:
        sessions: Ids of sessions, each of them that of the process that leads it.
        job: String, what stands in the `TF_CONFIG` of further processes: one may have
            left its session, or changed its environment, but hardly both. Defaults to
            none.

    Returns:
        List of `psutil.Process`, zombies left out.
    """
    found: dict[int, psutil.Process] = {}
    others: list[tuple[psutil.Process, int]] = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            others.append((process, process.ppid()))
            is_of_job = job and job in _tf_config_of(process)
            if os.getsid(process.pid) in sessions or is_of_job:
                found[process.pid] = process
        except (psutil.Error, OSError):
            continue  # it has just ended
    size = 0
    while len(found) > size:
        size = len(found)
        found.update({p.pid: p for p, parent in others if parent in found})
    return list(found.values())


def _tf_config_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("TF_CONFIG", "")
    except (psutil.Error, OSError):
        return ""  # another user's


def kill_processes(
    sessions: Collection[int], job: str = "", timeout_seconds: float = 5.0
) -> None:
    """Kill processes with SIGKILL until none is left.

    Args:
        sessions: Ids of sessions, as for `find_processes`.
        job: String, as for `find_processes`. Defaults to none.
        timeout_seconds: Float, when to give up: a process inside a system
            call that cannot be interrupted does not die. Defaults to `5.0`.
    """
    deadline = time.monotonic() + timeout_seconds
    while processes := find_processes(sessions, job):
        for process in processes:
            try:
                process.kill()
            except psutil.Error:
                continue
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def main() -> None:
    """Wait for the launcher to die; read the ids of sessions until then."""
    # What ends the launcher must not end its guard first.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    job = sys.argv[1]
    sessions = [int(line) for line in sys.stdin]
    kill_processes(sessions, job)
    # A worker that was just being started may not have shown itself yet.
    time.sleep(0.3)
    kill_processes(sessions, job)


if __name__ == "__main__":
    main()
