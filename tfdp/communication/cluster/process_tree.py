"""Kill processes together with their descendants, even after their launcher has died.

Run as a script, this file is the guard of a job: a process that outlives a launcher
killed by SIGKILL. It waits for the pipe from the launcher to close.

`prctl(PR_SET_PDEATHSIG)` is no alternative: it must be called in the child between
fork and exec, where Python code is not safe; and it kills the workers but not the
processes that they start, such as the pool of a `PyDataset`, which would wait
indefinitely.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import re
import signal
import sys
import time
from collections.abc import Collection

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # of <linux/prctl.h>: Python has no name for it
# Time in seconds after which kills are not repeated any more, since a process in an
# uninterruptible system call does not die.
_KILL_SECONDS = 5.0


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent ends; Linux only.

    Otherwise a daemon could not be found: its parent ends at once, and its session and
    its environment differ from those of the job.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Return the process ids of the children that the main thread has started.

    Zombies and adopted orphans are included.
    """
    pid = os.getpid()
    with contextlib.suppress(OSError):
        # This file is read in a hundredth of the time that listing all processes takes,
        # so children are found even if they live only for milliseconds.
        text = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii")
        return {int(word) for word in text.split()}
    return {child.pid for child in psutil.Process().children()}


def reap_children(others: Collection[int]) -> None:
    """Reap the children that have ended, except those in `others`.

    Args:
        others: Ids of children that are not reaped here, since other code reaps them.
    """
    for pid in children().difference(others):
        _has_ended(pid)


def kill_children(others: Collection[int], keep_zombies: Collection[int]) -> None:
    """Kill and reap all descendants, in at most five seconds; needs `adopt_orphans`.

    Args:
        others: Ids of children that are not killed.
        keep_zombies: Ids of children that are killed and not reaped.
    """
    done = set(others)
    deadline = time.monotonic() + _KILL_SECONDS
    # Killing a child makes its children orphans, which this process adopts. The kernel
    # reparents them before the child can be reaped, so they are in the next list of
    # children at the latest, and are also killed.
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
    """Return whether a child has ended; reap it unless `options` is `os.WNOWAIT`."""
    try:
        return bool(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | options))
    except ChildProcessError:
        return True


def has_signal_handler(pid: int, signum: int) -> bool:
    """Return whether a process has a handler for a signal; `False` if unknown.

    Args:
        pid: Int, id of the process.
        signum: Int, number of the signal.

    Example:

    >>> has_signal_handler(os.getpid(), signal.SIGKILL)
    False
    """
    with contextlib.suppress(OSError):
        text = pathlib.Path(f"/proc/{pid}/status").read_text("ascii", "replace")
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", text, re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (signum - 1) & 1)
    return False


def find_processes(sessions: Collection[int], job: str = "") -> list[psutil.Process]:
    """Find the running processes of some sessions and their descendants.

    Args:
        sessions: Ids of sessions, each equal to the id of the session's first process.
        job: String; processes with this text in their `TF_CONFIG` are also found, since
            a process may leave its session or change its environment, but rarely does
            both. Defaults to none.

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
            continue  # the process has ended meanwhile: it need not be found
    size = 0
    while len(found) > size:
        size = len(found)
        found.update({p.pid: p for p, parent in others if parent in found})
    return list(found.values())


def _tf_config_of(process: psutil.Process) -> str:
    """Return the `TF_CONFIG` of a process, or `""`."""
    try:
        return process.environ().get("TF_CONFIG", "")
    except (psutil.Error, OSError):
        return ""  # only its own user can read the environment of a process


def kill_processes(sessions: Collection[int], job: str = "") -> None:
    """Kill processes with SIGKILL until none is left, for at most five seconds.

    Args:
        sessions: Ids of sessions, whose processes and descendants are killed.
        job: String; processes with this text in their `TF_CONFIG` are also killed.
            Defaults to `""`, for none.
    """
    deadline = time.monotonic() + _KILL_SECONDS
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
    """Run the guard: read session ids until the launcher dies; kill their processes.

    The ids arrive on the standard input, one on each line; the input ends when the
    launcher dies. The only argument is the text by which `kill_processes` finds the
    job's processes.
    """
    # A signal to the whole process group must not end the guard before the launcher.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    job = sys.argv[1]
    sessions = [int(line) for line in sys.stdin]
    kill_processes(sessions, job)
    # The kill is repeated after a pause: a worker that the launcher was starting when
    # it died may not have been found the first time.
    time.sleep(0.3)
    kill_processes(sessions, job)


if __name__ == "__main__":
    main()
