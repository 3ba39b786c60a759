"""Where this worker is in its training: for messages, and to see who is behind."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class WorkerProgress:
    """Where a worker is.

    Args:
        count: Int, places that it was at before. Workers make the same calls, so that
            the one with the smaller count is behind.
        name: String, for people, or `""` outside of Keras's loops and tfdp's calls.
        seconds: Float, for how long it has been there.
        exchanges: Bool, whether it waits for the others' texts, not for tensors.
    """

    count: int
    name: str
    seconds: float
    exchanges: bool = False


@dataclasses.dataclass
class _Loop:
    """A loop of Keras; epoch and step count from 0, and are -1 before the first."""

    name: str
    epoch: int = -1
    step: int = -1
    computes: bool = False

    def __str__(self) -> str:
        where = self.name
        if self.name == "fit" and self.epoch >= 0:
            where = f"epoch {self.epoch + 1} of fit"
        if self.step < 0:
            return where
        where = f"step {self.step + 1} of {where}"
        return where if self.computes else f"the callbacks of {where}"


class ProgressRecorder:
    """The place of this worker, told by the calls that it makes.

    Example:

    >>> here = Here()
    >>> with here.looping("fit"):
    ...     here.epoch_begins()
    ...     here.step_begins(11)
    ...     with here.computing():
    ...         here.place.name
    'step 12 of epoch 1 of fit'
    """

    def __init__(self) -> None:
        self._count = 0
        self._since = time.monotonic()
        self._loops: list[_Loop] = []
        self._topics: list[str] = []

    @contextlib.contextmanager
    def looping(self, name: str) -> Iterator[None]:
        """While a loop of Keras runs, such as `fit`."""
        self._loops.append(_Loop(name))
        self._move()
        try:
            yield
        finally:
            self._loops.pop()
            self._move()

    def epoch_begins(self) -> None:
        """A loop begins to go through its data."""
        if self._loops:
            self._loops[-1].epoch += 1
            self._loops[-1].step = -1

    def step_begins(self, step: int) -> None:
        """A loop begins a step.

        Args:
            step: Int, counted from 0 in its epoch.
        """
        if self._loops:
            self._loops[-1].step = step
            self._move()

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """While TensorFlow runs a step; before and after it, callbacks do."""
        for loop in self._loops[-1:]:
            loop.computes = True
        self._move()
        try:
            yield
        finally:
            for loop in self._loops[-1:]:
                loop.computes = False
            self._move()

    @contextlib.contextmanager
    def all_gathering(self, topic: str) -> Iterator[None]:
        """While workers exchange texts.

        Args:
            topic: String.
        """
        self._topics.append(topic)
        self._move()
        try:
            yield
        finally:
            self._topics.pop()
            self._move()

    @property
    def place(self) -> WorkerProgress:
        """The place at this moment; other threads may ask."""
        seconds = time.monotonic() - self._since
        return WorkerProgress(self._count, self._name(), seconds, bool(self._topics))

    def _name(self) -> str:
        loops, topics = self._loops[-1:], self._topics[-1:]
        where = " ".join(str(loop) for loop in loops)
        if topics:
            where = f"{topics[0]!r}" + (f" in {where}" if where else "")
        return where

    def _move(self) -> None:
        self._count += 1
        self._since = time.monotonic()


progress = ProgressRecorder()
