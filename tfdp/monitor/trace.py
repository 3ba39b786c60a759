"""Timeline: steps of all workers as a trace for Chrome and Perfetto."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from tfdp.monitor.readings import Interval, Reading, Replica, clipped, merged

# Lanes of a worker: the steps, and from here on those of each replica.
_STEPS_LANE, _LANES_PER_REPLICA = 0, 100


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
        lane: Int.
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
            lane = 1 + _LANES_PER_REPLICA * number
            trace.lanes[lane] = f"replica {number}: compute"
            trace.slices.extend(_phases(lane, reading, replica))
            _add_collectives(trace, lane + 1, number, step, replica)
            _note_common(trace, number, step, replica, num_replicas)
    return trace


def chrome_trace(workers: Sequence[WorkerTrace]) -> dict[str, Any]:
    """All workers in one trace, by the first one's clock.

    Args:
        workers: Sequence of `WorkerTrace`, the first worker's first.

    Returns:
        Dict, to be written as JSON.

    Source: the Trace Event Format, which Perfetto and `chrome://tracing` read.
    """
    events: list[dict[str, Any]] = []
    offsets = {}
    start = min(bar.begin for bar in workers[0].slices)
    for worker in workers:
        offset = _offset(workers[0], worker)
        offsets[worker.rank] = offset
        events.append(_name("process_name", worker.rank, 0, _title(worker)))
        for lane, name in sorted(worker.lanes.items()):
            events.append(_name("thread_name", worker.rank, lane, name))
            order = {"sort_index": lane}
            events.append(
                {**_name("thread_sort_index", worker.rank, lane, ""), "args": order}
            )
        events += [_event(worker.rank, bar, start + offset) for bar in worker.slices]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"clock_offsets_seconds": offsets},
    }


def _phases(lane: int, reading: Reading, replica: Replica) -> list[Slice]:
    """Bars of what a replica computes, from end to end of a step."""
    begin = max(replica.begin, reading.begin)
    name = "input" if reading.num_steps == 1 else "earlier steps"
    bars = [Slice(lane, name, reading.begin, begin)]
    has_loss = replica.loss >= begin
    ready = replica.backward_end
    if has_loss:
        bars.append(Slice(lane, "forward", begin, replica.loss))
    name = "backward" if has_loss else "forward and backward"
    since = replica.loss if has_loss else begin
    if ready is None:
        # Nothing was reduced: the gradients were only added up.
        bars.append(Slice(lane, name, since, reading.end))
        return bars
    until = max(since, ready)
    bars.append(Slice(lane, name, since, until))
    for begin, end in clipped(merged(replica.exposed()), until, reading.end):
        if begin > until:
            bars.append(Slice(lane, "update", until, begin))
        bars.append(Slice(lane, "communication", begin, end))
        until = end
    if reading.end > until:
        bars.append(Slice(lane, "update", until, reading.end))
    return bars


def _add_collectives(
    trace: WorkerTrace, first_lane: int, number: int, step: int, replica: Replica
) -> None:
    """Put collectives into as many lanes as overlap each other."""
    free: list[float] = []
    for collective, begin, end in sorted(replica.collectives, key=lambda c: c[1]):
        lane = next((i for i, until in enumerate(free) if until <= begin), len(free))
        free[lane : lane + 1] = [end]
        trace.lanes[first_lane + lane] = f"replica {number}: collectives"
        facts = {
            "collective": collective.kind,
            "bytes": collective.num_bytes,
            "sent_bytes": round(collective.wire_bytes),
            "step": step,
        }
        bar = Slice(first_lane + lane, collective.label, begin, end, facts)
        trace.slices.append(bar)


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


def _event(rank: int, bar: Slice, start: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": rank,
        "tid": bar.lane,
        "name": bar.name,
        "ts": round(1e6 * (bar.begin - start), 3),
        "dur": round(1e6 * (bar.end - bar.begin), 3),
        "args": bar.facts,
    }


def _name(kind: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": lane, "name": kind, "args": {"name": name}}
