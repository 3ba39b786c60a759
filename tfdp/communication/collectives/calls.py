"""Calls of traced functions with collectives in several threads of a process.

A function runs in one thread at a time: its collectives have one key each. Different
functions run at once on the CPUs of a single process, whose functions have keys of
their own, see `instance_keys`. On GPUs, where NCCL needs one order of all collectives,
they run one at a time. Several workers need one order, which threads cannot guarantee:
there a call raises an error while another thread's call runs.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from tfdp.communication.coordination.flight_record import tensorflow_calls
from tfdp.communication.coordination.flight_steps import (
    TracedCollective,
    call_of,
    traced_collectives,
)
from tfdp.communication.coordination.progress import progress
from tfdp.communication.coordination.worker_group import latest_group

# A function with collectives is recognized by its inputs: each such function has one of
# these handles of resources among them. The keys are the handles' `id`s.
_handles: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_running = threading.RLock()
_num_calls = itertools.count()


class _Thread(threading.local):
    """Setting of each thread: whether its calls of traced functions wait for others.

    Attributes:
        waits: Bool, whether they wait for other threads; false in `concurrent_calls`.
    """

    waits = True


_thread = _Thread()


def mark(handle: Any) -> None:
    """Register a resource that only functions with collectives have as an input.

    `one_at_a_time` recognizes functions with collectives by such inputs.

    Args:
        handle: Tensor, the handle of the resource.
    """
    _handles[id(handle)] = handle


@contextlib.contextmanager
def concurrent_calls() -> Iterator[None]:
    """Let this thread call functions with collectives in the block while others do.

    The collectives of these calls must use groups or channels that no other thread
    uses at the same time, or belong to one of several replicas with a thread each.
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
    """Return a context for a call of a function, which one thread enters at a time.

    Other threads wait to call the same function, or on GPUs any function. A function
    without collectives does not wait.

    Args:
        function: Traced function of TensorFlow.
        inputs: Sequence of its input tensors, including captured ones.

    Raises:
        RuntimeError: On entering, if another thread's call runs on several workers:
            they could run the two in different orders, and wait indefinitely.
    """
    attributes = vars(function)
    if "_tfdp_lock" not in attributes:
        attributes["_tfdp_lock"] = _lock_of(inputs)
    lock = attributes["_tfdp_lock"]
    if lock is None or not _thread.waits:
        return contextlib.nullcontext()
    return _refusing(lock, function) if _has_several_workers() else lock


def _lock_of(inputs: Sequence[Any]) -> Any:
    """Return the lock that a function must hold in a call, by the function's inputs.

    Args:
        inputs: Sequence of input tensors, including captured ones.

    Returns:
        Lock: the same for all functions on GPUs or with several workers, else a new one
        for this function alone; or `None` for a function without collectives.
    """
    found = [tensor for tensor in inputs if id(tensor) in _handles]
    if not found:
        return None
    is_shared = _has_several_workers() or any("GPU" in x.device for x in found)
    return _running if is_shared else threading.RLock()


def _has_several_workers() -> bool:
    """Return whether a strategy of this process has several workers."""
    group = latest_group()
    return group is not None and group.num_workers > 1


@contextlib.contextmanager
def _refusing(lock: Any, function: Any) -> Iterator[None]:
    """Open a context that holds a lock, or raise if another thread holds it.

    The function must be called inside: the context records the call for the watchdog.

    Args:
        lock: Lock of the function.
        function: Traced function of TensorFlow.

    Raises:
        RuntimeError: If another thread holds the lock.
    """
    if not lock.acquire(blocking=False):
        raise RuntimeError(
            "Two threads of a worker train at the same time. On several workers all "
            "steps must run in one thread, in the same order on each worker."
        )
    try:
        with recorded(traced_collectives.of_function(function.graph)):
            yield
    finally:
        lock.release()


def recorded(
    plan: Sequence[TracedCollective],
) -> contextlib.AbstractContextManager[None]:
    """Return a context that records a call with collectives that TensorFlow runs.

    Recorded calls have sequence numbers, which the watchdog compares with those of the
    other workers. Two kinds of calls are not recorded: those in Keras's loops, where
    the watchdog compares steps, and those in `concurrent_calls`, which have no common
    order.

    Args:
        plan: Sequence of `TracedCollective`, those of the call in order.
    """
    group = latest_group()
    if not plan or progress.loop or group is None or not _thread.waits:
        return contextlib.nullcontext()
    identity, num_bytes = call_of(plan, group.num_workers)
    return tensorflow_calls.entered(identity, next(_num_calls), num_bytes)
