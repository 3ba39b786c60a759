"""Who of the workers is still there: signs of life, verdicts, and what follows."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Sequence
from types import TracebackType

from tfdp.coordination.exchange import Agreement
from tfdp.coordination.watch.errors import WorkerLost
from tfdp.coordination.watch.watchdog import Watchdog

__all__ = ["Watchdog", "WorkerLost", "watch"]

# A process is a worker of one cluster only.
_watchdogs: list[Watchdog] = []


def watch(
    agreement: Agreement, addresses: Sequence[str], limit_seconds: float | None
) -> Watchdog:
    """Looks after the other workers of an agreement from now on.

    Args:
        agreement: `Agreement` between the workers.
        addresses: Sequence of strings, `"host:port"` by rank.
        limit_seconds: Float or `None`, after which a worker that gives no sign of
            life is lost; of the first call in a process.

    Returns:
        The `Watchdog` of this process.
    """
    if not _watchdogs:
        watchdog = Watchdog(agreement, addresses, limit_seconds)
        watchdog.start()
        atexit.register(watchdog.leave)
        _watchdogs.append(watchdog)
        _explain_uncaught(watchdog)
    agreement.check = _watchdogs[0].check
    agreement.guard = _watchdogs[0].explaining
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
