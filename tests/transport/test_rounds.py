"""Means over the workers that come in time."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.harness.timing import wait_until
from tests.transport.ends import End
from tfdp.communication.transport import (
    RoundFollower,
    RoundLeader,
    TransportError,
)
from tfdp.communication.transport.rounds import Reply
from tfdp.ground.base.threads import run_on_thread

_SECONDS = 20.0


class Job:
    """A leader and followers, each of which is called on a thread of its own."""

    def __init__(self, num_followers: int, least: int, patience: float) -> None:
        pairs = [socket.socketpair() for _ in range(num_followers)]
        self.sockets = [sock for pair in pairs for sock in pair]
        links = {rank: End(own) for rank, (own, _) in enumerate(pairs, start=1)}
        self.ends = [
            RoundLeader(links, least, patience),
            *(RoundFollower(End(other)) for _, other in pairs),
        ]

    def come(
        self, rank: int, value: float, samples: float = 1.0
    ) -> Callable[[], Reply]:
        """Begins an exchange; returns what waits for its end."""
        arrays = [np.full(3, value, "float32"), np.array(10.0 * value)]
        state = [np.array(int(value)), np.full((2, 2), value, "float32")]

        future = run_on_thread(
            "exchange", self.ends[rank].exchange, samples, arrays, state
        )
        return lambda: future.result(_SECONDS)


@pytest.fixture
def job() -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(*arguments: float) -> Job:
        made.append(Job(*arguments))
        return made[-1]

    yield make
    for own in made:
        for sock in own.sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def test_all_that_come_in_time_get_one_mean_by_samples(job):
    pair = job(2, 1, _SECONDS)
    for number in (1, 2):
        results = [pair.come(r, v, s) for r, v, s in ((0, 1, 1), (1, 2, 2), (2, 4, 1))]
        for result in results:
            reply = result()
            assert (reply.version, reply.is_made, reply.is_behind) == (
                number,
                True,
                False,
            )
            np.testing.assert_array_equal(reply.mean[0], [2.25] * 3)
            assert reply.mean[1] == 22.5


def test_a_round_goes_on_without_one_that_is_late_and_it_catches_up(job):
    pair = job(1, 1, 0.05)
    assert pair.come(0, 1.0)().version == 1
    # It is no more waited for: a patience without end would fail the test.
    pair.ends[0]._patience = 1e9
    assert pair.come(0, 2.0)().version == 2
    late = pair.come(1, 5.0)()
    assert (late.version, late.is_made, late.is_behind) == (2, True, True)
    np.testing.assert_array_equal(late.mean[0], [2.0] * 3)
    # The state before the second round, which the mean of it leads on from.
    assert late.state[0] == 2
    np.testing.assert_array_equal(late.state[1], np.full((2, 2), 2.0))
    # It is back: the next round waits for it. What it had brought was too old.
    leader, follower = pair.come(0, 4.0), pair.come(1, 8.0)
    assert leader().version == follower().version == 3
    np.testing.assert_array_equal(follower().mean[0], [6.0] * 3)


def test_what_is_one_round_late_counts_in_the_next(job):
    pair = job(1, 1, 0.05)
    pair.come(0, 1.0)()
    assert pair.come(1, 5.0)().is_behind
    np.testing.assert_array_equal(pair.come(0, 3.0)().mean[0], [4.0] * 3)


def test_a_round_of_as_many_as_it_takes_waits_for_them(job):
    pair = job(2, 2, 0.0)
    leader = pair.come(0, 1.0)
    follower = pair.come(2, 3.0)
    np.testing.assert_array_equal(leader().mean[0], [2.0] * 3)
    np.testing.assert_array_equal(follower().mean[0], [2.0] * 3)


def test_workers_at_a_meeting_neither_wait_nor_are_waited_for(job):
    pair = job(1, 2, _SECONDS)
    pair.ends[1].pause()
    assert pair.come(0, 1.0)().is_made
    pair.ends[0].pause()
    pair.ends[0].resume()
    pair.ends[1].resume()
    # The leader is at the next synchronization, and the follower still on its way.
    pair.ends[0].pause()
    reply = pair.come(1, 1.0)()
    assert not reply.is_made
    # After the synchronization both make rounds again, whoever is the first to leave
    # it.
    pair.ends[1].pause()
    pair.ends[1].resume()
    follower = pair.come(1, 3.0)
    pair.ends[0].resume()
    leader = pair.come(0, 1.0)
    np.testing.assert_array_equal(follower().mean[0], [2.0] * 3)
    assert leader().version == 1


def test_what_is_read_of_a_meeting_that_is_over_counts_no_more(job):
    pair = job(1, 2, _SECONDS)
    pair.ends[0].pause()
    pair.ends[0].resume()
    pair.ends[1].pause()
    pair.ends[1].resume()
    follower, leader = pair.come(1, 3.0), pair.come(0, 1.0)
    for reply in follower(), leader():
        np.testing.assert_array_equal(reply.mean[0], [2.0] * 3)


def test_too_few_make_no_round_also_where_a_follower_waits(job):
    for _ in range(20):  # whichever thread wakes first
        trio = job(2, 3, _SECONDS)
        trio.come(1, 1.0)
        leader = trio.come(0, 1.0)
        own = trio.ends[0]
        wait_until(lambda own=own: len(own._waiting()) == 2, "two to wait", _SECONDS)
        trio.sockets[3].shutdown(socket.SHUT_RDWR)
        with pytest.raises(TransportError, match="A round needs 3 workers"):
            leader()


def test_a_round_for_which_too_few_are_left_says_so(job):
    pair = job(1, 2, 0.0)
    leader = pair.come(0, 1.0)
    pair.sockets[1].close()
    with pytest.raises(TransportError, match="A round needs 2 workers"):
        leader()


def test_a_round_that_fails_for_a_follower_ends_with_its_error(job):
    pair = job(1, 2, 0.0)
    leader = pair.come(0, 1.0)
    wait_until(lambda: pair.ends[0]._waiting(), "the leader to wait", _SECONDS)
    run_on_thread("exchange", pair.ends[1].exchange, 1.0, [np.ones(2)] * 2, [])
    with pytest.raises(TransportError, match=r"A round of averaging failed: ValueErr"):
        leader()
