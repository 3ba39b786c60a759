"""Sums of the contributions that come first, the same on all workers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.harness.timing import wait_until
from tests.transport.ends import End
from tfdp.communication.transport import (
    PeerLost,
    QuorumFollower,
    QuorumLeader,
    Share,
)
from tfdp.communication.transport.frames import send_frame
from tfdp.communication.transport.quorum import QuorumSum
from tfdp.ground.base.threads import run_on_thread

_SECONDS = 20.0


class Job:
    """A leader and followers, each of which is called on a thread of its own."""

    def __init__(self, number: int, least: int, most_behind: int = 100) -> None:
        pairs = [socket.socketpair() for _ in range(number - 1)]
        self.waiting = [0] * number
        links = {r: End(own, r) for r, (own, _) in enumerate(pairs, start=1)}
        self.followers = [End(other, 0) for _, other in pairs]
        self.sockets = [sock for pair in pairs for sock in pair]
        leader = QuorumLeader(links, least, most_behind, {1}, self._set(0))  # type: ignore[arg-type]
        self.ends = [
            leader,
            *(
                QuorumFollower(end, self._set(rank))  # type: ignore[arg-type]
                for rank, end in enumerate(self.followers, start=1)
            ),
        ]

    def _set(self, rank: int) -> Callable[[int], None]:
        def set_number(number: int) -> None:
            self.waiting[rank] = number

        return set_number

    def come(
        self, rank: int, value: float, rows: float = 2.0
    ) -> Callable[[], QuorumSum]:
        """Begins an exchange; returns what waits for its end."""
        total = 2.0 * len(self.ends)
        arrays = [np.full(3, value, "float32"), np.full(int(value), rank, "int32")]

        future = run_on_thread(
            "exchange", self.ends[rank].exchange, Share(rows, total, arrays)
        )
        return lambda: future.result(_SECONDS)

    def wait_for(self, rank: int) -> None:
        """Waits until the open step has a contribution, and so is still open."""
        wait_until(lambda: rank in self.ends[0]._shares, "the contribution", _SECONDS)


@pytest.fixture
def job() -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(*arguments: int) -> Job:
        made.append(Job(*arguments))
        return made[-1]

    yield make
    for own in made:
        own.ends[0].close()
        for end in own.followers:
            end.close()
        for sock in own.sockets:
            sock.close()


def test_a_step_closes_with_the_first_and_is_scaled_to_all_rows(job):
    three = job(3, 2)
    first, second = three.come(2, 1.0, rows=1.0), three.come(0, 2.0)
    for result in (first(), second()):
        assert result.absent == [1]
        # Three of six rows have come.
        np.testing.assert_array_equal(result.arrays[0], np.full(3, 6.0, "float32"))
        # Indices are joined in the order of ranks, and not scaled.
        np.testing.assert_array_equal(result.arrays[1], [0, 0, 2])


def test_one_that_is_late_gets_the_sums_that_it_has_missed_in_order(job):
    two = job(2, 1)
    for value in (1.0, 2.0, 3.0):
        assert two.come(0, value)().absent == [1]
    wait_until(lambda: two.waiting[1] == 3, "the sums")
    for value in (1.0, 2.0, 3.0):
        result = two.come(1, 100.0)()
        np.testing.assert_array_equal(result.arrays[0], np.full(3, 2 * value))
    assert two.waiting[1] == 0
    # It has caught up, and now is the first itself.
    assert two.come(1, 4.0)().absent == [0]
    np.testing.assert_array_equal(two.come(0, 9.0)().arrays[0], np.full(3, 8.0))


def test_the_others_wait_for_one_that_is_too_late(job):
    two = job(2, 1, 2)
    two.come(0, 1.0)()
    two.come(0, 2.0)()
    third = two.come(0, 3.0)
    two.wait_for(0)
    # One step made, it is in reach again.
    two.come(1, 5.0)()
    assert third().absent == [1]


def test_a_step_does_not_close_without_rows(job):
    two = job(2, 1)
    empty = two.come(1, 1.0, rows=0.0)
    two.wait_for(1)
    two.come(0, 3.0, rows=4.0)()
    np.testing.assert_array_equal(empty().arrays[0], np.full(3, 4.0))
    # Nor do those of one without rows count as the rows of one.
    empty = two.come(1, 0.0, rows=0.0)
    two.wait_for(1)
    two.come(0, 3.0)()
    np.testing.assert_array_equal(empty().arrays[0], np.full(3, 6.0))
    # If nobody has any, it closes with all.
    empty, other = two.come(1, 1.0, rows=0.0), two.come(0, 0.0, rows=0.0)
    assert empty().absent == other().absent == []


def test_all_fail_at_once_if_a_worker_is_lost(job):
    three = job(3, 2)
    left = three.come(0, 1.0)
    three.wait_for(0)
    three.followers[1].close()
    with pytest.raises(PeerLost, match="Worker 2"):
        left()
    with pytest.raises(PeerLost):
        three.come(1, 1.0)()


def test_nobody_goes_on_without_a_worker_that_is_lost(job):
    two = job(2, 1)
    two.followers[0].close()
    wait_until(lambda: two.ends[0]._error, "the loss", _SECONDS)
    with pytest.raises(PeerLost, match="Worker 1"):
        two.come(0, 1.0)()


@pytest.mark.parametrize("last", [0, 1])
def test_arrays_that_do_not_fit_end_the_wait_of_all(job, last):
    two = job(2, 2)
    left = two.come(1 - last, 1.0)
    two.wait_for(1 - last)
    wrong = Share(2.0, 4.0, [np.zeros(5, "float32"), np.zeros(1, "int32")])
    own = run_on_thread("exchange", two.ends[last].exchange, wrong)
    for result in (lambda: own.result(_SECONDS), left):
        with pytest.raises((PeerLost, ValueError)):
            result()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_cannot_be_read_ends_the_wait_of_all(job, rank):
    two = job(2, 2)
    send_frame(two.ends[rank]._link if rank else two.ends[0]._links[1], {"else": 1})
    # Until it is read, a step can still close.
    wait_until(lambda: two.ends[1 - rank]._error, "the error", _SECONDS)
    for result in (two.come(1 - rank, 1.0), two.come(rank, 1.0)):
        with pytest.raises((PeerLost, TypeError)):
            result()
