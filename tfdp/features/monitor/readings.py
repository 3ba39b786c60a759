"""Readings of a step: what a worker recorded, and the times computed from it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from tfdp.communication.collectives import step_events, timing

Interval = tuple[float, float]
# Collectives that nothing in the forward or backward pass waits for.
_IN_BACKGROUND = (timing.GRADIENTS, timing.ROWS, "logs", "statistics")
# The collectives of sharded parameters by what they are for, and their labels.
_KINDS = {
    "forward_gathers": timing.UNIT,
    "backward_gathers": timing.UNIT_AGAIN,
    "reduce_scatters": timing.GRADIENTS,
}
KINDS = tuple(name for kind in _KINDS for name in (kind, f"{kind}_exposed"))
# A collective, and when it began and ended.
Timed = tuple[timing.Collective, float, float]


def seconds_covered(intervals: Iterable[Interval]) -> float:
    """Seconds covered by at least one of several intervals.

    Args:
        intervals: Iterable of begin and end, in seconds.

    Returns:
        Float, seconds.

    Example:

    >>> seconds_covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    return sum(end - begin for begin, end in merged(intervals))


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as intervals that do not overlap, in order.

    Example:

    >>> merged([(1.0, 3.0), (0.0, 2.0), (5.0, 6.0)])
    [(0.0, 3.0), (5.0, 6.0)]
    """
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def clipped(intervals: Iterable[Interval], begin: float, end: float) -> list[Interval]:
    """Intervals cut to those between two moments.

    Example:

    >>> clipped([(0.0, 2.0), (3.0, 4.0)], 1.0, 3.5)
    [(1.0, 2.0), (3.0, 3.5)]
    """
    cut = [(max(b, begin), min(e, end)) for b, e in intervals]
    return [(b, e) for b, e in cut if e > b]


@dataclasses.dataclass(frozen=True)
class Reading:
    """Recorded values, read when a step had ended.

    Args:
        values: Array of shape `[num_rows, 3]`, see `Recorder.read`.
        begin: Float, when the step before had ended, seconds of the wall clock.
        end: Float, when this one had.
        seconds: Float, time between the two by a clock that is never set.
        num_steps: Int, steps in between; the values are of the last one.
    """

    values: np.ndarray
    begin: float
    end: float
    seconds: float
    num_steps: int


@dataclasses.dataclass(frozen=True)
class Sample:
    """One step of one worker.

    Args:
        num_steps: Int, that it stands for: those of an execution.
        step_seconds: Float, from the end of the step before to its own.
        input_seconds: Float, how much of it passed before the step had its data.
        compute_seconds: Float, what is not exposed communication.
        communication_seconds: Float, in which a collective was under way.
        exposed_seconds: Float, in which nothing but collectives was.
        sent_bytes: Float, by each replica.
        samples: Float, of the global batch; NaN where unknown.
        squared_norm: Float, this worker's part; NaN at most steps.
        buckets: Dict from label to seconds from its first collective to its last;
            with sharded parameters also from `KINDS` to seconds.
    """

    num_steps: int
    step_seconds: float
    input_seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    sent_bytes: float
    samples: float
    squared_norm: float
    buckets: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Replica:
    """Times of one replica's step, in seconds of the wall clock.

    Args:
        begin: Float, when its data was there.
        loss: Float, when its forward pass was through.
        backward_end: Float or `None`, when the last gradient was there, as the
            collectives saw it.
        collectives: List of collective, begin and end.
    """

    begin: float
    loss: float
    backward_end: float | None
    collectives: list[Timed]

    def labelled(self) -> dict[str, Interval]:
        """Intervals from a label's first collective to the end of its last."""
        found: dict[str, Interval] = {}
        for collective, begin, end in self.collectives:
            first, last = found.get(collective.label, (begin, end))
            found[collective.label] = min(first, begin), max(last, end)
        return found

    def exposed(self) -> list[Interval]:
        """Intervals in which collectives kept the replica from computing.

        In the forward and the backward pass these are the ones that it waits for,
        such as those of synchronized BatchNormalization, and sharded parameters from
        when they are needed; afterwards all.
        """
        return [pair for timed in self.collectives for pair in self._exposed(timed)]

    def kinds(self) -> dict[str, float]:
        """Seconds of the kinds of collectives of sharded parameters, see `KINDS`.

        Returns:
            Dict, empty where parameters are not sharded.
        """
        of_kind = {
            kind: [c for c in self.collectives if c[0].label.split()[0] == word]
            for kind, word in _KINDS.items()
        }
        if not of_kind["forward_gathers"]:
            return {}
        found = {}
        for kind, own in of_kind.items():
            exposed = [pair for timed in own for pair in self._exposed(timed)]
            found[kind] = seconds_covered((begin, end) for _, begin, end in own)
            found[f"{kind}_exposed"] = seconds_covered(exposed)
        return found

    def _exposed(self, timed: Timed) -> list[Interval]:
        """When a collective kept the replica from computing: one interval, or none."""
        collective, begin, end = timed
        since: float | None = begin
        if collective.label.split()[0] in _IN_BACKGROUND:
            since = self.backward_end
        elif collective.needed_at is not None:
            since = collective.needed_at
        if since is None or end <= since:
            return []
        return [(max(begin, since), end)]


def replicas_of(reading: Reading, rows: Sequence[timing.Row]) -> list[Replica]:
    """Times of the last step of a reading on each local replica.

    Args:
        reading: `Reading`.
        rows: Sequence of `Row`, what its values are of.
    """
    times = {
        mark.replica: pair for mark, pair in _marks(reading, rows, step_events.TIMES)
    }
    found = []
    for replica, (begin, loss, _) in sorted(times.items()):
        since = reading.begin if reading.num_steps == 1 else begin
        own = _of_this_step(reading, rows, replica, since)
        ready: dict[str, float] = {}
        for collective, start, _ in own:
            if collective.is_of_gradients:
                known = ready.get(collective.label, start)
                ready[collective.label] = min(start, known)
        last = max(ready.values()) if ready else None
        found.append(Replica(float(begin), float(loss), last, _one_by_one(own)))
    return found


def _of_this_step(
    reading: Reading, rows: Sequence[timing.Row], replica: int, since: float
) -> list[Timed]:
    """Collectives of this step: others hold the times of an earlier one."""
    return [
        (_completed(row, float(third)), float(begin), float(end))
        for row, (begin, end, third) in zip(rows, reading.values, strict=False)
        if isinstance(row, timing.Collective)
        if row.replica == replica and begin >= since
    ]


def _completed(row: timing.Collective, third: float) -> timing.Collective:
    """A collective with what only the step knew: its size, or when it was needed."""
    if row.num_bytes < 0:
        return dataclasses.replace(row, num_bytes=int(third))
    return dataclasses.replace(row, needed_at=third) if row.is_awaited else row


def _marks(
    reading: Reading, rows: Sequence[timing.Row], name: str
) -> list[tuple[timing.Mark, np.ndarray]]:
    return [
        (row, pair)
        # What was traced since is not in the values.
        for row, pair in zip(rows, reading.values, strict=False)
        if isinstance(row, timing.Mark) and row.name == name
    ]


def _one_by_one(collectives: list[Timed]) -> list[Timed]:
    """A collective that is ready is not under way before its chain is free."""
    free: dict[int, float] = {}
    found = []
    for collective, begin, end in collectives:
        begin = max(begin, free.get(collective.chain, begin))
        found.append((collective, min(begin, end), end))
        free[collective.chain] = end
    return found


def sample_of(reading: Reading, rows: Sequence[timing.Row]) -> Sample:
    """Compute the sample of a step: means over the local replicas.

    Args:
        reading: `Reading`.
        rows: Sequence of `Row`, what its values are of.
    """
    replicas = replicas_of(reading, rows)
    seconds = reading.seconds / reading.num_steps
    if not replicas:
        nothing = (0.0, 0.0, 0.0, math.nan, math.nan)
        return Sample(reading.num_steps, seconds, 0.0, seconds, *nothing, {})
    exposed = _mean([_covered(r.exposed(), reading) for r in replicas])
    spans = [[(begin, end) for _, begin, end in r.collectives] for r in replicas]
    busy = [_covered(span, reading) for span in spans]
    # All steps of an execution but the first begin where another one ends.
    is_whole = reading.num_steps == 1
    first = min(replica.begin for replica in replicas)
    waited = max(0.0, first - reading.begin) if is_whole else 0.0
    samples, norm = notes(reading, rows)
    sent = sum(c.wire_bytes for r in replicas for c, _, _ in r.collectives)
    labelled = [replica.labelled() for replica in replicas]
    kinds = [replica.kinds() for replica in replicas]
    return Sample(
        num_steps=reading.num_steps,
        step_seconds=seconds,
        input_seconds=waited,
        compute_seconds=max(0.0, seconds - exposed),
        communication_seconds=_mean(busy),
        exposed_seconds=exposed,
        sent_bytes=sent / len(replicas),
        samples=samples,
        squared_norm=norm,
        buckets={
            label: _mean([e - b for b, e in (d[label] for d in labelled if label in d)])
            for label in labelled[0]
        }
        | {kind: _mean([own[kind] for own in kinds]) for kind in kinds[0]},
    )


def notes(reading: Reading, rows: Sequence[timing.Row]) -> tuple[float, float]:
    """The samples of the batch, and the worker's part of the squared norm."""
    samples, step = math.nan, math.nan
    for _, pair in _marks(reading, rows, step_events.BATCH):
        samples, step = float(pair[0]), float(pair[1])
    squares = [
        float(pair[0])
        for _, pair in _marks(reading, rows, step_events.NORM)
        # Noted in this execution, which has so many steps.
        if pair[1] > step - reading.num_steps
    ]
    return samples, sum(squares) if squares else math.nan


def _covered(intervals: list[Interval], reading: Reading) -> float:
    return seconds_covered(clipped(intervals, reading.begin, reading.end))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
