"""Progress of this worker: loop, epoch, step, for messages and straggler detection."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import operator
import time
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from tfdp.communication.coordination.clock import clock
from tfdp.communication.coordination.flight_record import Span, copy_of, wall_offset

# A flight record holds only this many of the most recent changes of progress. A step of
# `fit` makes three, so the record covers about 170 steps.
_NUM_PLACES = 512


@dataclasses.dataclass(frozen=True)
class WorkerProgress:
    """Progress of a worker at one moment.

    Args:
        count: Int, number of changes of progress. Workers make the same calls, so the
            worker with the smaller count is behind.
        name: String, such as `"step 3 of epoch 1 of fit"`, or `""` outside of Keras's
            loops and tfdp's calls.
        seconds: Float, time since the last change.
        is_all_gathering: Bool, whether the worker waits in an all-gather of texts.
        is_computing: Bool, whether TensorFlow runs a step.
        reductions: Int, checksum of all reductions that the worker has traced.
        source: String, the data source that the worker waits for, or `""`.
        num_answers: Int, number of completed all-gathers of texts.
        left_scopes: Dict, by the source line of a scope, the number of times since the
            last all-gather that the worker has left it without synchronizing.
        line: String, the line of its script at which the worker is, if `name` is `""`.
        collectives: Dict from the name of a lane to the number of the last collective
            that the worker has entered in it.
    """

    count: int
    name: str
    seconds: float
    is_all_gathering: bool = False
    is_computing: bool = False
    reductions: int = 0
    source: str = ""
    num_answers: int = 0
    left_scopes: dict[str, int] = dataclasses.field(default_factory=dict)
    line: str = ""
    collectives: dict[str, int] = dataclasses.field(default_factory=dict)


class ComputedStep(NamedTuple):
    """A step that TensorFlow has run in a loop of Keras, and its times.

    Args:
        loop: String, such as `"fit"`.
        number: Int, `WorkerProgress.count` at its begin, the same on all workers.
        begin: Float, seconds of the wall clock.
        end: Float, seconds of the wall clock, or `None` if it has not ended.
    """

    loop: str
    number: int
    begin: float
    end: float | None


@dataclasses.dataclass
class _Loop:
    """Progress of a loop of Keras, such as `fit`.

    Args:
        name: String, such as `"fit"`.
        epoch: Int, from 0, or -1 before the first one. Defaults to -1.
        step: Int, from 0 in the epoch, or -1 before the first one. Defaults to -1.
        computes: Bool, whether TensorFlow runs a step. Defaults to `False`.
        source: String, description of the data source, or `""`. Defaults to `""`.
    """

    name: str
    epoch: int = -1
    step: int = -1
    computes: bool = False
    source: str = ""

    def __str__(self) -> str:
        where = self.name
        if self.name == "fit" and self.epoch >= 0:
            where = f"epoch {self.epoch + 1} of fit"
        if self.step < 0:
            return where
        where = f"step {self.step + 1} of {where}"
        return where if self.computes else f"the callbacks of {where}"


class ProgressRecorder:
    """Recorder of this worker's progress, by the calls of Keras and tfdp.

    Methods that record an epoch, a step or a data source do nothing outside of loops.

    Example:

    >>> recorder = ProgressRecorder()
    >>> with recorder.looping("fit"):
    ...     recorder.epoch_begins()
    ...     recorder.step_begins(11)
    ...     with recorder.computing():
    ...         recorder.current.name
    'step 12 of epoch 1 of fit'
    """

    def __init__(self) -> None:
        self._count = 0
        self._since = clock.now()
        # The loops of Keras that run. Messages name the last one, which is the
        # innermost or, if several threads run loops, the latest.
        self._loops: list[_Loop] = []
        self._topics: list[str] = []
        self._reductions: set[int] = set()
        self._num_answers = 0
        self._left_scopes: dict[str, int] = {}
        self._restarted_at = float("-inf")
        # The last changes of progress, each with its time, the fields of the loop or
        # `None`, the topic of an all-gather, and the count. Names are formatted only
        # when they are read, since steps may take less than a millisecond.
        self._places: collections.deque[tuple[float, tuple | None, str, int]]
        self._places = collections.deque(maxlen=_NUM_PLACES)

    @contextlib.contextmanager
    def looping(self, name: str) -> Iterator[None]:
        """Record that a loop of Keras, called `name`, runs in the block."""
        loop = _Loop(name)
        self._loops = [*self._loops, loop]
        self._advance()
        try:
            yield
        finally:
            self._loops = [other for other in self._loops if other is not loop]
            self._advance()

    @property
    def _innermost(self) -> _Loop | None:
        """The innermost loop, or `None` outside of loops."""
        return next(iter(self._loops[-1:]), None)

    def set_source(self, source: str) -> None:
        """Set the data source of the innermost loop.

        Args:
            source: String, description for messages.
        """
        if (loop := self._innermost) is not None:
            loop.source = source

    @property
    def source(self) -> str:
        """String, the innermost loop's data source for messages, or `"the dataset"`."""
        loop = self._innermost
        return ("" if loop is None else loop.source) or "the dataset"

    def skip_epochs(self, epochs: int) -> None:
        """Record that the innermost loop continues after epochs of an interrupted run.

        Args:
            epochs: Int, number of these epochs, added to the loop's epoch.
        """
        if (loop := self._innermost) is not None:
            loop.epoch += epochs

    def epoch_begins(self) -> None:
        """Record that the innermost loop of Keras begins an epoch."""
        if (loop := self._innermost) is not None:
            loop.epoch += 1
            loop.step = -1

    def step_begins(self, step: int) -> None:
        """Record that the innermost loop of Keras begins a step.

        Args:
            step: Int, index of the step in its epoch, from 0.
        """
        if (loop := self._innermost) is not None:
            loop.step = step
            self._advance()

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Record that TensorFlow runs a step in the block, rather than callbacks."""
        loop = self._innermost
        if loop is not None:
            loop.computes = True
        self._advance()
        try:
            yield
        finally:
            if loop is not None:
                loop.computes = False
            self._advance()

    @contextlib.contextmanager
    def all_gathering(self, topic: str) -> Iterator[None]:
        """Record that workers all-gather texts in the block.

        Args:
            topic: String, topic of the texts.
        """
        self._topics.append(topic)
        self._advance()
        try:
            yield
        finally:
            self._topics.pop()
            self._advance()

    def record_texts_gathered(self) -> None:
        """Record that an all-gather of texts is complete; forget scopes left before."""
        self._num_answers += 1
        self._left_scopes = {}

    def record_scope_left(self, line: str) -> None:
        """Record that this worker has left `strategy.scope()` without synchronizing.

        Args:
            line: String, source line of the scope.
        """
        self._left_scopes[line] = self._left_scopes.get(line, 0) + 1

    def has_left_scope(self, other: WorkerProgress, line: str) -> bool:
        """Return whether another worker has left a scope in which this worker waits.

        It has done so if it has left the scope of `line` more often than this worker
        since the last all-gather of texts, at which all were at the same call. The
        result is `False` if the workers have completed different numbers of these
        all-gathers, since they cannot be compared then.

        Args:
            other: `WorkerProgress` of the other worker.
            line: String, source line of the scope.
        """
        times = other.left_scopes.get(line, 0)
        is_same = other.num_answers == self._num_answers
        return is_same and times > self._left_scopes.get(line, 0)

    def restart(self) -> None:
        """Reset all counters; called on each worker when the job's workers change."""
        self._count = self._num_answers = 0
        self._reductions, self._left_scopes = set(), {}
        self._restarted_at = time.perf_counter()

    def record_reduction(self, signature: str) -> None:
        """Add a reduction to the checksum of those that this worker has traced.

        Workers compare the checksum to find one that has traced other reductions, in
        whatever order.

        Args:
            signature: String, the same on all workers of the reduction.
        """
        self._reductions.add(zlib.crc32(signature.encode()))

    @property
    def current(self) -> WorkerProgress:
        """`WorkerProgress` at this moment; thread-safe."""
        seconds = clock.now() - self._since
        loop = self._innermost
        return WorkerProgress(
            self._count,
            self._name(),
            seconds,
            is_all_gathering=bool(self._topics),
            is_computing=loop is not None and loop.computes,
            reductions=functools.reduce(operator.xor, self._reductions.copy(), 0),
            num_answers=self._num_answers,
            left_scopes=self._left_scopes.copy(),
        )

    def spans(self) -> list[Span]:
        """Return the calls and steps of this worker's script, with times; thread-safe.

        Returns:
            List of `Span` in order, one for each of the last 512 changes of progress.
        """
        offset = wall_offset()
        found = [
            (_describe(_Loop(*fields) if fields else None, topic), begin + offset)
            for begin, fields, topic, _ in copy_of(self._places)
        ]
        ends = [*(begin for _, begin in found[1:]), None]
        return [Span(*place, end) for place, end in zip(found, ends, strict=False)]

    def steps(self) -> list[ComputedStep]:
        """Return the last steps that TensorFlow ran since `restart`; thread-safe."""
        places, offset = copy_of(self._places), wall_offset()
        ends = [*(begin + offset for begin, *_ in places[1:]), None]
        return [
            ComputedStep(fields[0], count, begin + offset, end)
            for (begin, fields, topic, count), end in zip(places, ends, strict=False)
            if begin >= self._restarted_at and fields and fields[-1] and not topic
        ]

    @property
    def loop(self) -> str:
        """String, name of the innermost loop of Keras, or `""`."""
        loop = self._innermost
        return "" if loop is None else loop.name

    def _name(self) -> str:
        """Describe what this worker does now, such as `"step 3 of epoch 1 of fit"`."""
        topics = self._topics[-1:]
        return _describe(self._innermost, topics[0] if topics else "")

    def _advance(self) -> None:
        """Count a change of progress, and record the new step or call and its time."""
        self._count += 1
        self._since = clock.now()
        self.record_place()

    def record_place(self) -> None:
        """Append the present loop and all-gather, with the time, to `_places`.

        Called at each change of progress. `spans` and `steps` read `_places` for
        flight records.
        """
        loop, fields = self._innermost, None
        if loop is not None:
            fields = (loop.name, loop.epoch, loop.step, loop.computes)
        topic = self._topics[-1] if self._topics else ""
        self._places.append((time.perf_counter(), fields, topic, self._count))


def _describe(loop: _Loop | None, topic: str) -> str:
    """Describe where a worker is: in a loop of Keras, an all-gather of texts, or both.

    Args:
        loop: `_Loop`, or `None` outside of loops.
        topic: String, the topic of the all-gather, or `""` outside of all-gathers.

    Returns:
        String, such as `"'preemption' in the callbacks of step 3 of epoch 1 of fit"`;
        `""` outside of both.
    """
    where = "" if loop is None else str(loop)
    if topic:
        where = f"{topic!r}" + (f" in {where}" if where else "")
    return where


progress = ProgressRecorder()
