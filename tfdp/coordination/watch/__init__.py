"""Who of the workers is still there: signs of life, verdicts, and what follows."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Sequence
from types import TracebackType

from tfdp.coordination.watch.errors import WorkerLost
from tfdp.coordination.watch.watchdog import Watchdog
from tfdp.coordination.worker_group import WorkerGroup

__all__ = ["Watchdog", "WorkerLost", "watch"]

# A process is a worker of one cluster only.
_watchdogs: list[Watchdog] = []


def watch(
    worker_group: WorkerGroup, addresses: Sequence[str], limit_seconds: float | None
) -> Watchdog:
    """Watch the other workers of a group from now on.

    Args:
        worker_group: `WorkerGroup` between the workers.
        addresses: Sequence of strings, `"host:port"` by rank.
        limit_seconds: Float or `None`, after which a worker that gives no sign of
            life is lost; of the first call in a process.

    Returns:
        The `Watchdog` of this process.
    """
    if not _watchdogs:
        watchdog = Watchdog(worker_group, addresses, limit_seconds)
        watchdog.start()
        atexit.register(watchdog.leave)
        _watchdogs.append(watchdog)
        _explain_uncaught(watchdog)
    worker_group.check = _watchdogs[0].check
    worker_group.guard = _watchdogs[0].explaining
    return _watchdogs[0]


def _explain_uncaught(watchdog: Watchdog) -> None:
    """Lets the watchdog speak after the traceback that a script ends with."""
    before = sys.excepthook

    def show(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        before(kind, error, trace)
        watchdog.explain_end(error)

    sys.excepthook = show
