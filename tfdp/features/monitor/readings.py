"""Recorded values of a step on one worker, and the times computed from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tfdp.communication.collectives import step_events, timing
from tfdp.features.monitor.time_intervals import (
    Interval,
    clipped,
    seconds_covered,
)

# First words of the labels of collectives that overlap with the backward pass: neither
# the forward nor the backward pass waits for their results.
_IN_BACKGROUND = (timing.GRADIENTS, timing.ROWS, "logs", "statistics")
# Kinds of collectives of sharded parameters, which are recognized by the first word of
# their labels.
_KINDS = {
    "forward_gathers": timing.UNIT,
    "backward_gathers": timing.UNIT_AGAIN,
    "reduce_scatters": timing.GRADIENTS,
}
KINDS = tuple(name for kind in _KINDS for name in (kind, f"{kind}_exposed"))
# A collective with its start and end, in seconds of the wall clock, since time stamps
# in a graph use that clock.
Timed = tuple[timing.Collective, float, float]


@dataclasses.dataclass(frozen=True)
class Reading:
    """Recorded values of an execution: a step, or `steps_per_execution` steps.

    Args:
        values: Array `[num_rows, 3]`: three numbers of each `Collective` or `Mark`.
        begin: Float, end of the previous step, in seconds of the wall clock.
        end: Float, end of this step, in seconds of the wall clock.
        seconds: Float, time between the two by a monotonic clock.
        num_steps: Int, steps of the execution; the values are those of the last step.
    """

    values: np.ndarray
    begin: float
    end: float
    seconds: float
    num_steps: int


@dataclasses.dataclass(frozen=True)
class Sample:
    """Times and counts of one step of one worker.

    Args:
        num_steps: Int, steps of the execution that it represents.
        step_seconds: Float, time from the end of the previous step to that of this one.
        input_seconds: Float, time of the step before its data was available.
        compute_seconds: Float, time of the step without exposed communication.
        communication_seconds: Float, time in which a collective was running.
        exposed_seconds: Float, time in which only collectives were running.
        sent_bytes: Float, bytes sent by each replica.
        samples: Float, samples of the global batch; NaN if unknown.
        squared_norm: Float, this worker's part of the gradient's squared norm; NaN in
            steps that did not record it.
        buckets: Dict from label to seconds from the start of its first collective to
            the end of its last; with sharded parameters also from `KINDS` to seconds.
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
class ReplicaTimes:
    """Times of one replica's step, in seconds of the wall clock.

    Args:
        begin: Float, time at which its data was available.
        loss: Float, end of the forward pass.
        backward_end: Float, time at which the last gradient was ready for its
            collective, or `None` if gradients were not reduced.
        collectives: List of `Timed`: a `Collective`, its begin and its end.
    """

    begin: float
    loss: float
    backward_end: float | None
    collectives: list[Timed]

    def labelled(self) -> dict[str, Interval]:
        """Return, by label, begin of its first collective and end of its last one."""
        intervals: dict[str, Interval] = {}
        for collective, begin, end in self.collectives:
            first, last = intervals.get(collective.label, (begin, end))
            intervals[collective.label] = min(first, begin), max(last, end)
        return intervals

    def exposed(self) -> list[Interval]:
        """Return the intervals in which collectives kept the replica from computing.

        During the forward and the backward pass these are collectives that the pass
        waits for, such as those of synchronized BatchNormalization, and gathers of
        sharded parameters from the time at which they are needed. After the backward
        pass all collectives are exposed.
        """
        return [pair for timed in self.collectives for pair in self._exposed(timed)]

    def kinds(self) -> dict[str, float]:
        """Return the seconds of each kind of collective of sharded parameters.

        Returns:
            Dict with the keys `"forward_gathers"` and `"backward_gathers"`, of
            parameters, and `"reduce_scatters"`, of gradients; and with `"_exposed"`
            after each of these, for the time in which the replica did not compute.
            Empty if parameters are not sharded.
        """
        of_kind = {
            kind: [c for c in self.collectives if c[0].label.split()[0] == word]
            for kind, word in _KINDS.items()
        }
        if not of_kind["forward_gathers"]:
            return {}
        seconds = {}
        for kind, collectives in of_kind.items():
            exposed = [pair for timed in collectives for pair in self._exposed(timed)]
            seconds[kind] = seconds_covered(
                (begin, end) for _, begin, end in collectives
            )
            seconds[f"{kind}_exposed"] = seconds_covered(exposed)
        return seconds

    def _exposed(self, timed: Timed) -> list[Interval]:
        """Return when a collective kept a replica from computing: one interval or none.

        Args:
            timed: `Timed`, tuple of a `Collective`, its begin and its end.
        """
        collective, begin, end = timed
        since: float | None = begin
        if collective.label.split()[0] in _IN_BACKGROUND:
            since = self.backward_end
        elif collective.needed_at is not None:
            since = collective.needed_at
        if since is None or end <= since:
            return []
        return [(max(begin, since), end)]


def replicas_of(reading: Reading, rows: Sequence[timing.Row]) -> list[ReplicaTimes]:
    """Return the times of each local replica in the last step of a reading.

    Args:
        reading: `Reading` of the step.
        rows: Sequence of `Row`: the `Collective` or `Mark` of each row of the values.
    """
    times = {
        mark.replica: pair for mark, pair in _marks(reading, rows, step_events.TIMES)
    }
    replicas = []
    for replica, (begin, loss, _) in sorted(times.items()):
        since = reading.begin if reading.num_steps == 1 else begin
        collectives = _collectives_since(reading, rows, replica, since)
        ready: dict[str, float] = {}
        for collective, start, _ in collectives:
            if collective.is_of_gradients:
                known = ready.get(collective.label, start)
                ready[collective.label] = min(start, known)
        last = max(ready.values()) if ready else None
        in_order = _without_queueing(collectives)
        replicas.append(ReplicaTimes(float(begin), float(loss), last, in_order))
    return replicas


def _collectives_since(
    reading: Reading, rows: Sequence[timing.Row], replica: int, since: float
) -> list[Timed]:
    """Return the collectives of a replica whose input was ready at `since` or later.

    `rows` has the `Collective` or `Mark` of each row of the reading's values. Rows of
    collectives that this step did not run hold the times of an earlier step.
    """
    return [
        (_completed(row, float(third)), float(begin), float(end))
        for row, (begin, end, third) in zip(rows, reading.values, strict=False)
        if isinstance(row, timing.Collective)
        if row.replica == replica and begin >= since
    ]


def _completed(row: timing.Collective, third: float) -> timing.Collective:
    """Return a traced collective with the third value that a step recorded for it.

    If its size was unknown at tracing, the value is its `num_bytes`; if `is_awaited`,
    the value is `needed_at`. Other collectives are returned unchanged.

    Args:
        row: `Collective`, as it was traced.
        third: Float, the value: bytes, or seconds of the wall clock.
    """
    if row.num_bytes < 0:
        return dataclasses.replace(row, num_bytes=int(third))
    return dataclasses.replace(row, needed_at=third) if row.is_awaited else row


def _marks(
    reading: Reading, rows: Sequence[timing.Row], name: str
) -> list[tuple[timing.Mark, np.ndarray]]:
    """Return the values recorded by all marks of a name, such as the batch's samples.

    Args:
        reading: `Reading` of the step.
        rows: Sequence of `Row`: the `Collective` or `Mark` of each row of the values.
        name: String, name of a `Mark`, such as `step_events.BATCH`.

    Returns:
        List of pairs, in the order of `rows`: a `Mark`, and its values as an array of
        shape `[3]`, the two numbers that `name` stands for and an unused one.
    """
    # There may be fewer values than rows, since a row may have been traced after the
    # values were read.
    return [
        (row, pair)
        for row, pair in zip(rows, reading.values, strict=False)
        if isinstance(row, timing.Mark) and row.name == name
    ]


def _without_queueing(collectives: list[Timed]) -> list[Timed]:
    """Return all collectives, with starts not before the end of the previous one.

    The recorded start is the time at which the input of a collective was ready. It is
    moved if the previous collective in the same chain, whose collectives run one after
    another, ended later.
    """
    free: dict[int, float] = {}
    started = []
    for collective, begin, end in collectives:
        begin = max(begin, free.get(collective.chain, begin))
        started.append((collective, min(begin, end), end))
        free[collective.chain] = end
    return started


def sample_of(reading: Reading, rows: Sequence[timing.Row]) -> Sample:
    """Compute the times of a step from its reading, as means over the local replicas.

    Args:
        reading: `Reading` of the step.
        rows: Sequence of `Row`: the `Collective` or `Mark` of each row of the values.
    """
    replicas = replicas_of(reading, rows)
    seconds = reading.seconds / reading.num_steps
    if not replicas:
        nothing = (0.0, 0.0, 0.0, math.nan, math.nan)
        return Sample(reading.num_steps, seconds, 0.0, seconds, *nothing, {})
    exposed = _mean([_covered(r.exposed(), reading) for r in replicas])
    spans = [[(begin, end) for _, begin, end in r.collectives] for r in replicas]
    busy = [_covered(span, reading) for span in spans]
    # An execution of several steps has values of its last step only, which begins in
    # the middle of it: how long the first step has waited for data is unknown.
    is_whole = reading.num_steps == 1
    first = min(replica.begin for replica in replicas)
    waited = max(0.0, first - reading.begin) if is_whole else 0.0
    samples, norm = samples_and_norm(reading, rows)
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
        | {kind: _mean([by_kind[kind] for by_kind in kinds]) for kind in kinds[0]},
    )


def samples_and_norm(
    reading: Reading, rows: Sequence[timing.Row]
) -> tuple[float, float]:
    """Return the samples of the batch, and the worker's part of the squared norm.

    Args:
        reading: `Reading` of the step.
        rows: Sequence of `Row`: the `Collective` or `Mark` of each row of the values.

    Returns:
        Tuple of two floats, NaN for a value that was not recorded.
    """
    samples, step = math.nan, math.nan
    for _, pair in _marks(reading, rows, step_events.BATCH):
        samples, step = float(pair[0]), float(pair[1])
    # If the steps of this reading have not recorded a norm, its value is still that of
    # an earlier step. The recorded step number shows this, and the value is left out.
    squares = [
        float(pair[0])
        for _, pair in _marks(reading, rows, step_events.NORM)
        if pair[1] > step - reading.num_steps
    ]
    return samples, sum(squares) if squares else math.nan


def _covered(intervals: list[Interval], reading: Reading) -> float:
    """Return how many seconds of a reading's execution the intervals cover."""
    return seconds_covered(clipped(intervals, reading.begin, reading.end))


def _mean(values: list[float]) -> float:
    """Return the mean of at least one value."""
    return sum(values) / len(values)
