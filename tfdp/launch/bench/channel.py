"""The worker's end of a benchmark's pipe: orders arrive on stdin as lines of JSON.

An order names a measured variant, and the number of steps to run.
"""

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

# Every measured program is a callable that takes a number of steps, runs them, and
# returns the measurement, so one driver can time all of them.
Variant = Callable[[int], Any]


Value = TypeVar("Value")


class Variants(Protocol):
    """Mapping, such as a dict, from a name to a measured variant, a `Variant`.

    A `Variant` is a callable that takes a number of steps, runs them, and returns its
    measurement, such as the seconds per step.
    """

    def __getitem__(self, name: str, /) -> Variant: ...


class OnDemand(Generic[Value]):
    """Mapping that creates its values on first use, and keeps one group of them.

    All models of a benchmark together would fill the memory of a small machine.

    Args:
        make: Callable that maps a name to a new value.
        group_of: Callable that maps a name to its group. Values of one group are kept
            together; access to another group drops them.

    Example:

    >>> variants = OnDemand(lambda name: name.upper(), lambda name: name[0])
    >>> variants["ab"]
    'AB'
    """

    def __init__(
        self, make: Callable[[str], Value], group_of: Callable[[str], Hashable]
    ) -> None:
        self._make, self._group_of = make, group_of
        self._group: Hashable = None
        self._values: dict[str, Value] = {}

    def __getitem__(self, name: str) -> Value:
        if self._group_of(name) != self._group:
            self._values.clear()
            gc.collect()
            self._group = self._group_of(name)
        if name not in self._values:
            self._values[name] = self._make(name)
        return self._values[name]


def work(make_variants: Callable[[dict[str, Any]], Variants]) -> None:
    """Run the steps that the driver orders on stdin; write measurements to stdout.

    An order is a line of JSON with the name of a variant and a number of steps; the
    reply is a line of JSON with the variant's measurement. The process exits when the
    driver closes stdin. Any other output of the worker is redirected to its log, which
    is stderr.

    Args:
        make_variants: Callable that maps the worker's setup, a dict from the driver, to
            `Variants`, its measured variants by name.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    orders: queue.Queue[dict[str, Any]] = queue.Queue()
    pipe = sys.stdin
    # A forked process, such as a worker of a PyTorch `DataLoader`, closes `sys.stdin`.
    # Closing the pipe would block it indefinitely, on the lock that the reading thread
    # held at the fork.
    sys.stdin = open(os.devnull)  # noqa: SIM115  (open until the process exits)
    threading.Thread(target=_read_orders, args=(pipe, orders), daemon=True).start()
    variants = make_variants(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=replies)
    while True:
        order = orders.get()
        result = variants[order["variant"]](order["steps"])
        print(json.dumps({"result": result}), file=replies)


def timed(
    function: Callable[[], Any],
    barrier: Callable[[], Any] | None = None,
    finish: Callable[[Any], Any] = lambda tensor: tensor.numpy(),
) -> Variant:
    """Return a measured variant: it calls a function, and returns seconds per call.

    The last result is read within the measured time, which thus includes all work. An
    untimed call precedes the timed ones: it waits until all workers have received their
    orders, and refills caches that other processes have used. `barrier` replaces this
    untimed call for functions that take too long.

    Args:
        function: Callable that returns a tensor.
        barrier: Callable that returns a tensor once all workers have called it, or
            `None` for one more call of `function`. Defaults to `None`.
        finish: Callable that reads the value of a tensor, and so waits until it is
            computed. Defaults to one for tensors of TensorFlow.

    Returns:
        `Variant` that takes a number of calls and returns seconds per call.
    """

    def run(steps: int) -> float:
        """Return the mean seconds per call of `function` over `steps` calls."""
        finish((barrier or function)())
        begin = time.perf_counter()
        for _ in range(steps):
            result = function()
        finish(result)
        return (time.perf_counter() - begin) / steps

    return run


def _read_orders(pipe: TextIO, orders: queue.Queue[dict[str, Any]]) -> None:
    """Put the driver's orders, lines of JSON from the pipe, in the queue.

    The process exits when the driver closes the pipe.
    """
    for line in pipe:
        orders.put(json.loads(line))
    # The process exits without cleanup, which would wait for running collectives: one
    # that waits for a dead peer never ends.
    os._exit(0)
