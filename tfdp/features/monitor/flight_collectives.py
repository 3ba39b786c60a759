"""Collectives of all workers in their flight records: which was not entered by all."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from tfdp.communication.coordination.flight_record import (
    TEXTS,
    FlightRecord,
    RecordedCollective,
    Span,
)
from tfdp.communication.coordination.flight_steps import TENSORFLOW
from tfdp.features.monitor.time_intervals import Interval, seconds_covered
from tfdp.features.monitor.trace import clock_offset

# Seconds after which a worker that waits for another one counts as stuck. Shorter waits
# show nothing, since workers write their records at slightly different times.
STUCK_SECONDS = 1.0
# A step whose collectives TensorFlow runs counts as stuck only after this multiple of
# its usual time, since such a step also computes.
_SLOW_STEP = 3.0
# A worker is slow only if the others wait for it during at least this fraction of the
# time: shorter waits hardly delay the job.
_LATE_PART = 0.1
# A worker is slow only if at least this fraction of all waits is for it: otherwise
# several workers delay the others, and no single one is the cause.
_OWN_PART = 0.8
# With fewer collectives than this, no worker counts as slow, since a worker may be the
# last one in them by chance.
_FEWEST_COLLECTIVES = 20

# Flight records by rank. Ranks may be missing, since a worker that was killed may have
# written no record.
Records = Mapping[int, FlightRecord]
# The collectives of all workers by lane, number and rank: the members of a collective
# record it under the same lane and number, and their entries are compared by these.
Lanes = dict[str, dict[int, dict[int, RecordedCollective]]]
_Timed = TypeVar("_Timed", RecordedCollective, Span)


@dataclasses.dataclass(frozen=True)
class IncompleteCollective:
    """A collective that some members of its group have entered, and some have not.

    Args:
        entries: Dict from the rank of a member that has entered, and waits, to its
            `RecordedCollective`.
        missing: List of ints, ranks of the members that have not entered, or that left
            no record.
        waited_seconds: Float, how long the first member has waited for a missing one.
        begin: Float, time at which the first member entered, in seconds by the first
            worker's clock.
    """

    entries: dict[int, RecordedCollective]
    missing: list[int]
    waited_seconds: float
    begin: float

    @property
    def first(self) -> RecordedCollective:
        """`RecordedCollective` of the member that has entered first."""
        return min(self.entries.values(), key=lambda entry: entry.begin)


@dataclasses.dataclass(frozen=True)
class SlowWorker:
    """The worker that the others wait for most.

    Args:
        rank: Int, rank of the worker.
        waited_seconds: Float, how long the others have waited for it.
        seconds: Float, time from the first entry of any worker into a collective to the
            last entry of any worker.
        num_late: Int, number of collectives that this worker has entered last.
        num_collectives: Int, number of collectives that all workers have entered.
    """

    rank: int
    waited_seconds: float
    seconds: float
    num_late: int
    num_collectives: int


def of_one_attempt(records: Iterable[FlightRecord]) -> tuple[Records, list[int]]:
    """Return the records of a job's newest attempt, without those of earlier ones.

    Args:
        records: Iterable of `FlightRecord`, some of which earlier attempts may have
            left.

    Returns:
        Tuple of the kept records by rank, and of the ranks that have a record that was
        left out.
    """
    ordered = sorted(records, key=lambda record: record.written_at)
    kept: dict[int, FlightRecord] = {}
    newest = ordered[-1]
    for record in reversed(ordered):
        is_same = record is newest or (
            record.num_workers == newest.num_workers
            and record.written_at >= newest.started_at
        )
        if is_same and record.rank not in kept:
            kept[record.rank] = record
    left_out = {record.rank for record in ordered if kept.get(record.rank) != record}
    return dict(sorted(kept.items())), sorted(left_out)


def by_one_clock(records: Records) -> Records:
    """Return the records with all times by the clock of the first worker."""
    first, moved = completed(first_record(records)), {}
    for rank, record in records.items():
        own = completed(record)
        shared = sorted(first.keys() & own.keys())
        offset = clock_offset([first[k] for k in shared], [own[k] for k in shared])
        moved[rank] = dataclasses.replace(
            record,
            written_at=record.written_at - offset,
            collectives=[_moved(each, offset) for each in record.collectives],
            spans=[_moved(each, offset) for each in record.spans],
        )
    return moved


def _moved(timed: _Timed, offset: float) -> _Timed:
    """Return a copy of a collective or span, with times `offset` seconds earlier."""
    end = None if timed.end is None else timed.end - offset
    return dataclasses.replace(timed, begin=timed.begin - offset, end=end)


def lanes_of(records: Records) -> Lanes:
    """Return all workers' collectives by lane, number and rank.

    A lane is a sequence of collectives that run one after another, numbered in order.
    """
    found: Lanes = {}
    for rank, record in records.items():
        for each in record.collectives:
            found.setdefault(each.lane, {}).setdefault(each.number, {})[rank] = each
    return {lane: dict(sorted(numbers.items())) for lane, numbers in found.items()}


def completed(record: FlightRecord) -> dict[str, Interval]:
    """Return begin and end of each complete collective that all workers take part in.

    Steps that TensorFlow runs are left out.

    Args:
        record: `FlightRecord` of one worker.

    Returns:
        Dict from a key, which consists of the lane and the number of the collective and
        is the same on all workers, to its times in seconds by this worker's clock.
    """
    return {
        f"{each.lane}/{each.number:020d}": (each.begin, each.end)
        for each in record.collectives
        if each.end is not None
        and len(each.ranks) == record.num_workers
        # Steps that TensorFlow runs are left out, since replicas that take local steps
        # end them at different times.
        and each.kind != TENSORFLOW
    }


def first_differing(lanes: Lanes) -> dict[int, RecordedCollective] | None:
    """Return the first collective whose kind, key, dtype or size differs by worker.

    Args:
        lanes: Dict, the result of `lanes_of`.

    Returns:
        Dict from ranks to the `RecordedCollective` of each worker, or `None` without
        one.
    """
    found = [
        entries
        for numbers in lanes.values()
        for entries in numbers.values()
        if len({signature(entry) for entry in entries.values()}) > 1
    ]
    return min(
        found, key=lambda entries: min(map(_begin, entries.values())), default=None
    )


def signature(entry: RecordedCollective) -> tuple:
    """Return what all members of a collective must share: kind, key, dtype, size."""
    has_any_size = entry.kind in (TEXTS, TENSORFLOW, "all_to_all")
    size = 0 if has_any_size else entry.num_bytes
    return entry.kind, entry.key, entry.dtype, size


def _begin(entry: RecordedCollective) -> float:
    """Return the time at which a worker has entered a collective: a sort key."""
    return entry.begin


def first_incomplete(records: Records, lanes: Lanes) -> IncompleteCollective | None:
    """Return the earliest collective in which a worker was stuck, or `None`.

    A worker is stuck in a collective if it has waited for others for too long, or if
    one of these is lost or has left no record.

    Args:
        records: Dict from a rank to its `FlightRecord`.
        lanes: Dict, the result of `lanes_of`.
    """
    found = [
        stalled
        for numbers in lanes.values()
        for stalled in _incomplete(records, numbers)
    ]
    lost = {record.lost for record in records.values()}
    stuck = [
        stalled
        for stalled in found
        if stalled.waited_seconds >= _stuck_seconds(records, stalled)
        or any(rank in lost or rank not in records for rank in stalled.missing)
    ]
    return min(stuck, key=lambda stalled: stalled.begin, default=None)


def _stuck_seconds(records: Records, stalled: IncompleteCollective) -> float:
    """Return the time after which workers in a collective are stuck.

    It is one second. For the collectives of a step that TensorFlow runs, it is at least
    three times the median time of such steps in the records of the waiting workers.

    Args:
        records: Dict from a rank to its `FlightRecord`.
        stalled: `IncompleteCollective` in which they wait.
    """
    steps = [
        each.end - each.begin
        for rank in stalled.entries
        for each in records[rank].collectives
        if stalled.first.kind == each.kind == TENSORFLOW and each.end is not None
    ]
    usual = statistics.median(steps) if steps else 0.0
    return max(STUCK_SECONDS, _SLOW_STEP * usual)


def _incomplete(
    records: Records, numbers: Mapping[int, dict[int, RecordedCollective]]
) -> Iterator[IncompleteCollective]:
    """Yield the first collective of a lane that not all members have entered, if any.

    A lane runs its collectives one after another, so a worker has entered all up to its
    last one, even those that its flight record has dropped.

    Args:
        records: Dict from a rank to its `FlightRecord`.
        numbers: Dict, the collectives of the lane: from the number of each one to a
            dict from a rank to its `RecordedCollective`.
    """
    last = {rank: number for number, each in numbers.items() for rank in each}
    members = next(iter(next(iter(numbers.values())).values())).ranks
    absent = [rank for rank in members if rank not in records]
    for number, entries in numbers.items():
        waiting = {
            rank: entry
            for rank, entry in entries.items()
            if entry.end is None and last[rank] == number
        }
        late = [r for r in members if r in records and last.get(r, -1) < number]
        if waiting and (late or absent):
            begin = min(map(_begin, waiting.values()))
            # The record of a late worker shows that the worker was missing at least
            # until it wrote the record.
            until = [max(records[rank].written_at for rank in waiting)]
            until += [records[rank].written_at for rank in late]
            yield IncompleteCollective(
                waiting, late + absent, max(0.0, min(until) - begin), begin
            )
            return


def slowest_of(records: Records, lanes: Lanes) -> SlowWorker | None:
    """Return the worker that the others wait for most, or `None` if none is slow.

    They wait for the worker that enters a collective last, from the entry before its
    own. It is slow if they do so for 10 % of the time and more, and for 80 % of all
    waits. With fewer than 20 collectives that all have entered, no worker is slow.

    Args:
        records: Dict from a rank to its `FlightRecord`.
        lanes: Dict, the result of `lanes_of`: the collectives by lane, number and rank.
    """
    common = [
        entries
        for numbers in lanes.values()
        for entries in numbers.values()
        if len(entries) == len(records) == first_record(records).num_workers
        # Steps that TensorFlow runs are left out: all workers begin a step when the
        # previous one has ended, however slow one of the workers is.
        and TENSORFLOW not in (entry.kind for entry in entries.values())
    ]
    if len(common) < _FEWEST_COLLECTIVES or len(records) == 1:
        return None
    waits: dict[int, list[Interval]] = {rank: [] for rank in records}
    for entries in common:
        *_, (before, _), (begin, rank) = sorted(
            (e.begin, r) for r, e in entries.items()
        )
        waits[rank].append((before, begin))
    # Waits in several lanes may overlap in time, so their sum would be too large: time
    # that is covered by several waits counts once.
    seconds = {rank: seconds_covered(its) for rank, its in waits.items()}
    slowest = max(seconds, key=lambda rank: seconds[rank])
    begins = [entry.begin for entries in common for entry in entries.values()]
    span = max(begins) - min(begins)
    least = max(_LATE_PART * span, _OWN_PART * sum(seconds.values()))
    if span == 0.0 or seconds[slowest] < least:
        return None
    late = len(waits[slowest])
    return SlowWorker(slowest, seconds[slowest], span, late, len(common))


def first_record(records: Records) -> FlightRecord:
    """Return the record of the lowest rank."""
    return records[min(records)]
