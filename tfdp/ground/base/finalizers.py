"""Finalizers that run on a thread of their own.

Python deletes an object in whatever thread drops its last reference or happens to
collect garbage: one that traces a step, or that holds a lock which the finalizer needs.
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

# At the end of a process: TensorFlow may take a minute to delete an iterator.
_LONGEST_SECONDS = 90.0


class FinalizerThread:
    """Thread that runs finalizers one after another.

    It starts with the first object that is registered, and at the end of the process
    what has been handed to it is run first.

    Args:
        name: String, of the thread.

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
        # The threads of a parent do not exist in a process that it forks.
        forks.in_forks(self._reset)

    def register(
        self, owned_by: Any, function: Callable, *args: Any, **kwargs: Any
    ) -> weakref.finalize:
        """Call a function on the thread once an object is deleted.

        Args:
            owned_by: Object.
            function: Callable, which does not refer to `owned_by`.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Returns:
            `weakref.finalize`, whose `detach` ends it.
        """
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_run, args=(self._calls,), name=self._name, daemon=True
                )
                self._thread.start()
                atexit.register(self._finish, self._thread)
        return forks.finalize(owned_by, self._calls.put, (function, args, kwargs))

    def _reset(self) -> None:
        self._lock = threading.Lock()
        # Its `put` may interrupt another one of the same thread, as garbage does.
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = None

    def _finish(self, thread: threading.Thread) -> None:
        # False in a process that was forked after the thread had started.
        if thread is self._thread:
            self._calls.put(None)
            thread.join(_LONGEST_SECONDS)


def _run(calls: queue.SimpleQueue) -> None:
    while (call := calls.get()) is not None:
        function, args, kwargs = call
        try:
            function(*args, **kwargs)
        except Exception:  # noqa: BLE001 the other finalizers have to run
            sys.excepthook(*sys.exc_info())
        # What the call refers to is deleted here, not when the next one comes.
        del call, function, args, kwargs


# Of what closes connections and ends threads, without waiting for them.
finalizers = FinalizerThread("tfdp-finalizers")
