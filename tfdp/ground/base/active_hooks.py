"""Hooks that callbacks activate while Keras's steps are traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Generic, TypeVar

_T = TypeVar("_T")


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
