"""Bounds on the time of what runs in the tests' own process."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator


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
