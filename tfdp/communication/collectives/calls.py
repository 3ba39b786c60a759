"""Calls of traced functions in threads: those with collectives run one at a time.

Collectives of two functions may have the same key, see `instance_keys`: two such
functions at once, as of two `fit` in threads, would take each other's tensors.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from tfdp.communication.coordination.worker_group import latest_group

# Handles of the resources that all functions with collectives have as inputs, by `id`.
_handles: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_running = threading.RLock()


class _Thread(threading.local):
    """Whether calls of this thread wait for those of others."""

    waits = True


_thread = _Thread()


def mark(handle: Any) -> None:
    """Mark the handle of a resource, an input of functions with collectives only."""
    _handles[id(handle)] = handle


@contextlib.contextmanager
def beside_others() -> Iterator[None]:
    """Open a context in which this thread's calls do not wait for those of others.

    Their collectives must be those of other groups or channels, or of one replica that
    others wait for in threads of their own.
    """
    outer = _thread.waits
    _thread.waits = False
    try:
        yield
    finally:
        _thread.waits = outer


def one_at_a_time(
    function: Any, inputs: Sequence[Any]
) -> contextlib.AbstractContextManager[None]:
    """Return a context for a call, which waits for another thread's call to end.

    Without collectives nothing waits.

    Args:
        function: Traced function of TensorFlow.
        inputs: Sequence of its input tensors, including captured ones.

    Raises:
        RuntimeError: On entering, if another thread's call runs on several workers:
            they could run the two in different orders, and wait indefinitely.
    """
    is_collective = getattr(function, "_tfdp_is_collective", None)
    if is_collective is None:
        is_collective = any(id(tensor) in _handles for tensor in inputs)
        vars(function)["_tfdp_is_collective"] = is_collective
    if is_collective and _thread.waits:
        return _alone()
    return contextlib.nullcontext()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hold the lock of calls with collectives, see `one_at_a_time`."""
    if not _running.acquire(blocking=False):
        group = latest_group()
        if group is not None and group.num_workers > 1:
            raise RuntimeError(
                "Two threads of a worker train at the same time. On several workers "
                "all steps must run in one thread, in the same order on each worker."
            )
        _running.acquire()
    try:
        yield
    finally:
        _running.release()
