"""When a job is started again, and with how many workers."""

from __future__ import annotations

import pytest

from tfdp.cli.restarts import JobEnd, RestartOptions, Restarts


def end(rank: int | None = 0, code: int = 1, seconds: float = 5.0) -> JobEnd:
    return JobEnd(code, rank, "failed with exit code 1", seconds)


@pytest.mark.parametrize(
    "over", [end(None, 0), end(None, 124), end(None, 130), end(1, 75)]
)
def test_what_is_done_stopped_or_preempted_is_not_started_again(over: JobEnd):
    assert Restarts(2, RestartOptions(5)).pause_after(over) is None


def test_pauses_grow_and_a_stable_run_makes_them_short_again():
    restarts = Restarts(2, RestartOptions(9))
    pauses = [restarts.pause_after(end()) for _ in range(7)]
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert restarts.pause_after(end(seconds=100.0)) == 1


def test_there_are_as_many_restarts_as_were_asked_for():
    restarts = Restarts(2, RestartOptions(2))
    pauses = [restarts.pause_after(end()) for _ in range(3)]
    assert pauses == [1, 2, None]


def test_only_who_fails_first_twice_in_a_row_is_left_out_and_never_below_the_least():
    restarts = Restarts(4, RestartOptions(9, min_workers=3))
    sizes = []
    for rank in (0, 1, 0, 0, 0, 0, 0):
        restarts.pause_after(end(rank))
        sizes.append(restarts.num_workers)
    assert sizes == [4, 4, 4, 3, 3, 3, 3]


def test_without_a_least_number_all_workers_are_wanted():
    restarts = Restarts(4, RestartOptions(9))
    for _ in range(5):
        restarts.pause_after(end(2))
    assert restarts.num_workers == 4


def test_after_a_stable_run_all_workers_are_tried_again():
    restarts = Restarts(3, RestartOptions(9, min_workers=1))
    for _ in range(2):
        restarts.pause_after(end(2))
    assert restarts.num_workers == 2
    restarts.pause_after(end(1, seconds=100.0))
    assert restarts.num_workers == 3
