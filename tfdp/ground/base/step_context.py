"""`StepContext`: what one replica's step knows, in the thread that traces or runs it.

Keras's hooks call us without it, so it is found by thread: `current` is the one way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class StepContext:
    """What one replica's step knows.

    Args:
        trace: `ProgramTrace` of the program of one device that is traced, or `None`.
        batch_weight: `BatchWeight` of the replica, or `None`.
        deferred: Pair of a list of deferred updates and the graph that they are made
            in, or `None` where updates are made at once.
        residuals: `StepResiduals` that collect what compressors leave out, or `None`.
        is_compiled: Bool, whether XLA compiles what is traced.
        label: String, of the collectives that are traced, or `None`.
        ops_before_need: Sequence of operations, the last ones that run without the
            results of these collectives.
    """

    trace: Any = None
    batch_weight: Any = None
    deferred: Any = None
    residuals: Any = None
    is_compiled: bool = False
    label: str | None = None
    ops_before_need: Sequence[Any] = ()


class _Thread(threading.local):
    context = StepContext()


_thread = _Thread()


def current() -> StepContext:
    """Return the context of the step that runs in this thread."""
    return _thread.context


@contextlib.contextmanager
def using(**changes: Any) -> Iterator[None]:
    """Change fields of this thread's context inside.

    Args:
        **changes: Values by the name of a field of `StepContext`.

    Example:

    >>> with using(label="metrics"):
    ...     current().label
    'metrics'
    >>> current().label
    """
    outer = {name: getattr(_thread.context, name) for name in changes}
    _thread.context = dataclasses.replace(_thread.context, **changes)
    try:
        yield
    finally:
        _thread.context = dataclasses.replace(_thread.context, **outer)
