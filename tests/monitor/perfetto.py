"""Reader of a trace that is as strict as Perfetto, and says what Perfetto drops."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import re
from typing import Any


@dataclasses.dataclass(frozen=True)
class Bar:
    """A slice as Perfetto shows it.

    Args:
        worker: Int, as the name of its process says.
        lane: String, the name of its thread.
        name: String.
        begin: Int, nanoseconds.
        end: Int, nanoseconds.
        args: Dict.
    """

    worker: int
    lane: str
    name: str
    begin: int
    end: int
    args: dict[str, Any]


def read_bars(text: str) -> list[Bar]:
    """Reads a file's text, and fails where Perfetto would drop or misplace a slice."""
    events = json.loads(text)["traceEvents"]
    kinds = [event["ph"] for event in events]
    assert kinds == sorted(kinds, key="MX".index), "a name comes after a slice"
    workers = {e["pid"]: _worker_of(e) for e in events if e["name"] == "process_name"}
    lanes = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events
        if e["name"] == "thread_name"
    }
    _check_numbers(lanes)
    assert {pid for pid, _ in lanes} == workers.keys()
    slices = [event for event in events if event["ph"] == "X"]
    _check_rows(slices)
    return [
        Bar(
            workers[event["pid"]],
            lanes[event["pid"], event["tid"]],
            event["name"],
            _nanoseconds(event["ts"]),
            _nanoseconds(event["ts"]) + _nanoseconds(event["dur"]),
            event["args"],
        )
        for event in slices
    ]


def _worker_of(event: dict[str, Any]) -> int:
    return int(re.fullmatch(r"worker (\d+) \(.+\)", event["args"]["name"])[1])


def _check_numbers(lanes: dict[tuple[int, int], str]) -> None:
    """Numbers of processes and threads, of which Perfetto looks some up alone."""
    pids = {pid for pid, _ in lanes}
    tids = [tid for _, tid in lanes]
    assert 0 not in pids.union(tids), "0 is the idle process"
    assert len(set(tids)) == len(tids), "a thread has the number of another one"
    for pid, tid in lanes:
        assert tid == pid or tid not in pids, "a thread is another process's first"


def _check_rows(slices: list[dict[str, Any]]) -> None:
    rows = collections.defaultdict(list)
    for event in slices:
        assert min(event["ts"], event["dur"]) >= 0
        rows[event["pid"], event["tid"]].append(event)
    for row in rows.values():
        row.sort(key=lambda event: (event["ts"], event["dur"]))
        for one, other in itertools.pairwise(row):
            # As floats of a browser, and as Perfetto's whole nanoseconds.
            assert one["ts"] + one["dur"] <= other["ts"], (one, other)
            end = _nanoseconds(one["ts"]) + _nanoseconds(one["dur"])
            assert end <= _nanoseconds(other["ts"]), (one, other)


def _nanoseconds(microseconds: float) -> int:
    """Perfetto's `CoerceToTs`: a double times 1000, cut off."""
    return int(microseconds * 1000.0)
