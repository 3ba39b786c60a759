"""`StepContext`: the state of one replica's step, by the thread that runs or traces it.

Hooks of Keras have no argument for it, so `current` looks it up by thread.
`ThreadStack` and `ActiveHooks` have state of the loop that runs in a thread: several
may run at once. The threads of its replicas see it, too, by `in_context_of_caller`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class StepContext:
    """State of one replica's step.

    Args:
        trace: `ProgramTrace` of the step as the program of one device, or `None`.
        batch_weight: `BatchWeight` of the replica, or `None`.
        deferred: Pair of the list of deferred updates and the graph of the step, or
            `None` if updates are not deferred.
        residuals: `StepResiduals` that collect compressors' residuals, or `None`.
        is_compiled: Bool, whether XLA compiles the traced function.
        label: String, the name in measurements and errors of the collectives that are
            traced now, such as `"bucket 0"`, or `None`.
        ops_before_need: Sequence of operations, the last ones that run without the
            results of the collectives that are traced now, see `timing.needed_after`.
        carried: `CarriedScalar`, such as the loss, that may be appended to a bucket of
            gradients to be summed with it; or `None`.
        update_draws: Iterator of ints in an optimizer's update, where all replicas draw
            the same random numbers: seeds of operations without one. Else `None`.
        builds_optimizer: Bool, whether the step builds an optimizer now. It does so
            outside of its graph, where execution is eager.
        in_run: Bool, whether this thread is within a call of `strategy.run`. A
            `merge_call` of its replicas runs in this thread, outside of any replica.
    """

    trace: Any = None
    batch_weight: Any = None
    deferred: Any = None
    residuals: Any = None
    is_compiled: bool = False
    label: str | None = None
    ops_before_need: Sequence[Any] = ()
    carried: Any = None
    update_draws: Iterator[int] | None = None
    builds_optimizer: bool = False
    in_run: bool = False


class _Thread(threading.local):
    """Thread-local `StepContext` of the current step; initially all default values."""

    context = StepContext()


_thread = _Thread()


def current() -> StepContext:
    """Return the context of the step that this thread runs or traces.

    Outside of a step it is `StepContext()`, with default values.
    """
    return _thread.context


@contextlib.contextmanager
def using(**changes: Any) -> Iterator[None]:
    """Change fields of this thread's context in the block.

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


def in_context_of_caller(function: Callable) -> Callable:
    """Wrap a function that replicas run: each has a copy of this thread's context.

    Args:
        function: Callable, run in a replica's thread.
    """
    context = contextvars.copy_context()

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        """Return the function's result, in a copy of the wrapping thread's context."""
        return context.copy().run(function, *args, **kwargs)

    return run


class ThreadStack(Generic[_T]):
    """Stack of the values that blocks of this thread have pushed, innermost last.

    Args:
        name: String, unique in tfdp.

    Example:

    >>> stack = ThreadStack("numbers")
    >>> with stack.pushed(1), stack.pushed(2):
    ...     stack.items, stack.innermost
    ((1, 2), 2)
    >>> stack.innermost
    """

    def __init__(self, name: str) -> None:
        self._items: contextvars.ContextVar[tuple[_T, ...]]
        self._items = contextvars.ContextVar(name, default=())

    @property
    def items(self) -> tuple[_T, ...]:
        """Tuple of the values, the innermost last."""
        return self._items.get()

    @property
    def innermost(self) -> _T | None:
        """The value that was pushed last, or `None`."""
        return self.items[-1] if self.items else None

    @contextlib.contextmanager
    def pushed(self, item: _T) -> Iterator[None]:
        """Push a value at the beginning of the block, and remove it at the end."""
        outer = self.items
        self._items.set((*outer, item))
        try:
            yield
        finally:
            self._items.set(outer)


class ActiveHooks(Generic[_T]):
    """Hooks of one kind that are active in this thread; a hook may be any object.

    Args:
        name: String, unique in tfdp.

    Example:

    >>> hooks = ActiveHooks("recorders")
    >>> before = hooks.active()
    >>> hooks.activate("a recorder")
    >>> hooks.deactivate_since(before), hooks.active()
    (True, [])
    """

    def __init__(self, name: str) -> None:
        self._hooks: contextvars.ContextVar[tuple[_T, ...]]
        self._hooks = contextvars.ContextVar(name, default=())

    def __bool__(self) -> bool:
        return bool(self._hooks.get())

    def activate(self, hook: _T) -> None:
        """Add a hook to the active hooks of this thread, after the others."""
        self._hooks.set((*self._hooks.get(), hook))

    def deactivate(self, hook: _T) -> None:
        """Deactivate a hook; no effect if it is not active."""
        hooks = self.active()
        if hook in hooks:
            hooks.remove(hook)
        self._hooks.set(tuple(hooks))

    def active(self) -> list[_T]:
        """Return the active hooks of this thread, in the order of their activation."""
        return list(self._hooks.get())

    def deactivate_since(self, before: list[_T]) -> bool:
        """Deactivate the hooks that were not active before.

        Args:
            before: List of hooks, the earlier result of `active`.

        Returns:
            Bool, whether any hook was deactivated.
        """
        newer = [hook for hook in self.active() if hook not in before]
        for hook in newer:
            self.deactivate(hook)
        return bool(newer)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend all hooks in the block, and restore the same ones at its end."""
        before = self._hooks.get()
        self._hooks.set(())
        try:
            yield
        finally:
            self._hooks.set(before)
