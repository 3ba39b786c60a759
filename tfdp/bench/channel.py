"""A worker of a benchmark takes orders on its standard input, one JSON line each."""

from __future__ import annotations

import gc
import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

Arm = Callable[[int], Any]


Made = TypeVar("Made")


class Arms(Protocol):
    """Callables by name, such as a dict."""

    def __getitem__(self, name: str, /) -> Arm: ...


class OnDemand(Generic[Made]):
    """Things that are made when they are first asked for; one group of them is kept.

    All models of a benchmark at once would fill the memory of a small machine.

    Args:
        make: Callable that makes the thing of a name.
        group_of: Callable from a name to its group. Things of one group take turns;
            when one of another group is asked for, they are dropped.

    Example:

    >>> arms = OnDemand(lambda name: name.upper(), lambda name: name[0])
    >>> arms["ab"]
    'AB'
    """

    def __init__(
        self, make: Callable[[str], Made], group_of: Callable[[str], Hashable]
    ) -> None:
        self._make, self._group_of = make, group_of
        self._group: Hashable = None
        self._made: dict[str, Made] = {}

    def __getitem__(self, name: str) -> Made:
        if self._group_of(name) != self._group:
            self._made.clear()
            gc.collect()
            self._group = self._group_of(name)
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]


def serve(arms: Arms) -> None:
    """Runs blocks of steps as the driver asks, until it closes the pipe.

    Args:
        arms: Mapping from a name to a callable that runs so many steps and
            returns what it measured.
    """
    replies = os.fdopen(_replies, "w", buffering=1)
    print(json.dumps({"ready": True}), file=replies)
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
