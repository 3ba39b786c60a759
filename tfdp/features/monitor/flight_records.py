"""Flight records of several workers in words: who was where, and who was missing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tfdp.communication.coordination.flight_record import (
    TEXTS,
    FlightRecord,
    RecordedCollective,
)
from tfdp.communication.coordination.flight_steps import (
    TENSORFLOW,
    first_in_other_order,
)
from tfdp.features.monitor.flight_collectives import (
    STUCK_SECONDS,
    IncompleteCollective,
    Records,
    SlowWorker,
    by_one_clock,
    completed,
    first_differing,
    first_incomplete,
    first_record,
    lanes_of,
    signature,
    slowest_of,
)
from tfdp.features.monitor.trace import Slice, WorkerTrace
from tfdp.ground.text import list_ranks, pluralize

_NO_PLACE = "no call of Keras or tfdp"
# Columns of the table of `tfdp doctor`, in the order of the cells of `rows_of`. `line`
# is the innermost line of the user's code in the main thread.
COLUMNS = ("worker", "host", "place", "last collective", "its state", "line")
# A message describes what at most this many workers did, so that it stays short in a
# large job.
_MAX_RANKS = 8
_LOOP_LANE = 0
# Messages show only the name scope of a collective, such as "logs", in front of this
# part of its name, since the rest means nothing to users.
_OPERATION = re.compile("(?:^|/)Collective_")


def explain(records: Records) -> str:
    """Explain from a job's flight records which workers were stuck, and where.

    Args:
        records: Dict from a rank to its `FlightRecord`, with at least one.

    Returns:
        String, the first of these that the records show: how the orders of the workers'
        collectives differ; the first collective that not all have entered, who was
        missing, and what that worker did; which workers left no record; what has ended
        the job, and which worker the others wait for.

    Source: the flight recorder of PyTorch,
    https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
    """
    records = by_one_clock(records)
    lanes = lanes_of(records)
    if (differing := first_differing(lanes)) is not None:
        return _sentence_of_difference(records, differing)
    stalled = first_incomplete(records, lanes)
    slowest = slowest_of(records, lanes)
    late = "" if slowest is None else _slowness(records, slowest)
    if stalled is not None:
        is_missing = slowest is not None and slowest.rank in stalled.missing
        also = late if is_missing else ""
        return _sentence_of_missing(records, stalled, also)
    if absent := [
        r for r in range(first_record(records).num_workers) if r not in records
    ]:
        doing = "; ".join(f"worker {r} {_activity(records, r)}" for r in absent)
        return f"No worker with a record waits for another, but {doing}."
    causes = _causes(records)
    common = f"{causes}All workers have entered the same collectives"
    if late:
        return f"{common}, but {late}."
    none_waits = f"none has waited for another for {STUCK_SECONDS:g} s."
    reasons = "" if causes else f" {_reasons(records)}."
    return f"{common}, and {none_waits}{reasons}"


def rows_of(records: Records) -> list[tuple[str, ...]]:
    """Return the cells of a table of all workers of the job, by `COLUMNS`.

    A row has a worker's rank, its host, its place in the script, its last collective,
    the collective's state, and the line of the user's code. Workers without a record
    have a row, too.
    """
    ranks = range(first_record(records).num_workers)
    return [(str(rank), *_cells_of(records.get(rank))) for rank in ranks]


def trace_of(record: FlightRecord) -> WorkerTrace:
    """Return a worker's record as a `WorkerTrace`, for viewers of timelines.

    Lane 0 has the spans of the script, such as `"step 3 of epoch 1 of fit"`; each lane
    of collectives in the record follows, with the begin and the end of each collective.

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
    trace.collectives.update(completed(record))
    return trace


def _slowness(records: Records, slowest: SlowWorker) -> str:
    """Format a clause about the worker that the others wait for most."""
    return (
        f"worker {slowest.rank} on {records[slowest.rank].host} is slow: for "
        f"{slowest.waited_seconds:.1f} of {slowest.seconds:.1f} s the others have "
        f"waited for it, in {slowest.num_late} of "
        f"{pluralize(slowest.num_collectives, 'collective')}"
    )


def _sentence_of_difference(
    records: Records, entries: Mapping[int, RecordedCollective]
) -> str:
    """Format the sentence that workers run their collectives in different orders.

    It has the collective, and the place in the script, of each group of workers that
    agree.

    Args:
        records: Dict from a rank to its `FlightRecord`.
        entries: Dict from a rank to its `RecordedCollective`, as `first_differing`
            returns it: all have one number in one lane, but are not the same.
    """
    groups: dict[tuple, list[int]] = {}
    for rank, entry in entries.items():
        groups.setdefault(signature(entry), []).append(rank)
    if all(entry.kind == TENSORFLOW for entry in entries.values()):
        return _sentence_of_plans(groups, entries)
    parts = [
        f"{list_ranks(ranks)} {_be(ranks)} at {_describe(entries[ranks[0]])} "
        f"in {_place(records[ranks[0]], entries[ranks[0]])}"
        for ranks in groups.values()
    ]
    entry = next(iter(entries.values()))
    return (
        "The workers run their collectives in different orders: as number "
        f"{_number(entry)} in lane {entry.lane}, {' and '.join(parts)}."
    )


def _sentence_of_plans(
    groups: Mapping[tuple, list[int]], entries: Mapping[int, RecordedCollective]
) -> str:
    """Format the sentence about workers whose steps have traced different collectives.

    It has the first collective of a step that differs, for each group of workers.

    Args:
        groups: Dict from a `signature` to the list of the ranks that have it.
        entries: Dict from a rank to its `RecordedCollective`, a call of TensorFlow,
            whose `key` lists its traced collectives in order.
    """
    orders = {ranks[0]: entries[ranks[0]].key for ranks in groups.values()}
    number, forms = first_in_other_order(orders)
    parts = [
        f"{list_ranks(ranks)} {_have(ranks)} {forms[ranks[0]]}"
        for ranks in groups.values()
    ]
    return (
        "The workers run their collectives in different orders: as number "
        f"{number} of a call of TensorFlow, {' and '.join(parts)}."
    )


def _sentence_of_missing(
    records: Records, stalled: IncompleteCollective, late: str
) -> str:
    """Format the sentence about a collective that not all have entered.

    Args:
        records: Dict from a rank to its `FlightRecord`.
        stalled: `IncompleteCollective`, the collective.
        late: String, a clause about a missing worker that is slow, or `""`.
    """
    ranks, missing = sorted(stalled.entries), stalled.missing
    wait = "waits" if len(ranks) == 1 else "wait"
    where = _place(records[ranks[0]], stalled.entries[ranks[0]])
    waiting = (
        f"{list_ranks(ranks)} {wait} for {list_ranks(missing)} in "
        f"{_describe(stalled.first)} in {where} for {stalled.waited_seconds:.1f} s"
    )
    doing = "; ".join(
        f"worker {rank} {_activity(records, rank)}" for rank in missing[:_MAX_RANKS]
    )
    also = f"; {late}" if late else ""
    return _sentence(f"{waiting}: {doing}{also}.")


def _activity(records: Records, rank: int) -> str:
    """Describe what a worker did instead of entering a collective.

    Returns:
        String, a predicate such as `"has not entered it, and was at step 3 of fit"`.
    """
    if rank not in records:
        return f"has left no record{_describe_last_contact(records, rank)}"
    record = records[rank]
    # While a worker reads data, a line of the user's code in a thread other than the
    # main one is preferred, since TensorFlow may read the data there.
    line = (record.source and record.other_user_line) or record.user_line
    at = f", at {line}" if line else ""
    if record.source:
        return (
            f"waits for a batch of {record.source} at {record.place or _NO_PLACE}{at}"
        )
    entered = _open_collective(record)
    if entered is not None and entered.kind != TENSORFLOW:
        return f"waits in {_describe(entered)} at {record.place or _NO_PLACE}{at}"
    if record.lost == rank:
        return f"has not entered it: {record.reason}"
    return f"has not entered it, and was at {record.place or _NO_PLACE}{at}"


def _open_collective(record: FlightRecord) -> RecordedCollective | None:
    """Return the collective in which a worker waits, or `None`.

    A collective without an end that another one in its lane follows has failed, and
    does not count.
    """
    last = {each.lane: each for each in record.collectives}
    return next((each for each in last.values() if each.end is None), None)


def _describe_last_contact(records: Records, rank: int) -> str:
    """Describe what the records of others tell of a worker without a record.

    Returns:
        String to append to a sentence: why the worker was lost, in parentheses, and its
        last complete collective, or where it was last seen; `""` if nothing is known.
    """
    causes = [each.reason for each in records.values() if each.lost == rank]
    cause = f" ({causes[0]})" if causes else ""
    if last := _describe_last_collective(records, rank):
        return f"{cause}; its last complete collective was {last}"
    peers = [each.peers[rank] for each in records.values() if rank in each.peers]
    places = [(peer.silent_seconds, peer.place) for peer in peers if peer.place]
    return f"{cause}; it was last seen at {min(places)[1]}" if places else cause


def _describe_last_collective(records: Records, rank: int) -> str:
    """Describe the last complete collective of a worker without a record.

    Args:
        records: Dict from a rank to its `FlightRecord`.
        rank: Int, the worker. Collectives whose members include it are searched in the
            records of the others.

    Returns:
        String: the collective that ended last, and at which place in the script another
        worker had entered it; `""` if there is none.
    """
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


def _cells_of(record: FlightRecord | None) -> tuple[str, ...]:
    """Return the cells of a worker's row, by `COLUMNS` without the first, the rank.

    Args:
        record: `FlightRecord`, or `None`: then the place is `"no record"`, and the
            other cells are empty.
    """
    if record is None:
        return "", "no record", "", "", ""
    place = record.place or _NO_PLACE
    if record.source:
        place = f"{place}, waits for a batch of {record.source}"
    if not record.collectives:
        return record.host, place, "", "", record.user_line
    last = record.collectives[-1]
    seconds = record.written_at - (last.begin if last.end is None else last.end)
    state = f"{'waits' if last.end is None else 'complete'} since {seconds:.1f} s"
    number = "" if last.kind == TENSORFLOW else f" {_number(last)}"
    entered = f"{_name(last)}{number}"
    return record.host, place, entered, state, record.user_line


def _describe(entry: RecordedCollective) -> str:
    """Describe a collective by its kind, scope, number, workers and size.

    Returns:
        String, such as
        `"all_reduce 'logs' (number 17, workers 0 and 1, 8 bytes of int32)"`. A step
        that TensorFlow runs has its name in place of the number; an all-gather of texts
        has no size.
    """
    details = [f"number {_number(entry)}", list_ranks(entry.ranks)]
    if entry.kind == TENSORFLOW:
        details = [entry.name, *details[1:], pluralize(entry.num_bytes, "byte")]
    elif entry.kind != TEXTS:
        details.append(f"{pluralize(entry.num_bytes, 'byte')} of {entry.dtype}")
    return f"{_name(entry)} ({', '.join(details)})"


def _name(entry: RecordedCollective) -> str:
    """Name a collective by its kind and its scope, such as `"all_reduce 'logs'"`."""
    scope = "" if entry.kind == TENSORFLOW else _OPERATION.split(entry.name)[0]
    return f"{entry.kind} {scope!r}" if scope else entry.kind


def _number(entry: RecordedCollective) -> int:
    """Return the index of a collective in its lane, counted since the last failed step.

    It is the lower 32 bits of the entry's number.
    """
    return entry.number & 0xFFFFFFFF


def _place(record: FlightRecord, entry: RecordedCollective) -> str:
    """Return where a worker entered a collective: `"step 3 of epoch 1 of fit"`."""
    begin = entry.begin
    # A step that TensorFlow runs begins together with its span. Since the two times are
    # not exact, the step may seem to begin in the span before, so the span in which its
    # middle lies is taken.
    if entry.kind == TENSORFLOW:
        begin += ((entry.end or record.written_at) - begin) / 2
    before = [span for span in record.spans if span.begin <= begin]
    name = before[-1].name if before else record.place
    return name or _NO_PLACE


def _reasons(records: Records) -> str:
    """Format as a sentence why the records were written, each reason once."""
    reasons: dict[str, list[int]] = {}
    for rank, record in records.items():
        reasons.setdefault(record.reason, []).append(rank)
    texts = (f"{list_ranks(r)} wrote since {reason}" for reason, r in reasons.items())
    return _sentence("; ".join(texts))


def _causes(records: Records) -> str:
    """Format as a sentence which workers were lost, and why; `""` if none was."""
    causes: dict[str, set[int]] = {}
    for record in records.values():
        if record.lost is not None:
            causes.setdefault(record.reason, set()).add(record.lost)
    texts = [f"{list_ranks(sorted(r))}: {cause}" for cause, r in causes.items()]
    return f"{_sentence('; '.join(texts)).rstrip('.')}. " if texts else ""


def _sentence(text: str) -> str:
    """Return a text with its first letter capitalized."""
    return text[0].upper() + text[1:]


def _have(ranks: Sequence[int]) -> str:
    """Return the verb for a list of ranks: `"has"` for one, `"have"` for several."""
    return "has" if len(ranks) == 1 else "have"


def _be(ranks: Sequence[int]) -> str:
    """Return the verb for a list of ranks: `"is"` for one, `"are"` for several."""
    return "is" if len(ranks) == 1 else "are"
