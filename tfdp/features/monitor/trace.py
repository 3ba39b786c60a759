"""Traces: steps of all workers in the Trace Event Format of Chrome and Perfetto.

A lane is a horizontal line of bars in the viewer.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tfdp.features.monitor.time_intervals import Interval, clipped, merged

# Some commands write traces without importing TensorFlow. `readings` needs TensorFlow,
# and is therefore imported for type checkers only.
if TYPE_CHECKING:
    from tfdp.features.monitor.readings import Reading, ReplicaTimes

# Lane 0 of a worker shows its steps. Each replica has two lanes, since its collectives
# run at the same time as its compute.
_STEPS_LANE, _LANES_PER_REPLICA = 0, 2
# Times in the file are multiples of 1/8 microsecond: floats represent these and their
# sums exactly, and Perfetto, which truncates times to nanoseconds, changes none. Times
# of the wall clock in float64 are no finer.
_TICKS_PER_MICROSECOND = 8
# Overlaps of bars in one lane up to this length are errors of the clocks, and are cut
# off instead of shown in another row.
_TOLERANCE_TICKS = _TICKS_PER_MICROSECOND


def clock_offset(first: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Estimate how far another worker's clock is ahead of the first worker's.

    A collective ends on all workers at nearly the same time, especially a short one.
    It ends on no worker before it has started on all, which bounds the error.

    Args:
        first: Sequence of pairs of start and end of each collective by the first
            worker's clock, in seconds.
        other: Sequence of pairs, the same collectives by the other worker's clock.

    Returns:
        Float, seconds; 0 without collectives.

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
    # The bounds contradict each other if a clock was set, or drifted, during the trace.
    if least > most:
        return estimate
    return min(max(estimate, least), most)


@dataclasses.dataclass(frozen=True)
class Slice:
    """One bar of a trace.

    Args:
        lane: Int, number of its worker's line of bars that shows it.
        name: String, title of the bar.
        begin: Float, start in seconds by the worker's clock.
        end: Float, end in seconds by the worker's clock.
        facts: Dict, details that the viewer shows when the bar is selected.
    """

    lane: int
    name: str
    begin: float
    end: float
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class WorkerTrace:
    """Trace of one worker over several steps.

    Args:
        rank: Int, rank of the worker.
        host: String, host of the worker.
        slices: List of `Slice`.
        lanes: Dict from the number of a lane to its name.
        collectives: Dict from a name that is the same on all workers to start and
            end by the worker's clock.
    """

    rank: int
    host: str
    slices: list[Slice]
    lanes: dict[int, str]
    collectives: dict[str, Interval]

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> WorkerTrace:
        """Restore a trace from the dict of `dataclasses.asdict`, also one from JSON."""
        slices = [Slice(**item) for item in content["slices"]]
        lanes = {int(lane): name for lane, name in content["lanes"].items()}
        collectives = {k: (v[0], v[1]) for k, v in content["collectives"].items()}
        return cls(content["rank"], content["host"], slices, lanes, collectives)


def trace_of_worker(
    rank: int,
    host: str,
    readings: Sequence[tuple[int, Reading]],
    replicas: Sequence[Sequence[ReplicaTimes]],
    num_replicas: int,
) -> WorkerTrace:
    """Build the trace of a worker from time stamps inside the graph.

    Args:
        rank: Int, rank of the worker.
        host: String, host of the worker.
        readings: Sequence of pairs: number of a step and its `Reading`.
        replicas: Sequence with the local `ReplicaTimes` objects of each reading.
        num_replicas: Int, number of replicas on all workers.
    """
    trace = WorkerTrace(rank, host, [], {_STEPS_LANE: "steps"}, {})
    for (step, reading), local in zip(readings, replicas, strict=True):
        bar = Slice(_STEPS_LANE, f"step {step}", reading.begin, reading.end)
        trace.slices.append(bar)
        for number, replica in enumerate(local):
            compute = 1 + _LANES_PER_REPLICA * number
            collectives = compute + 1
            # `rank * len(local)` is the number of replicas on workers of lower rank,
            # since all workers have the same number of replicas.
            name = f"replica {rank * len(local) + number}"
            trace.lanes[compute] = f"{name}: compute"
            trace.lanes[collectives] = f"{name}: collectives"
            trace.slices.extend(_phases(compute, reading, replica))
            trace.slices.extend(_collectives(collectives, step, replica))
            _record_common_collectives(trace, number, step, replica, num_replicas)
    return trace


def chrome_trace(workers: Sequence[WorkerTrace]) -> dict[str, Any]:
    """Merge the traces of all workers, by the first worker's clock.

    A lane with overlapping bars is shown as several rows of the same name.

    Args:
        workers: Sequence of `WorkerTrace`, beginning with the first worker's.

    Returns:
        Dict in the Trace Event Format, to be written as JSON.

    Source: the Trace Event Format, which Perfetto and `chrome://tracing` read.
    """
    offsets = {worker.rank: _offset(workers[0], worker) for worker in workers}
    start = min(bar.begin - offsets[w.rank] for w in workers for bar in w.slices)
    events: list[dict[str, Any]] = []
    # Perfetto looks up names by thread number alone, so thread numbers must be unique
    # over all workers, and not 0. It shows the thread whose number equals that of its
    # process as the main thread.
    other_tids = itertools.count(2 + max(offsets))
    for worker in workers:
        pid = 1 + worker.rank
        title = f"worker {worker.rank} ({worker.host})"
        events.append(_metadata("process_name", pid, pid, name=title))
        events.append(_metadata("process_sort_index", pid, pid, sort_index=pid))
        zero = start + offsets[worker.rank]
        for order, (name, bars) in enumerate(_rows(worker, zero)):
            tid = next(other_tids) if order else pid
            events.append(_metadata("thread_name", pid, tid, name=name))
            events.append(_metadata("thread_sort_index", pid, tid, sort_index=order))
            events += [_event(pid, tid, bar) for bar in bars]
    # Metadata events, which name the rows, have no time. Perfetto reads them in file
    # order, so they must precede the bars.
    events.sort(key=lambda event: event["ph"] != "M")
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"clock_offsets_seconds": offsets},
    }


@dataclasses.dataclass
class _Bar:
    """A slice with its start and end in ticks of 1/8 microsecond.

    Args:
        begin: Int, start in ticks since the start of the trace.
        end: Int, end in ticks since the start of the trace.
        slice: `Slice`.
    """

    begin: int
    end: int
    slice: Slice


def _rows(worker: WorkerTrace, zero: float) -> Iterator[tuple[str, list[_Bar]]]:
    """Yield the name and the bars of each row of a worker, without overlaps.

    Args:
        worker: `WorkerTrace`.
        zero: Float, start of the trace in seconds by the worker's clock.
    """
    for lane, name in sorted(worker.lanes.items()):
        bars = [_bar_of(s, zero) for s in worker.slices if s.lane == lane]
        for row in _without_overlap(bars):
            yield name, row


def _bar_of(shown: Slice, zero: float) -> _Bar:
    """Convert a slice to ticks since `zero`, a time in seconds by the same clock."""
    begin, end = (
        round(1e6 * _TICKS_PER_MICROSECOND * (moment - zero))
        for moment in (shown.begin, shown.end)
    )
    return _Bar(begin, max(begin, end), shown)


def _without_overlap(bars: Sequence[_Bar]) -> list[list[_Bar]]:
    """Distribute bars over the fewest rows without overlaps, at least one.

    Overlaps within the clocks' error are cut off instead.
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


def _phases(lane: int, reading: Reading, replica: ReplicaTimes) -> list[Slice]:
    """Return the bars of a replica's phases, such as "forward", which fill the step.

    Args:
        lane: Int, number of the lane.
        reading: `Reading` of the step.
        replica: `ReplicaTimes`, its times in the step.
    """
    begin = min(max(replica.begin, reading.begin), reading.end)
    name = "input" if reading.num_steps == 1 else "earlier steps"
    bars = [Slice(lane, name, reading.begin, begin)]
    ready = replica.backward_end
    # A step without all-reduces of gradients only accumulates them: no update follows
    # its backward pass, which fills the rest of the step.
    until = reading.end if ready is None else min(max(begin, ready), reading.end)
    if begin <= replica.loss < until:
        bars.append(Slice(lane, "forward", begin, replica.loss))
        bars.append(Slice(lane, "backward", replica.loss, until))
    else:
        # The time stamp of the loss may be too late to divide the passes, since no
        # operation waits for it.
        bars.append(Slice(lane, "forward and backward", begin, until))
    for begin, end in clipped(merged(replica.exposed()), until, reading.end):
        bars.append(Slice(lane, "update", until, begin))
        bars.append(Slice(lane, "communication", begin, end))
        until = end
    bars.append(Slice(lane, "update", until, reading.end))
    return [bar for bar in bars if bar.end > bar.begin]


def _collectives(lane: int, step: int, replica: ReplicaTimes) -> Iterator[Slice]:
    """Yield the bars of a replica's collectives.

    Args:
        lane: Int, number of the lane.
        step: Int, number of the step.
        replica: `ReplicaTimes`, its times in the step.
    """
    for collective, begin, end in replica.collectives:
        facts = {
            "collective": collective.kind,
            "bytes": collective.num_bytes,
            "sent_bytes": round(collective.wire_bytes),
            "step": step,
        }
        yield Slice(lane, collective.label, begin, end, facts)


def _record_common_collectives(
    trace: WorkerTrace, number: int, step: int, replica: ReplicaTimes, num_replicas: int
) -> None:
    """Record the collectives in which all workers take part, to align clocks.

    Args:
        trace: `WorkerTrace` in which they are recorded.
        number: Int, index of the replica on its worker.
        step: Int, number of the step.
        replica: `ReplicaTimes`, its times in the step.
        num_replicas: Int, number of replicas on all workers.
    """
    counts: dict[str, int] = {}
    for collective, begin, end in replica.collectives:
        if collective.group_size == num_replicas or collective.label == "logs":
            count = counts.get(collective.label, 0)
            counts[collective.label] = count + 1
            key = f"{step}/{number}/{collective.label}/{count}"
            trace.collectives[key] = (begin, end)


def _offset(first: WorkerTrace, other: WorkerTrace) -> float:
    """Estimate how far another worker's clock is ahead of the first's, in seconds."""
    if first.rank == other.rank:
        return 0.0
    shared = sorted(first.collectives.keys() & other.collectives.keys())
    return clock_offset(
        [first.collectives[key] for key in shared],
        [other.collectives[key] for key in shared],
    )


def _event(pid: int, tid: int, bar: _Bar) -> dict[str, Any]:
    """Return the event of a bar: a complete event ("X") of the Trace Event Format.

    Args:
        pid: Int, number of the process, the worker.
        tid: Int, number of the thread, the row.
        bar: `_Bar`.
    """
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
    """Return a metadata event ("M") of the Trace Event Format.

    Args:
        kind: String, such as `"thread_name"`.
        pid: Int, number of the process, the worker.
        tid: Int, number of the thread, the row.
        **args: Arguments of the event.
    """
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args}
