"""Which loop of Keras is under way."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of Keras that is under way.

    Args:
        model: The Keras model.
        whole_batches: Bool, whether the loop is given global batches, as
            `train_on_batch` is, and not shares that are split already.
    """

    model: Any
    whole_batches: bool


_loops: list[Loop] = []


def current() -> Loop | None:
    """The innermost loop, or `None` outside of any."""
    return _loops[-1] if _loops else None


def is_nested() -> bool:
    """Whether a callback of one loop runs another one."""
    return len(_loops) > 1


@contextlib.contextmanager
def looping(model: Any, *, whole_batches: bool = False) -> Iterator[None]:
    """While a loop runs.

    Args:
        model: The Keras model.
        whole_batches: Bool, see `Loop`. Defaults to `False`.
    """
    _loops.append(Loop(model, whole_batches))
    try:
        yield
    finally:
        _loops.pop()
