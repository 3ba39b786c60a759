"""Worker liveness: heartbeats, failure detection, shutdown.

Reading order:
    heartbeat: publish this worker's heartbeat, receive those of the others
    failure_detector: decide from heartbeats and probed ports which worker is lost
    stragglers: warn of workers that are behind, and of steps in which all wait
    data_watch: detect a data source that yields no batch, and end the process
    recorder: write this worker's flight record at trouble, and on a signal
    watchdog: run all checks, raise an error that names the lost worker, end the process
    errors: exceptions of a lost worker, message and exit code
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

from tfdp.communication.coordination.watch.data_watch import DataWatchdog
from tfdp.communication.coordination.watch.errors import (
    COLLECTIVE_FAILED,
    ClusterChanges,
    NotConnected,
    PeerStepFailed,
    WorkerLost,
    WorkersChanged,
    WorkersJoin,
)
from tfdp.communication.coordination.watch.recorder import listen
from tfdp.communication.coordination.watch.watchdog import Watchdog
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.communication.store import Membership
from tfdp.ground.text import say

__all__ = [
    "COLLECTIVE_FAILED",
    "ClusterChanges",
    "NotConnected",
    "PeerStepFailed",
    "Watchdog",
    "WorkerLost",
    "WorkersChanged",
    "WorkersJoin",
    "start_data_watchdog",
    "watch",
]

# Watchdogs of this process. Each list has at most one item, since a process is a worker
# of one cluster at a time.
_watchdogs: list[Watchdog] = []
_data_watchdogs: list[DataWatchdog] = []


def watch(
    worker_group: WorkerGroup, membership: Membership, limit_seconds: float | None
) -> Watchdog:
    """Start failure detection for the workers of a group, once for a membership.

    Waits of the group then raise an error if a worker is lost. The first call in a
    process also installs an exception hook, which names the lost worker, and the
    handlers of the signals that request a flight record.

    Args:
        worker_group: `WorkerGroup` between the workers, whose hooks are set.
        membership: `Membership` of this process.
        limit_seconds: Float or `None`, the time limit of the `Watchdog`. Only the first
            call for a membership sets it.

    Returns:
        The `Watchdog` of this process.
    """
    if not _watchdogs or _watchdogs[0].membership is not membership:
        watchdog = Watchdog(membership, limit_seconds)
        watchdog.start()
        membership.leaving.append(watchdog.leave)
        if not _watchdogs:
            _explain_uncaught()
            listen(lambda: _watchdogs[0].record_on_signal())
        _watchdogs[:] = [watchdog]
    worker_group.check = _watchdogs[0].check
    worker_group.check_on_thread = _watchdogs[0].check_on_thread
    worker_group.progress_of = _watchdogs[0].progress_of
    worker_group.guard = _watchdogs[0].translate_errors
    return _watchdogs[0]


def start_data_watchdog(limit_seconds: float) -> None:
    """Start a thread, once, that ends this process if its data source hangs.

    For a process without other workers.

    Args:
        limit_seconds: Float, longest wait for a batch. Only the first call in a process
            sets it.
    """
    if not _data_watchdogs:
        _data_watchdogs.append(DataWatchdog(limit_seconds))
        _data_watchdogs[0].start()


def _explain_uncaught() -> None:
    """Install an exception hook that names the lost worker below the traceback."""
    before = sys.excepthook

    def show(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Print an uncaught exception and the lost worker; for Ctrl-C only one line."""
        if issubclass(kind, KeyboardInterrupt):
            # Ctrl-C interrupts all workers, and their tracebacks would hide the output.
            where = _line_of_script(trace)
            say(f"interrupted{where}")
            return
        before(kind, error, trace)
        _watchdogs[0].explain_uncaught(error)

    sys.excepthook = show


def _line_of_script(trace: TracebackType | None) -> str:
    """Describe the last frame of a traceback that is in the user's own code.

    Returns:
        String, such as `" at line 12 of /home/me/train.py"`, or `""` if there is none.
    """
    paths = sysconfig.get_paths()
    packages = [paths[name] for name in ("purelib", "platlib", "stdlib")]
    tfdp_folder = str(Path(__file__).parents[3])
    frames = [
        frame
        for frame in traceback.extract_tb(trace)
        if not frame.filename.startswith((*packages, tfdp_folder, "<frozen "))
    ]
    if not frames:
        return ""
    return f" at line {frames[-1].lineno} of {frames[-1].filename}"
