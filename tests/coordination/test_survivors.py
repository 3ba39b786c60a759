"""Which workers continue after a loss, and which must not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.store.clusters import cluster_of, members_of, on_all
from tfdp.communication.coordination import survivors as module
from tfdp.communication.coordination.survivors import find_survivors
from tfdp.communication.store import Membership


@contextlib.contextmanager
def left_of(num_workers: int, ranks: list[int]) -> Iterator[list[Membership]]:
    """The members of these ranks, which the others have left."""
    with members_of(cluster_of(num_workers)) as members:
        others = [member for member in members if member.cluster.rank not in ranks]
        on_all(others, Membership.leave)
        yield [members[rank] for rank in ranks]


def outcomes(
    members: list[Membership], lost: list[int], min_workers: int = 1, limit: float = 20
) -> list[Any]:
    """What each member finds: the survivors and who joins, or the error's words."""

    def find(member: Membership) -> Any:
        try:
            return find_survivors(member, lost, [], min_workers, limit)
        except RuntimeError as error:
            return str(error)

    return on_all(members, find)


def cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no process be seen to end, as behind a network that is cut."""
    monkeypatch.setattr(Membership, "ended", lambda self, ranks: [])


@pytest.mark.parametrize(
    ("num_workers", "ranks"), [(3, [1, 2]), (4, [0, 1]), (4, [0, 3]), (5, [0, 2, 4])]
)
def test_a_majority_or_the_half_with_the_first_worker_continues_behind_a_cut(
    monkeypatch, num_workers, ranks
):
    lost = sorted(set(range(num_workers)) - set(ranks))
    with left_of(num_workers, ranks) as members:
        cut_off(monkeypatch)
        assert outcomes(members, lost) == [(ranks, [])] * len(ranks)


@pytest.mark.parametrize(("num_workers", "ranks"), [(3, [0]), (4, [2, 3]), (5, [0, 1])])
def test_the_smaller_part_ends_behind_a_cut_and_continues_after_the_others_end(
    monkeypatch, num_workers, ranks
):
    lost = sorted(set(range(num_workers)) - set(ranks))
    with left_of(num_workers, ranks) as members, monkeypatch.context() as patch:
        cut_off(patch)
        for words in outcomes(members, lost):
            assert "which may still run: as the smaller part of the job" in words
    with left_of(num_workers, ranks) as members:
        assert outcomes(members, lost) == [(ranks, [])] * len(ranks)


def test_a_worker_that_is_lost_while_too_few_wait_for_others_is_left_out_too(
    monkeypatch,
):
    rounds: list[int] = []
    applicants = Membership.applicants
    with left_of(4, [0, 1, 2]) as members:
        first, second, third = members

        def leave_and_then_apply(self: Membership, lost: Any = ()) -> list[int]:
            if self is not first:
                return applicants(self, lost)
            rounds.append(len(lost))
            if len(rounds) == 2:
                third.leave()
            return [2, 3] if rounds[-1] == 2 else []

        def find(member: Membership) -> Any:
            try:
                return find_survivors(member, [3], [], 4, 20.0)
            except ConnectionError:
                assert member is third

        monkeypatch.setattr(Membership, "applicants", leave_and_then_apply)
        assert on_all([first, second, third], find)[:2] == [([0, 1], [2, 3])] * 2
    assert rounds[:2] == [1, 1]
    assert rounds[-1] == 2


def test_too_few_workers_end_together_once_the_time_is_over():
    with left_of(3, [0, 1]) as members:
        for words in outcomes(members, [2], min_workers=3, limit=1.0):
            assert "2 workers of 3 are left, and `min_workers` is 3; none" in words


def test_a_worker_that_does_not_come_is_left_out_after_the_limit(monkeypatch):
    monkeypatch.setattr(module, "_CHECK_SECONDS", 0.05)
    with members_of(cluster_of(3)) as members:
        # The last one says nothing, and its port still accepts connections.
        assert outcomes(members[:2], [], limit=1.0) == [([0, 1], [])] * 2
