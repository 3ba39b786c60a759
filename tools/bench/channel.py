"""A worker of a benchmark takes orders on its standard input, one JSON line each."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

Arm = Callable[[int], Any]


def serve(arms: Mapping[str, Arm]) -> None:
    """Runs blocks of steps as the driver asks, until it closes the pipe.

    Args:
        arms: Mapping from name to a callable that runs so many steps and
            returns what it measured.
    """
    replies = os.fdopen(_replies, "w", buffering=1)
    print(json.dumps({"ready": sorted(arms)}), file=replies)
    while True:
        order = _orders.get()
        result = arms[order["arm"]](order["steps"])
        print(json.dumps({"result": result}), file=replies)


def take_over_output() -> None:
    """Keeps the pipe to the driver for replies; what others print is the log."""
    global _replies
    _replies = os.dup(1)
    os.dup2(2, 1)
    threading.Thread(target=_read_orders, daemon=True).start()


def _read_orders() -> None:
    for line in sys.stdin:
        _orders.put(json.loads(line))
    # The driver is gone. A collective that waits for a dead peer never ends.
    os._exit(0)


_replies = 1
_orders: queue.Queue[dict[str, Any]] = queue.Queue()
