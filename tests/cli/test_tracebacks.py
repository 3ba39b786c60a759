"""Tracebacks of several workers: what is shown once, and that nothing else waits."""

from __future__ import annotations

import pytest

from tfdp.launch.cli import tracebacks
from tfdp.launch.cli.tracebacks import Tracebacks

BEGIN = "Traceback (most recent call last):"
FRAMES = ['  File "train.py", line 7, in <module>', "    model.fit(x)"]
ERROR = [
    BEGIN,
    *FRAMES,
    "ValueError: <A at 0x7f01>",
    "on /task:0/device:CPU:0",
]
SAME = [
    BEGIN,
    *FRAMES,
    "ValueError: <A at 0x9e02>",
    "on /task:1/device:CPU:0",
]


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(tracebacks.time, "monotonic", lambda: now[0])
    return now


def test_lines_that_are_no_traceback_pass_at_once():
    lines = ["Epoch 1/2", "", '  File "x"', "ValueError: said by the script"]
    assert Tracebacks().take(0, lines) == lines


def test_a_traceback_waits_until_it_is_complete(clock):
    found = Tracebacks()
    assert found.take(0, [BEGIN, FRAMES[0]]) == []
    clock[0] += 1.0  # within the traceback: a slow worker
    assert found.due(0) == []
    assert found.take(0, ERROR[2:]) == []
    assert (found.due(0), found.holds(0)) == ([], True)
    clock[0] += 0.5
    assert (found.due(0), found.holds(0)) == (ERROR, False)
    assert found.take(0, ["goes on"]) == ["goes on"]


def test_a_worker_that_goes_on_after_a_traceback_is_seen_soon_and_in_order(clock):
    found = Tracebacks()
    lines = [*ERROR, *(f"step {step}" for step in range(30))]
    shown = []
    for line in lines:
        clock[0] += 0.1
        shown += found.take(0, [line]) + found.due(0)
    assert shown == lines
    assert found.take(1, [BEGIN] * 5000) == []
    assert len(found.due(1)) == 5000


def test_the_same_error_is_told_by_its_first_worker_whatever_the_order(clock):
    found = Tracebacks()
    # Both at the same time, piece by piece.
    for line, other in zip(SAME, ERROR, strict=True):
        assert found.take(1, [line]) == found.take(0, [other]) == []
    assert found.rest(1) == SAME
    assert found.rest(0) == ["tfdp: the same error as on worker 1"]
    # One and the same worker may tell it again: it is another event.
    found.take(1, SAME)
    assert found.rest(1) == SAME
    clock[0] += 60.0
    found.take(2, SAME)
    assert found.rest(2) == SAME


def test_of_errors_at_one_place_the_second_shows_what_differs():
    found = Tracebacks()
    found.take(0, ERROR)
    found.rest(0)
    found.take(1, [*ERROR[:3], "ValueError: of label 12"])
    assert found.rest(1) == [
        "tfdp: the same traceback as on worker 0, and:",
        "ValueError: of label 12",
    ]
    elsewhere = [BEGIN, FRAMES[0], "    model.evaluate(x)", "ValueError: 3"]
    found.take(1, elsewhere)
    assert found.rest(1) == elsewhere
    deeper = [BEGIN, *FRAMES, '  File "keras.py"', "ValueError: 3"]
    found.take(1, deeper)
    assert found.rest(1) == deeper


def test_a_bar_before_a_traceback_is_a_line_of_its_own():
    found = Tracebacks()
    assert found.take(0, [f"4/9 ━━ loss: 2.3{ERROR[0]}", *ERROR[1:]]) == [
        "4/9 ━━ loss: 2.3"
    ]
    assert found.rest(0) == ERROR
    for begin in (f"12:03 ERROR {BEGIN}", f"  + Exception Group {BEGIN}"):
        found.take(0, [begin, *ERROR[1:]])
        assert found.rest(0) == [begin, *ERROR[1:]]


def test_a_worker_that_lost_another_says_so_without_a_traceback():
    lost = "tfdp.communication.coordination.watch.errors.WorkerLost: "
    lost += "Worker 1 (a:1) was lost"
    found = Tracebacks()
    for rank in (0, 2):
        found.take(rank, [BEGIN, *FRAMES, lost])
    assert found.rest(0) == [lost]
    assert found.rest(2) == ["tfdp: the same error as on worker 0"]
    found.take(3, [*ERROR, "goes on", BEGIN, *FRAMES, lost])
    assert found.rest(3) == [*ERROR, "goes on", lost]


def test_of_interrupted_workers_one_says_where():
    said = "tfdp: interrupted at line 7 of train.py"
    stopped = [BEGIN, '  File "<frozen runpy>", line 198', *FRAMES, "KeyboardInterrupt"]
    found = Tracebacks()
    # Without Ctrl-C it is an error as others are.
    found.take(0, stopped)
    assert found.rest(0) == stopped
    assert found.take(0, [said]) == [said]
    found.interrupt()
    found.take(0, [*stopped, "cleaned up"])
    assert found.rest(0) == [said, "cleaned up"]
    assert found.take(1, [f"4/9 ━━{said}", "saved"]) == ["4/9 ━━", "saved"]
    # pybind11's words for Ctrl-C in the middle of a call in C++.
    replaced = "RuntimeError: DeadlineExceededError REPLACED BY KeyboardInterrupt"
    found.take(1, [BEGIN, *FRAMES, replaced, "At:"])
    assert found.rest(1) == []
    assert found.take(2, [said]) == []
    # What goes wrong after it is an error of its own.
    during = "During handling of the above exception, another exception occurred:"
    failed = [*stopped, "", during, "", BEGIN, *FRAMES, "OSError: disk full"]
    found.take(2, failed)
    assert found.rest(2) == failed
