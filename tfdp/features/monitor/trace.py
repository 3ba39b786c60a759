"""Timeline: steps of all workers as a trace for Chrome and Perfetto."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from tfdp.features.monitor.readings import Interval, Reading, Replica, clipped, merged

# Lanes of a worker: the steps, and then two for each replica.
_STEPS_LANE, _LANES_PER_REPLICA = 0, 2
# Times in a file are eighths of a microsecond: as floats these are exact, also their
# sums and as the whole nanoseconds to which Perfetto cuts them off. The wall clock in
# a float64 is no finer.
_TICKS_PER_MICROSECOND = 8
# Bars of one lane that overlap by less do so by the clocks' own error.
_TOLERANCE_TICKS = _TICKS_PER_MICROSECOND


def clock_offset(first: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Estimate by how much another worker's clock is ahead of the first one's.

    A collective ends on all workers at nearly the same time, the shorter it is the
    more so; and on none before it has begun on all, which bounds the error however
    unequal they are.

    Args:
        first: Sequence of begin and end of each collective by the first worker's
            clock, in seconds.
        other: The same collectives by the other worker's clock.

    Returns:
        Float, seconds; 0 where there are no collectives.

    Example:

    >>> clock_offset([(0.0, 1.0), (2.0, 2.5)], [(100.9, 101.0), (102.0, 102.5)])
    100.0

    Source: Mills 1991, "Internet time synchronization: the network time protocol",
    for the bounds.
    """
    pairs = list(zip(first, other, strict=True))
    if not pairs:
        return 0.0
    pairs.sort(key=lambda pair: max(pair[0][1] - pair[0][0], pair[1][1] - pair[1][0]))
    short = pairs[: max(1, len(pairs) // 4)]
    estimate = statistics.median(b[1] - a[1] for a, b in short)
    least = max(b[0] - a[1] for a, b in pairs)
    most = min(b[1] - a[0] for a, b in pairs)
    if least > most:  # a clock was set, or drifts, while they ran
        return estimate
    return min(max(estimate, least), most)


@dataclasses.dataclass(frozen=True)
class Slice:
    """One bar of a trace.

    Args:
        lane: Int, number among the lanes of its worker.
        name: String.
        begin: Float, seconds by the worker's clock.
        end: Float.
        facts: Dict, what is shown when it is chosen.
    """

    lane: int
    name: str
    begin: float
    end: float
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class WorkerTrace:
    """Trace of one worker over some steps.

    Args:
        rank: Int.
        host: String.
        slices: List of `Slice`.
        lanes: Dict from lane to its name.
        collectives: Dict from a name that is the same on all workers to begin and
            end, by the worker's clock.
    """

    rank: int
    host: str
    slices: list[Slice]
    lanes: dict[int, str]
    collectives: dict[str, Interval]

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> WorkerTrace:
        """The inverse of `dataclasses.asdict`, also after a way through JSON."""
        slices = [Slice(**item) for item in content["slices"]]
        lanes = {int(lane): name for lane, name in content["lanes"].items()}
        collectives = {k: (v[0], v[1]) for k, v in content["collectives"].items()}
        return cls(content["rank"], content["host"], slices, lanes, collectives)


def trace_of_worker(
    rank: int,
    host: str,
    readings: Sequence[tuple[int, Reading]],
    replicas: Sequence[Sequence[Replica]],
    num_replicas: int,
) -> WorkerTrace:
    """The trace of a worker, from stamps inside the graph.

    Args:
        rank: Int.
        host: String.
        readings: Sequence of step number and `Reading`.
        replicas: Sequence with the local `Replica` objects of each reading.
        num_replicas: Int, on all workers.
    """
    trace = WorkerTrace(rank, host, [], {_STEPS_LANE: "steps"}, {})
    for (step, reading), local in zip(readings, replicas, strict=True):
        bar = Slice(_STEPS_LANE, f"step {step}", reading.begin, reading.end)
        trace.slices.append(bar)
        for number, replica in enumerate(local):
            compute = 1 + _LANES_PER_REPLICA * number
            collectives = compute + 1
            # Every worker has as many.
            name = f"replica {rank * len(local) + number}"
            trace.lanes[compute] = f"{name}: compute"
            trace.lanes[collectives] = f"{name}: collectives"
            trace.slices.extend(_phases(compute, reading, replica))
            trace.slices.extend(_collectives(collectives, step, replica))
            _note_common(trace, number, step, replica, num_replicas)
    return trace


def chrome_trace(workers: Sequence[WorkerTrace]) -> dict[str, Any]:
    """All workers in one trace, by the first one's clock.

    A lane whose bars overlap becomes several, of one name.

    Args:
        workers: Sequence of `WorkerTrace`, the first worker's first.

    Returns:
        Dict, to be written as JSON.

    Source: the Trace Event Format, which Perfetto and `chrome://tracing` read.
    """
    offsets = {worker.rank: _offset(workers[0], worker) for worker in workers}
    start = min(bar.begin - offsets[w.rank] for w in workers for bar in w.slices)
    events: list[dict[str, Any]] = []
    # Perfetto takes the thread whose number is its process's for the first one, and
    # finds a thread's name by its number alone: none is 0, and none is there twice.
    other_tids = itertools.count(2 + max(offsets))
    for worker in workers:
        pid = 1 + worker.rank
        events.append(_metadata("process_name", pid, pid, name=_title(worker)))
        events.append(_metadata("process_sort_index", pid, pid, sort_index=pid))
        zero = start + offsets[worker.rank]
        for order, (name, bars) in enumerate(_rows(worker, zero)):
            tid = next(other_tids) if order else pid
            events.append(_metadata("thread_name", pid, tid, name=name))
            events.append(_metadata("thread_sort_index", pid, tid, sort_index=order))
            events += [_event(pid, tid, bar) for bar in bars]
    # Names come first: Perfetto reads events that bear no time in their order.
    events.sort(key=lambda event: event["ph"] != "M")
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"clock_offsets_seconds": offsets},
    }


@dataclasses.dataclass
class _Bar:
    """A slice in ticks since the begin of the trace."""

    begin: int
    end: int
    slice: Slice


def _rows(worker: WorkerTrace, zero: float) -> Iterator[tuple[str, list[_Bar]]]:
    """Name and bars of each row of a worker; those of a row do not overlap."""
    for lane, name in sorted(worker.lanes.items()):
        bars = [_bar_of(s, zero) for s in worker.slices if s.lane == lane]
        for row in _without_overlap(bars):
            yield name, row


def _bar_of(shown: Slice, zero: float) -> _Bar:
    begin, end = (
        round(1e6 * _TICKS_PER_MICROSECOND * (moment - zero))
        for moment in (shown.begin, shown.end)
    )
    return _Bar(begin, max(begin, end), shown)


def _without_overlap(bars: Sequence[_Bar]) -> list[list[_Bar]]:
    """Spread bars over as few rows as they need, at least one.

    What overlaps by no more than the clocks' error is cut off instead.
    """
    rows: list[list[_Bar]] = [[]]
    for bar in sorted(bars, key=lambda bar: (bar.begin, bar.end)):
        for row in rows:
            if not row or row[-1].end <= bar.begin + _TOLERANCE_TICKS:
                break
        else:
            row = []
            rows.append(row)
        if row:
            row[-1].end = min(row[-1].end, bar.begin)
        row.append(bar)
    return rows


def _phases(lane: int, reading: Reading, replica: Replica) -> list[Slice]:
    """Bars of what a replica computes, from end to end of a step."""
    begin = min(max(replica.begin, reading.begin), reading.end)
    name = "input" if reading.num_steps == 1 else "earlier steps"
    bars = [Slice(lane, name, reading.begin, begin)]
    ready = replica.backward_end
    # Where nothing was reduced, the gradients were only added up.
    until = reading.end if ready is None else min(max(begin, ready), reading.end)
    if begin <= replica.loss < until:
        bars.append(Slice(lane, "forward", begin, replica.loss))
        bars.append(Slice(lane, "backward", replica.loss, until))
    else:  # The stamp of the loss came late: nothing waits for it.
        bars.append(Slice(lane, "forward and backward", begin, until))
    for begin, end in clipped(merged(replica.exposed()), until, reading.end):
        bars.append(Slice(lane, "update", until, begin))
        bars.append(Slice(lane, "communication", begin, end))
        until = end
    bars.append(Slice(lane, "update", until, reading.end))
    return [bar for bar in bars if bar.end > bar.begin]


def _collectives(lane: int, step: int, replica: Replica) -> Iterator[Slice]:
    """Bars of a replica's collectives."""
    for collective, begin, end in replica.collectives:
        facts = {
            "collective": collective.kind,
            "bytes": collective.num_bytes,
            "sent_bytes": round(collective.wire_bytes),
            "step": step,
        }
        yield Slice(lane, collective.label, begin, end, facts)


def _note_common(
    trace: WorkerTrace, number: int, step: int, replica: Replica, num_replicas: int
) -> None:
    """Note the collectives that all workers take part in, to align clocks."""
    counts: dict[str, int] = {}
    for collective, begin, end in replica.collectives:
        if collective.group_size == num_replicas or collective.label == "logs":
            count = counts.get(collective.label, 0)
            counts[collective.label] = count + 1
            key = f"{step}/{number}/{collective.label}/{count}"
            trace.collectives[key] = (begin, end)


def _offset(first: WorkerTrace, other: WorkerTrace) -> float:
    if first.rank == other.rank:
        return 0.0
    shared = sorted(first.collectives.keys() & other.collectives.keys())
    return clock_offset(
        [first.collectives[key] for key in shared],
        [other.collectives[key] for key in shared],
    )


def _title(worker: WorkerTrace) -> str:
    return f"worker {worker.rank} ({worker.host})"


def _event(pid: int, tid: int, bar: _Bar) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": bar.slice.name,
        "ts": bar.begin / _TICKS_PER_MICROSECOND,
        "dur": (bar.end - bar.begin) / _TICKS_PER_MICROSECOND,
        "args": bar.slice.facts,
    }


def _metadata(kind: str, pid: int, tid: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args}
