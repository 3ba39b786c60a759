"""Flight records of several workers: who was where, and who was missing."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from tfdp.communication.coordination.flight_record import (
    TEXTS,
    FlightRecord,
    RecordedCollective,
    Span,
)
from tfdp.features.monitor.time_intervals import Interval, seconds_covered
from tfdp.features.monitor.trace import Slice, WorkerTrace, clock_offset
from tfdp.ground.text import pluralize

# A worker that others wait for is stuck after this time. In a job that runs, records
# are written at slightly different times.
_STUCK_SECONDS = 1.0
# A worker is slow if the others have waited for it for this part of the time, and for
# this part of all waits, in enough collectives.
_LATE_PART, _OWN_PART, _FEWEST_COLLECTIVES = 0.1, 0.8, 20
_NO_PLACE = "no call of Keras or tfdp"
# Most workers that are listed by rank.
_MOST_RANKS = 8
_LOOP_LANE = 0
# The operation's own part of its name scope.
_OPERATION = re.compile("(?:^|/)Collective_")

# The record of each worker that has written one, by rank.
Records = Mapping[int, FlightRecord]
# The collectives of all workers by lane, number and rank.
Lanes = dict[str, dict[int, dict[int, RecordedCollective]]]
_Timed = TypeVar("_Timed", RecordedCollective, Span)


@dataclasses.dataclass(frozen=True)
class WorkerRow:
    """A worker in the table of `tfdp doctor`.

    Args:
        rank: Int, rank of the worker.
        host: String, name of its host, or `""` if unknown.
        place: String, where it was.
        collective: String, the last collective that it has entered, or `""`.
        state: String, whether it has completed it.
        line: String, the innermost line of the user's code in its main thread.
    """

    rank: int
    host: str
    place: str
    collective: str
    state: str
    line: str


@dataclasses.dataclass(frozen=True)
class _Meeting:
    """A collective as all members of its group have entered it, or not.

    Args:
        entries: Dict from the rank of a member that has entered to its
            `RecordedCollective`.
        missing: List of ints, the members that have not, or that left no record.
        waited_seconds: Float, how long the first member has waited for one of them.
        begin: Float, when the first member has entered, by the first worker's clock.
    """

    entries: dict[int, RecordedCollective]
    missing: list[int]
    waited_seconds: float
    begin: float

    @property
    def first(self) -> RecordedCollective:
        """`RecordedCollective` of the member that has entered first."""
        return min(self.entries.values(), key=lambda entry: entry.begin)


def of_one_attempt(records: Iterable[FlightRecord]) -> tuple[Records, list[int]]:
    """Leave out records of earlier attempts, whose files have not been overwritten.

    Args:
        records: Iterable of `FlightRecord`.

    Returns:
        Tuple of the records by rank, and of the ranks whose record was left out.
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


def explain(records: Records) -> str:
    """Say in one sentence who was where, from the records of a job.

    Args:
        records: Dict from a rank to its `FlightRecord`, with at least one.

    Returns:
        String: the first collective that not all have entered, who was missing, and
        what that worker did; or, if there is none, which worker the others wait for.

    Source: the flight recorder of PyTorch,
    https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
    """
    records = _by_one_clock(records)
    lanes = _lanes(records)
    if (differing := _first_differing(lanes)) is not None:
        return _sentence_of_difference(records, differing)
    meeting = _first_incomplete(records, lanes)
    slowest, late = _slowest(records, lanes)
    if meeting is not None:
        also = late if slowest in meeting.missing else ""
        return _sentence_of_missing(records, meeting, also)
    if absent := [r for r in range(_any(records).num_workers) if r not in records]:
        doing = "; ".join(f"worker {r} {_activity(records, r)}" for r in absent)
        return f"No worker with a record waits for another, but {doing}."
    if late:
        return f"All workers have entered the same collectives, but {late}."
    return (
        "All workers have entered the same collectives, and none has waited for "
        f"another for {_STUCK_SECONDS:g} s. {_reasons(records)}."
    )


def rows_of(records: Records) -> list[WorkerRow]:
    """Return the table of all workers of the job, also of those without a record."""
    return [_row(records, rank) for rank in range(_any(records).num_workers)]


def trace_of(record: FlightRecord) -> WorkerTrace:
    """Return a worker's record as a trace: its places, and each lane of collectives.

    Args:
        record: `FlightRecord`.
    """
    trace = WorkerTrace(record.rank, record.host, [], {_LOOP_LANE: "loop"}, {})
    for span in record.spans:
        end = record.written_at if span.end is None else span.end
        if span.name:
            trace.slices.append(Slice(_LOOP_LANE, span.name, span.begin, end))
    lanes = sorted({each.lane for each in record.collectives})
    for each in record.collectives:
        lane = 1 + lanes.index(each.lane)
        trace.lanes[lane] = f"collectives {each.lane}"
        is_open = each.end is None
        end = record.written_at if each.end is None else each.end
        facts = {
            "number": each.number,
            "bytes": each.num_bytes,
            "workers": list(each.ranks),
            "completed": not is_open,
        }
        name = f"{_name(each)} (not completed)" if is_open else _name(each)
        trace.slices.append(Slice(lane, name, each.begin, end, facts))
    trace.collectives.update(_completed(record))
    return trace


def _by_one_clock(records: Records) -> Records:
    """Return the records with all times by the clock of the first worker."""
    first, moved = _completed(_any(records)), {}
    for rank, record in records.items():
        own = _completed(record)
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
    """Return a collective or span whose times are earlier by an offset in seconds."""
    end = None if timed.end is None else timed.end - offset
    return dataclasses.replace(timed, begin=timed.begin - offset, end=end)


def _lanes(records: Records) -> Lanes:
    """Return the collectives of all workers by lane, number and rank."""
    found: Lanes = {}
    for rank, record in records.items():
        for each in record.collectives:
            found.setdefault(each.lane, {}).setdefault(each.number, {})[rank] = each
    return {lane: dict(sorted(numbers.items())) for lane, numbers in found.items()}


def _completed(record: FlightRecord) -> dict[str, Interval]:
    """Return begin and end of each complete collective of all workers, by its name."""
    return {
        f"{each.lane}/{each.number:020d}": (each.begin, each.end)
        for each in record.collectives
        if each.end is not None and len(each.ranks) == record.num_workers
    }


def _first_differing(lanes: Lanes) -> dict[int, RecordedCollective] | None:
    """Return the first collective, by rank, that is another one on some workers."""
    found = [
        entries
        for numbers in lanes.values()
        for entries in numbers.values()
        if len({_signature(entry) for entry in entries.values()}) > 1
    ]
    return min(
        found, key=lambda entries: min(map(_begin, entries.values())), default=None
    )


def _signature(entry: RecordedCollective) -> tuple:
    """Return what must be equal on all members of a collective."""
    size = 0 if entry.kind in (TEXTS, "all_to_all") else entry.num_bytes
    return entry.kind, entry.key, entry.dtype, size


def _begin(entry: RecordedCollective) -> float:
    """Return when a worker has entered a collective."""
    return entry.begin


def _first_incomplete(records: Records, lanes: Lanes) -> _Meeting | None:
    """Return the collective in which a worker has waited first, or `None`."""
    meetings = [
        meeting
        for numbers in lanes.values()
        for meeting in _incomplete(records, numbers)
    ]
    lost = {record.lost for record in records.values()}
    stuck = [
        meeting
        for meeting in meetings
        if meeting.waited_seconds >= _STUCK_SECONDS
        or any(rank in lost or rank not in records for rank in meeting.missing)
    ]
    return min(stuck, key=lambda meeting: meeting.begin, default=None)


def _incomplete(
    records: Records, numbers: Mapping[int, dict[int, RecordedCollective]]
) -> Iterator[_Meeting]:
    """Yield the first collective of a lane that not all members have entered, if any.

    A lane runs its collectives one after another, so that a worker has entered those
    up to its last one, also where its ring has dropped them.

    Args:
        records: Dict from a rank to its `FlightRecord`.
        numbers: Dict from a number to the `RecordedCollective` of each rank.
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
            # A worker is missing until it wrote its record, at least.
            until = [max(records[rank].written_at for rank in waiting)]
            until += [records[rank].written_at for rank in late]
            yield _Meeting(waiting, late + absent, max(0.0, min(until) - begin), begin)
            return


def _slowest(records: Records, lanes: Lanes) -> tuple[int | None, str]:
    """Return the worker that the others wait for most, and a clause that says so.

    Args:
        records: Dict from a rank to its `FlightRecord`.
        lanes: Dict, the result of `_lanes`.

    Returns:
        Tuple of its rank and the clause; `None` and `""` if no worker is slow.
    """
    common = [
        entries
        for numbers in lanes.values()
        for entries in numbers.values()
        if len(entries) == len(records) == _any(records).num_workers
    ]
    if len(common) < _FEWEST_COLLECTIVES or len(records) == 1:
        return None, ""
    waits: dict[int, list[Interval]] = {rank: [] for rank in records}
    for entries in common:
        *_, (before, _), (begin, rank) = sorted(
            (e.begin, r) for r, e in entries.items()
        )
        waits[rank].append((before, begin))
    # Collectives of several lanes wait at the same time.
    seconds = {rank: seconds_covered(its) for rank, its in waits.items()}
    slowest = max(seconds, key=lambda rank: seconds[rank])
    begins = [entry.begin for entries in common for entry in entries.values()]
    span = max(begins) - min(begins)
    least = max(_LATE_PART * span, _OWN_PART * sum(seconds.values()))
    if span == 0.0 or seconds[slowest] < least:
        return None, ""
    return slowest, (
        f"worker {slowest} on {records[slowest].host} is slow: for "
        f"{seconds[slowest]:.1f} of {span:.1f} s the others have waited for it, in "
        f"{len(waits[slowest])} of {pluralize(len(common), 'collective')}"
    )


def _sentence_of_difference(
    records: Records, entries: Mapping[int, RecordedCollective]
) -> str:
    """Format the sentence about workers that are at different collectives."""
    groups: dict[tuple, list[int]] = {}
    for rank, entry in entries.items():
        groups.setdefault(_signature(entry), []).append(rank)
    parts = [
        f"{_workers(ranks)} {_be(ranks)} at {_describe(entries[ranks[0]])} "
        f"in {_place(records[ranks[0]], entries[ranks[0]])}"
        for ranks in groups.values()
    ]
    entry = next(iter(entries.values()))
    return (
        "The workers run their collectives in different orders: as number "
        f"{_number(entry)} in lane {entry.lane}, {' and '.join(parts)}."
    )


def _sentence_of_missing(records: Records, meeting: _Meeting, late: str) -> str:
    """Format the sentence about a collective that not all have entered.

    Args:
        records: Dict from a rank to its `FlightRecord`.
        meeting: `_Meeting`, the collective.
        late: String, a clause about a missing worker that is slow, or `""`.
    """
    ranks, missing = sorted(meeting.entries), meeting.missing
    wait = "waits" if len(ranks) == 1 else "wait"
    where = _place(records[ranks[0]], meeting.entries[ranks[0]])
    waiting = (
        f"{_workers(ranks)} {wait} for {_workers(missing)} in "
        f"{_describe(meeting.first)} in {where} for {meeting.waited_seconds:.1f} s"
    )
    doing = "; ".join(
        f"worker {rank} {_activity(records, rank)}" for rank in missing[:_MOST_RANKS]
    )
    also = f"; {late}" if late else ""
    return _sentence(f"{waiting}: {doing}{also}.")


def _activity(records: Records, rank: int) -> str:
    """Describe what a worker did that has not entered a collective, as a predicate."""
    if rank not in records:
        return f"has left no record{_last_sign(records, rank)}"
    record = records[rank]
    # Data may be read on a thread of TensorFlow.
    line = (record.source and record.other_user_line) or record.user_line
    at = f", at {line}" if line else ""
    if record.source:
        return (
            f"waits for a batch of {record.source} at {record.place or _NO_PLACE}{at}"
        )
    if (entered := _open_collective(record)) is not None:
        return f"waits in {_describe(entered)} at {record.place or _NO_PLACE}{at}"
    if record.lost == rank:
        return f"has not entered it: {record.reason}"
    return f"has not entered it, and was at {record.place or _NO_PLACE}{at}"


def _open_collective(record: FlightRecord) -> RecordedCollective | None:
    """Return the collective in which a worker waits, or `None`.

    One that is followed by another of its lane has ended with an error.
    """
    last = {each.lane: each for each in record.collectives}
    return next((each for each in last.values() if each.end is None), None)


def _last_sign(records: Records, rank: int) -> str:
    """Describe what the others know of a worker without a record, as clauses."""
    causes = [each.reason for each in records.values() if each.lost == rank]
    cause = f" ({causes[0]})" if causes else ""
    if last := _last_common(records, rank):
        return f"{cause}; its last complete collective was {last}"
    peers = [each.peers[rank] for each in records.values() if rank in each.peers]
    places = [(peer.silent_seconds, peer.place) for peer in peers if peer.place]
    return f"{cause}; it was last seen at {min(places)[1]}" if places else cause


def _last_common(records: Records, rank: int) -> str:
    """Describe the last complete collective with a worker and its place, or `""`."""
    found = [
        (each.end, number, record, each)
        for number, record in enumerate(records.values())
        for each in record.collectives
        if each.end is not None and rank in each.ranks
    ]
    if not found:
        return ""
    *_, record, last = max(found, key=lambda each: each[:2])
    return f"{_describe(last)} in {_place(record, last)}"


def _row(records: Records, rank: int) -> WorkerRow:
    """Return the row of a worker."""
    if rank not in records:
        return WorkerRow(rank, "", "no record", "", "", "")
    record = records[rank]
    place = record.place or _NO_PLACE
    if record.source:
        place = f"{place}, waits for a batch of {record.source}"
    if not record.collectives:
        return WorkerRow(rank, record.host, place, "", "", record.user_line)
    last = record.collectives[-1]
    seconds = record.written_at - (last.begin if last.end is None else last.end)
    state = "waits since" if last.end is None else "complete since"
    return WorkerRow(
        rank,
        record.host,
        place,
        f"{_name(last)} {_number(last)}",
        f"{state} {seconds:.1f} s",
        record.user_line,
    )


def _describe(entry: RecordedCollective) -> str:
    """Describe a collective: `"all_reduce 'logs' (number 17, ...)"`."""
    details = [f"number {_number(entry)}", _workers(entry.ranks)]
    if entry.kind != TEXTS:
        details.append(f"{pluralize(entry.num_bytes, 'byte')} of {entry.dtype}")
    return f"{_name(entry)} ({', '.join(details)})"


def _name(entry: RecordedCollective) -> str:
    """Name a collective by its kind and its scope, such as `"all_reduce 'logs'"`."""
    scope = _OPERATION.split(entry.name)[0]
    return f"{entry.kind} {scope!r}" if scope else entry.kind


def _number(entry: RecordedCollective) -> int:
    """Return the number of a collective since the last failed step in its lane."""
    return entry.number & 0xFFFFFFFF


def _place(record: FlightRecord, entry: RecordedCollective) -> str:
    """Return the place of a worker when it entered a collective."""
    before = [span for span in record.spans if span.begin <= entry.begin]
    name = before[-1].name if before else record.place
    return name or _NO_PLACE


def _reasons(records: Records) -> str:
    """Return why the records were written, each reason once."""
    reasons: dict[str, list[int]] = {}
    for rank, record in records.items():
        reasons.setdefault(record.reason, []).append(rank)
    texts = (f"{_workers(r)} wrote since {reason}" for reason, r in reasons.items())
    return _sentence("; ".join(texts))


def _any(records: Records) -> FlightRecord:
    """Return the record of the lowest rank."""
    return records[min(records)]


def _workers(ranks: Sequence[int]) -> str:
    """Name workers, such as `"workers 0 and 1"`."""
    if len(ranks) == 1:
        return f"worker {ranks[0]}"
    if len(ranks) > _MOST_RANKS:
        return pluralize(len(ranks), "worker")
    *first, last = map(str, ranks)
    return f"workers {', '.join(first)} and {last}"


def _sentence(text: str) -> str:
    """Return a text with a capital letter at its begin."""
    return text[0].upper() + text[1:]


def _be(ranks: Sequence[int]) -> str:
    """Return the verb for a number of workers."""
    return "is" if len(ranks) == 1 else "are"
