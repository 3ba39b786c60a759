"""What callbacks switch on while Keras's steps are traced, and what takes it back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Generic, TypeVar

_T = TypeVar("_T")


class ActiveHooks(Generic[_T]):
    """The things of one kind that are switched on in this process.

    Example:

    >>> switched = Switched()
    >>> before = switched.active()
    >>> switched.on("a recorder")
    >>> switched.switch_back(before), switched.active()
    (True, [])
    """

    def __init__(self) -> None:
        self._items: list[_T] = []

    def __bool__(self) -> bool:
        return bool(self._items)

    def on(self, item: _T) -> None:
        """Switches something on."""
        self._items.append(item)

    def off(self, item: _T) -> None:
        """Switches something off; again has no effect."""
        if item in self._items:
            self._items.remove(item)

    def active(self) -> list[_T]:
        """What is switched on."""
        return list(self._items)

    def switch_back(self, before: list[_T]) -> bool:
        """Switches off what was not on before, and says whether there was any.

        Args:
            before: List, what `active` had returned.
        """
        started = [item for item in self._items if item not in before]
        for item in started:
            self.off(item)
        return bool(started)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Nothing is switched on inside."""
        before = self._items[:]
        self._items.clear()
        try:
            yield
        finally:
            self._items[:] = before
