"""Shares of a job's time from ledgers that are written by hand."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tfdp.features.goodput.account import CLASSES, Account, shares, shares_of_several

LAUNCHED = {"time": 90.0, "up": 490.0, "boot": "a"}


def attempt(
    time: float, up: float, boot: str = "a", launched: Any = None, **more: Any
) -> str:
    line = {"kind": "attempt", "format": 1, "time": time, "up": up, "boot": boot}
    return json.dumps({**line, "launched": launched, **more})


def work(up: float, steps: tuple | None = None, fit: int = 1, **seconds: float) -> str:
    """A line at a time since the boot; the wall clock is 400 s behind it."""
    line = {"kind": "work", "time": up - 400, "up": up, "seconds": seconds, "fit": fit}
    if steps is not None:
        line |= dict(zip(("epoch", "first", "last"), steps, strict=True))
    return json.dumps(line)


def leave(up: float, *, done: bool) -> str:
    return json.dumps({"kind": "exit", "time": up - 400, "up": up, "done": done})


def seconds_of(*lines: str) -> dict[str, float]:
    """The classes of a ledger that have any time."""
    found = shares(lines).seconds
    assert set(found) == set(CLASSES)
    return {name: round(value, 6) for name, value in found.items() if value}


FIRST = (
    attempt(100, 500),
    work(510, (0, 0, 0), startup=8, trace=2),
    work(520, (0, 1, 50), step=7, data=2, exposed=1),
    work(530, backup=4, evaluation=5, idle=1),
)


def test_the_time_of_one_attempt_is_that_of_its_lines():
    assert seconds_of(*FIRST) == {
        "startup": 8,
        "trace": 2,
        "step": 7,
        "data": 2,
        "exposed": 1,
        "save": 4,
        "evaluation": 5,
        "idle": 1,
    }


def test_steps_that_an_earlier_attempt_had_done_are_done_again():
    """Of the second attempt's 20 steps, 31 to 50, all were done; of the next, half."""
    second = (
        attempt(140, 540),
        work(548, (0, 31, 50), startup=4, step=3, data=1),
        work(558, (0, 51, 70), step=10),
        attempt(168, 568),
        work(578, (0, 61, 80), startup=6, step=4),
        work(579, (1, 0, 9), step=1),
    )
    assert seconds_of(*FIRST, *second) == {
        "startup": 8,
        "trace": 2,
        "data": 2,
        "exposed": 1,
        "save": 4,
        "evaluation": 5,
        "idle": 1,
        "step": 7 + 10 + 2 + 1,
        "again": 4 + 2,
        "recovery": (10 + 4) + (10 + 6),
    }
    assert shares([*FIRST, *second]).num_restarts == 2


def test_an_attempt_that_starts_at_an_earlier_epoch_does_all_of_it_again():
    ledger = (
        attempt(100, 500),
        work(510, (3, 0, 9), step=10),
        attempt(110, 510),
        work(515, (2, 0, 9), step=5),
        work(516, (3, 0, 9), step=1),
        work(518, (4, 0, 9), step=2),
    )
    assert seconds_of(*ledger) == {"step": 12, "again": 6}


def test_the_steps_of_a_second_fit_are_no_repetition_of_the_first():
    ledger = (
        attempt(100, 500),
        work(510, (3, 0, 9), step=10),
        work(520, (0, 0, 9), fit=2, startup=4, step=6),
        attempt(120, 520),
        work(530, (3, 0, 9), startup=1, step=9),
        work(540, (0, 5, 14), fit=2, startup=2, step=8),
        work(550, (0, 0, 9), fit=3, startup=5, step=5),
    )
    assert seconds_of(*ledger) == {
        "step": 10 + 6 + 4 + 5,
        "again": 9 + 4,
        "startup": 4 + 5,
        "recovery": 1 + 2,
    }


def test_time_without_a_launcher_is_idle_and_from_then_on_recovery():
    again = {"time": 600.0, "up": 1000.0, "boot": "a"}
    ledger = (
        attempt(100, 500, launched=LAUNCHED),
        work(510, (0, 0, 9), startup=6, step=4),
        leave(511, done=False),
        attempt(120, 520, launched=LAUNCHED),  # by the same launcher
        work(530, (0, 10, 19), startup=6, step=4),
        attempt(604, 1004, launched=again),
        work(1014, (0, 20, 29), startup=7, step=3),
    )
    assert seconds_of(*ledger) == {
        "startup": 10 + 6,
        "recovery": (9 + 6) + (4 + 7),
        "idle": 1000 - 530,
        "step": 11,
    }


@pytest.mark.parametrize(
    ("set_by", "gap"), [(-3600, 10), (3600, 10), (0, 10)], ids=["back", "on", "not"]
)
def test_a_clock_that_is_set_between_two_attempts_changes_nothing(set_by, gap):
    ledger = (
        attempt(100, 500),
        work(510, (0, 0, 9), step=10),
        attempt(120 + set_by, 520),
        work(530, (0, 10, 19), step=10),
    )
    assert seconds_of(*ledger) == {"step": 20, "recovery": gap}


@pytest.mark.parametrize(("time", "gap"), [(150, 40), (50, 0)])
def test_another_boot_is_compared_by_the_wall_clock_but_never_negative(time, gap):
    ledger = (
        attempt(100, 500),
        work(510, (0, 0, 9), step=10),
        attempt(time, 3, boot="b"),
    )
    expected = {"step": 10, "recovery": gap}
    assert seconds_of(*ledger) == {k: v for k, v in expected.items() if v}


def test_a_clock_that_is_set_within_an_attempt_changes_nothing():
    line = json.loads(work(520, (0, 1, 50), step=10))
    line["time"] -= 10_000
    assert seconds_of(attempt(100, 500), work(510, step=10), json.dumps(line)) == {
        "step": 20
    }


DAMAGED = [
    "",
    "{",
    "null",
    "[]",
    '"work"',
    "{}",
    '{"kind": "work"}',
    "\0\0\0\0",
    "\ufffd" * 40,
    "[" * 100_000,
    work(520, (0, 1, 50), step=10)[:40],
    work(520, (0, 1, 50), step=-1),
    work(520, (0, 1, 50), step=float("nan")),
    work(520, (0, 1, 50), unheard_of=1),
    work(520, (0, 9, 5), step=1),
    work(520, (0, 1.5, 50), step=1),
    work(520, (0, "1", 50), step=1),
    work(float("inf"), (0, 1, 50), step=1),
    work(520, (0, 1, 50), step=10).replace('"fit": 1', '"fit": true'),
    work(520, (0, 1, 50), step=10**400),  # type: ignore[arg-type]
    attempt(100, 500, launched="yesterday"),
    attempt(100, 500).replace('"format": 1', '"format": 2'),
    leave(530, done="yes"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_line_is_counted_and_only_its_time_is_missing(text):
    first, traced, _, last = FIRST
    found = shares([first, traced, text, last])
    assert found.num_damaged == bool(text)
    assert found.seconds == {
        **shares(FIRST).seconds,
        "step": 0,
        "data": 0,
        "exposed": 0,
        "unknown": 10,
    }


def test_a_ledger_that_is_cut_anywhere_is_read_up_to_there():
    text = "\n".join(FIRST)
    for length in range(len(text)):
        lines = text[:length].splitlines()
        found = shares(lines)
        assert found.num_damaged <= 1
        assert found.total_seconds <= 30


def test_random_bytes_in_a_ledger_raise_nothing():
    draw = random.Random(3)
    text = "\n".join(FIRST)
    for _ in range(500):
        letters = list(text)
        for _ in range(draw.randint(1, 6)):
            letters[draw.randrange(len(letters))] = chr(draw.randrange(32, 300))
        found = shares("".join(letters).splitlines())
        assert found.total_seconds >= 0


def test_training_that_begins_after_it_was_complete_is_another_job():
    ledger = (*FIRST, leave(530, done=True), attempt(900, 1300))
    found = shares([*ledger, work(1310, (0, 0, 9), step=10)])
    assert {name: s for name, s in found.seconds.items() if s} == {"step": 10}
    assert found.num_restarts == 0


def test_a_restart_by_the_same_launcher_is_no_other_job():
    """Worker 0 was done, and another worker failed afterwards."""
    ledger = (
        attempt(100, 500, launched=LAUNCHED),
        work(510, (0, 0, 9), step=10),
        leave(510, done=True),
        attempt(120, 520, launched=LAUNCHED),
        work(530, (0, 0, 9), step=10),
    )
    found = seconds_of(*ledger)
    assert found == {"startup": 10, "step": 10, "recovery": 10, "again": 10}


@pytest.mark.parametrize("trains_again", [False, True])
def test_two_ledgers_of_a_process_that_is_killed_have_each_second_once(trains_again):
    """Launched at 490 s: a fit from 500 to 510, and a second one with a kill at 540."""
    first = [
        attempt(100, 500, launched=LAUNCHED, process="1"),
        work(510, (0, 0, 9), step=10),
        leave(510, done=True),
    ]
    second = [
        attempt(111, 511, launched=LAUNCHED, process="1", follows=True),
        work(540, (0, 0, 28), step=29),
    ]
    if trains_again:
        first += [
            attempt(150, 550, launched=LAUNCHED, process="2"),
            work(560, (0, 0, 9), step=10),
            leave(560, done=True),
        ]
    second += [
        attempt(161, 561, launched=LAUNCHED, process="2", follows=True),
        work(571, (0, 29, 38), step=10),
    ]
    found = shares_of_several([first, second])
    seconds = {name: value for name, value in found.seconds.items() if value}
    expected = {"startup": 10, "step": 49, "idle": 1, "recovery": 21}
    if trains_again:
        expected |= {"idle": 2, "recovery": 10, "again": 10}
    assert seconds == expected
    assert sum(seconds.values()) == 571 - 490
    assert found.num_restarts == 1


def test_training_that_begins_without_the_backups_it_had_is_another_job():
    """Somebody has deleted them: only then steps begin at the first one."""
    restart = (attempt(140, 540), work(541, startup=1))
    from_start = work(551, (0, 0, 9), step=10)
    assert seconds_of(*FIRST, *restart, from_start) == {"startup": 1, "step": 10}
    never_saved = seconds_of(*FIRST[:-1], *restart, from_start)
    assert never_saved["again"] == 10


def test_an_account_has_at_each_line_the_shares_of_the_lines_so_far():
    account, lines = Account(), []
    for line in (*FIRST, leave(530, done=True), attempt(900, 1300), *FIRST[1:]):
        account.add(line)
        lines.append(line)
        assert account.shares == shares(lines)


def test_the_line_names_what_is_at_least_half_a_percent_by_size():
    ledger = (
        attempt(100, 500),
        work(504, startup=4),
        work(505, save=1),
        work(597.7, (0, 0, 929), step=92.7),
        work(598, idle=0.3),
    )
    assert str(shares(ledger)) == "goodput 95 %: 4 % start-up, 1 % saves"


@pytest.mark.parametrize(
    ("count", "words"), [(1, "one restart"), (2, "two restarts"), (12, "12 restarts")]
)
def test_the_line_has_the_number_of_restarts(count, words):
    lines = [attempt(100, 500), work(590, (0, 0, 89), step=90)]
    for number in range(count):
        lines.append(attempt(190 + 10 * (number + 1), 590 + 10 * (number + 1)))
    share = round(100 * 10 * count / (90 + 10 * count))
    assert str(shares(lines)) == f"goodput {100 - share} %: {share} % {words}"


def test_a_job_that_continues_without_worker_0_has_no_restart():
    continued = json.dumps(json.loads(attempt(200, 600)) | {"continues": True})
    lines = [attempt(100, 500), work(590, (0, 0, 89), step=90), continued]
    assert str(shares(lines)) == "goodput 90 %: 10 % recovery"


def test_an_empty_ledger_has_no_time():
    found = shares([])
    assert found.total_seconds == 0
    assert str(found) == "goodput 0 %"
