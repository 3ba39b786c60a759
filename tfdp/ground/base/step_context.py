"""`StepContext`: what one replica's step knows, in the thread that traces or runs it.

Keras's hooks call us without it, so it is found by thread: `current` is the one way.
`ActiveHooks` are those that callbacks activate while steps are traced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


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


class ActiveHooks(Generic[_T]):
    """Active hooks of one kind in this process.

    Example:

    >>> hooks = ActiveHooks()
    >>> before = hooks.active()
    >>> hooks.activate("a recorder")
    >>> hooks.deactivate_since(before), hooks.active()
    (True, [])
    """

    def __init__(self) -> None:
        self._hooks: list[_T] = []

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def activate(self, hook: _T) -> None:
        """Activate a hook."""
        self._hooks.append(hook)

    def deactivate(self, hook: _T) -> None:
        """Deactivate a hook; without effect if it is not active."""
        if hook in self._hooks:
            self._hooks.remove(hook)

    def active(self) -> list[_T]:
        """Return the active hooks."""
        return list(self._hooks)

    def deactivate_since(self, before: list[_T]) -> bool:
        """Deactivate the hooks that were not active before.

        Args:
            before: List, the result of `active` at that time.

        Returns:
            Bool, whether there was any.
        """
        newer = [hook for hook in self._hooks if hook not in before]
        for hook in newer:
            self.deactivate(hook)
        return bool(newer)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend all hooks inside."""
        before = self._hooks[:]
        self._hooks.clear()
        try:
            yield
        finally:
            self._hooks[:] = before
