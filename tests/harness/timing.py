"""Bounds on time: what must be done in it, and what is waited for."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

_POLL_SECONDS = 0.01
_Found = TypeVar("_Found")


def wait_until(
    is_so: Callable[[], _Found],
    what: str | Callable[[], str] = "",
    seconds: float = 60.0,
) -> _Found:
    """Waits until a condition is true, and returns what it has found.

    Args:
        is_so: The condition, which is tested at least once, and then every 10 ms.
        what: What is waited for, or a function that says so when the time is over.
        seconds: How long to wait.

    Raises:
        TimeoutError: If the condition is still false; it names what was waited for.
    """
    deadline = time.monotonic() + seconds
    while not (found := is_so()):
        if time.monotonic() >= deadline:
            waited_for = what if isinstance(what, str) else what()
            raise TimeoutError(
                f"waited {seconds:g} s for {waited_for or 'a condition'}"
            )
        time.sleep(_POLL_SECONDS)
    return found


@contextlib.contextmanager
def within(most: float, *, least: float = 0.0) -> Iterator[None]:
    """Fails where what is inside takes other times than these, in seconds.

    Garbage of other tests stays meanwhile: it holds iterators of tf.data, and to delete
    one takes up to seconds, in which tf.data's optimization sleeps.
    """
    gc.disable()
    begin = time.monotonic()
    try:
        yield
        seconds = time.monotonic() - begin
    finally:
        gc.enable()
    assert least <= seconds < most
