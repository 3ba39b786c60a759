"""When a job is started again, and with how many workers."""

from __future__ import annotations

import dataclasses

import pytest

from tfdp.communication.coordination.preemption import PREEMPTED
from tfdp.launch.rendezvous.failure import Failure
from tfdp.launch.rendezvous.restarts import RestartDecision, Restarts


@dataclasses.dataclass(frozen=True)
class End:
    """End of an attempt, which `Restarts.decide` is told."""

    failure: Failure | None
    seconds: float
    saved_to_grow: bool = False

    def of(self, restarts: Restarts) -> RestartDecision | None:
        return restarts.decide(
            self.failure, self.seconds, saved_to_grow=self.saved_to_grow
        )


def end(rank: int = 0, code: int = 1, seconds: float = 5.0) -> End:
    return End(Failure(rank, code, "failed with exit code 1"), seconds)


def saved_to_grow(seconds: float = 700.0) -> End:
    return End(Failure(0, PREEMPTED, "was preempted"), seconds, saved_to_grow=True)


def pauses(restarts: Restarts, ends: list[End]) -> list[float | None]:
    found = [item.of(restarts) for item in ends]
    return [None if item is None else item.pause_seconds for item in found]


def without_slot_2(max_restarts: int = 9) -> Restarts:
    """Four workers, of which one has failed twice in a row."""
    restarts = Restarts(4, max_restarts, 2, grow_after_seconds=600.0)
    pauses(restarts, [end(2), end(2)])
    assert restarts.slots == (0, 1, 3)
    return restarts


@pytest.mark.parametrize("over", [End(None, 5.0), end(1, 0), end(1, PREEMPTED)])
def test_what_is_done_stopped_or_preempted_is_not_started_again(over: End):
    assert over.of(Restarts(2, 5)) is None


def test_pauses_grow_and_a_stable_run_makes_them_short_again():
    restarts = Restarts(2, 9)
    assert pauses(restarts, [end()] * 7) == pytest.approx(
        [0.1, 0.4, 1.6, 6.4, 25.6, 30, 30]
    )
    assert pauses(restarts, [end(seconds=100.0)]) == [0.1]


def test_there_are_as_many_restarts_as_were_asked_for():
    assert pauses(Restarts(2, 2), [end()] * 3) == [0.1, 0.4, None]


def test_only_who_fails_first_twice_in_a_row_is_left_out_and_never_below_the_least():
    restarts = Restarts(4, 9, min_workers=3)
    sizes = []
    for rank in (0, 1, 0, 0, 0, 0, 0):
        end(rank).of(restarts)
        sizes.append(len(restarts.slots))
    assert sizes == [4, 4, 4, 3, 3, 3, 3]
    assert restarts.slots == (1, 2, 3)


def test_a_rank_is_another_slot_once_one_is_left_out():
    restarts = without_slot_2()
    following = None
    for _ in range(2):
        following = end(2).of(restarts)
    assert restarts.slots == (0, 1)
    assert following is not None
    assert "2 workers (without slot 2, 3) start again" in following.line


def test_without_a_least_number_all_workers_are_wanted():
    restarts = Restarts(4, 9)
    pauses(restarts, [end(2)] * 5)
    assert restarts.slots == (0, 1, 2, 3)
    assert restarts.grow_after_seconds is None


def test_after_a_stable_run_all_workers_are_tried_again():
    restarts = Restarts(3, 9, min_workers=1)
    pauses(restarts, [end(2), end(2)])
    assert len(restarts.slots) == 2
    end(1, seconds=100.0).of(restarts)
    assert len(restarts.slots) == 3


def test_fewer_workers_that_train_well_are_asked_to_save_so_that_all_go_on():
    restarts = without_slot_2(max_restarts=2)
    assert restarts.grow_after_seconds == 600.0
    following = saved_to_grow().of(restarts)
    assert following is not None
    assert following.pause_seconds == 0.0
    assert following.line == (
        "growth: training is saved after 700 s with 3 workers; 4 workers start again"
    )
    assert restarts.slots == (0, 1, 2, 3)
    assert restarts.grow_after_seconds is None
    assert restarts.count == 2  # of two: to grow is no failure


def test_who_fails_at_once_when_brought_back_is_left_out_for_twice_as_long():
    restarts = without_slot_2(max_restarts=2)
    for wait in (1200.0, 2400.0):
        saved_to_grow().of(restarts)
        following = end(2).of(restarts)
        assert following is not None  # though there is no restart left
        assert following.line.startswith("trial failed: worker 2 failed with exit code")
        assert restarts.slots == (0, 1, 3)
        assert restarts.grow_after_seconds == wait
    assert end(0).of(restarts) is None


def test_another_one_that_fails_at_once_in_a_trial_is_an_ordinary_failure():
    restarts = without_slot_2()
    saved_to_grow().of(restarts)
    end(1).of(restarts)
    assert restarts.slots == (0, 1, 2, 3)
    assert restarts.count == 3


def test_a_trial_never_goes_below_the_least():
    restarts = Restarts(4, 9, min_workers=2)
    pauses(restarts, [end(3), end(3), end(2), end(2)])
    saved_to_grow().of(restarts)
    pauses(restarts, [end(0), end(0)])  # slots 1, 2 and 3, two of them on trial
    pauses(restarts, [end(1), end(1), end(1)])
    assert len(restarts.slots) == 2


def test_a_trial_that_went_well_makes_the_next_wait_short_again():
    restarts = without_slot_2()
    pauses(restarts, [saved_to_grow(), end(2), saved_to_grow(), end(0, seconds=100.0)])
    pauses(restarts, [end(2), end(2)])
    assert restarts.grow_after_seconds == 600.0


def test_a_wait_of_zero_means_for_ever():
    restarts = Restarts(3, 9, 2, grow_after_seconds=0.0)
    pauses(restarts, [end(2), end(2)])
    assert restarts.slots == (0, 1)
    assert restarts.grow_after_seconds is None
