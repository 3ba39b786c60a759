"""Kill processes with all that they have started, also when their launcher is gone.

Run as a script, by its path, this file is the guard of a job: a process that outlives
a launcher killed by SIGKILL. It waits for the pipe from the launcher to close.

Why not `prctl(PR_SET_PDEATHSIG)`, which the kernel would see to: it has to be
called in the child between fork and exec, where Python code is not safe; and
it reaches the workers but not the processes that they start, such as the pool
of a `PyDataset`, which would wait for ever.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection

import psutil


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
