"""Worker side of a benchmark: orders on standard input, one line of JSON each."""

from __future__ import annotations

import gc
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TextIO, TypeVar

Arm = Callable[[int], Any]


Made = TypeVar("Made")


class Arms(Protocol):
    """Callables by name, such as a dict."""

    def __getitem__(self, name: str, /) -> Arm: ...


class OnDemand(Generic[Made]):
    """Objects made on first use; one group of them is kept.

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


def work(make_arms: Callable[[dict[str, Any]], Arms]) -> None:
    """Run blocks of steps as the driver asks, until it closes the pipe.

    The pipe to the driver is kept for replies; what others print is the log.

    Args:
        make_arms: Callable that is given what the driver told this worker, and
            returns a mapping from a name to a callable that runs so many steps and
            returns what it measured.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    orders: queue.Queue[dict[str, Any]] = queue.Queue()
    pipe = sys.stdin
    # A forked process, such as a loader of PyTorch's, closes `sys.stdin`, and would
    # wait for the thread that reads it.
    sys.stdin = open(os.devnull)  # noqa: SIM115
    threading.Thread(target=_read_orders, args=(pipe, orders), daemon=True).start()
    arms = make_arms(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=replies)
    while True:
        order = orders.get()
        result = arms[order["arm"]](order["steps"])
        print(json.dumps({"result": result}), file=replies)


def timed(
    function: Callable[[], Any],
    meet: Callable[[], Any] | None = None,
    finish: Callable[[Any], Any] = lambda tensor: tensor.numpy(),
) -> Arm:
    """Seconds per call; the results are read, so that nothing is left undone.

    A call before the first is not timed: it waits for the other worker's order to
    arrive, and finds cold what another process has used since. Where a call is too
    long to waste, the workers only meet.

    Args:
        function: Callable that returns a tensor.
        meet: Callable that returns a tensor when all workers have called it, or
            `None`. Defaults to `None`: `function` is called once more.
        finish: Callable that reads a tensor. Defaults to one of TensorFlow's.

    Returns:
        Callable that takes a number of calls and returns seconds per call.
    """

    def run(steps: int) -> float:
        finish((meet or function)())
        begin = time.perf_counter()
        for _ in range(steps):
            result = function()
        finish(result)
        return (time.perf_counter() - begin) / steps

    return run


def _read_orders(pipe: TextIO, orders: queue.Queue[dict[str, Any]]) -> None:
    for line in pipe:
        orders.put(json.loads(line))
    # The driver is gone. A collective that waits for a dead peer never ends.
    os._exit(0)
