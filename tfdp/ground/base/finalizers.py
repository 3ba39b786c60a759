"""Finalizers that run on a separate thread.

Python runs a finalizer in the thread that drops the last reference or collects garbage.
That thread may be tracing a step, or hold a lock that the finalizer needs.
"""

from __future__ import annotations

import atexit
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from tfdp.ground import forks
from tfdp.ground.base.threads import start_thread

# The exit of the process waits at most this many seconds for pending finalizers:
# TensorFlow may take a minute to delete an iterator.
_MAX_SECONDS = 90.0


class FinalizerThread:
    """Thread that runs finalizers one after another.

    The thread starts when the first object is registered. The exit of the process waits
    for pending finalizers.

    Args:
        name: String, the name of the thread.

    Example:

    >>> class File: ...
    >>> finalizers, closed = FinalizerThread("example"), threading.Event()
    >>> file = File()
    >>> _ = finalizers.register(file, closed.set)
    >>> del file
    >>> closed.wait(10)
    True
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None
        self._reset()
        # A forked process does not have the threads of its parent, so it must start a
        # thread of its own.
        forks.in_forks(self._reset)

    def register(
        self, owned_by: Any, function: Callable, *args: Any, **kwargs: Any
    ) -> weakref.finalize:
        """Call a function on the thread once an object is deleted.

        Args:
            owned_by: Object whose deletion triggers the call.
            function: Callable, which does not refer to `owned_by`.
            *args: Arguments of the function.
            **kwargs: Keyword arguments of the function.

        Returns:
            `weakref.finalize`; its `detach` cancels the call.
        """
        with self._lock:
            if self._thread is None:
                self._thread = start_thread(self._name, _run, self._calls)
                atexit.register(self._finish, self._thread)
        return forks.finalize(owned_by, self._calls.put, (function, args, kwargs))

    def _reset(self) -> None:
        """Forget the thread and its calls, in a new object or a forked process."""
        self._lock = threading.Lock()
        # Garbage collection may call `put` while the same thread is inside another
        # `put`. `SimpleQueue` allows this; a `Queue` would deadlock.
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = None

    def _finish(self, thread: threading.Thread) -> None:
        """Wait for the thread's pending calls, when the process exits."""
        # A process that was forked after the thread's start also calls this function at
        # its exit, but does not have the thread to wait for.
        if thread is self._thread:
            self._calls.put(None)
            thread.join(_MAX_SECONDS)


def _run(calls: queue.SimpleQueue) -> None:
    """Run queued calls until the queue yields `None`."""
    while (call := calls.get()) is not None:
        function, args, kwargs = call
        try:
            function(*args, **kwargs)
        except Exception:  # noqa: BLE001 the other finalizers must still run
            sys.excepthook(*sys.exc_info())
        # Local variables keep the arguments of a call alive until the next call, so
        # they are deleted.
        del call, function, args, kwargs


# One thread is shared by the finalizers that return quickly: those that close
# connections, or stop threads without joining them.
finalizers = FinalizerThread("tfdp-finalizers")
