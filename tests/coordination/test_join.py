"""Workers that join while others start, or while one does not start."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.harness.timing import within
from tests.store.clusters import cluster_of, members_of, of_rank, on_all
from tfdp.communication.connection.acceptor import Acceptor
from tfdp.communication.store import Membership, membership


@pytest.fixture
def first_two() -> Iterator[list[Membership]]:
    """Two members of a cluster whose third worker does not start."""
    cluster = cluster_of(3)
    members = [Membership(of_rank(cluster, rank)) for rank in range(2)]
    yield members
    on_all(members, Membership.leave)


def failure_of_join(member: Membership, timeout_seconds: float) -> str:
    """Joins, and leaves after the error, as a strategy does."""
    with pytest.raises(TimeoutError) as raised:
        member.join(timeout_seconds)
    member.leave()
    return str(raised.value)


def test_worker_is_not_admitted_while_the_first_one_ends(first_two: list[Membership]):
    first, second = first_two
    assert first.server is not None
    first.server.drain()
    assert "(worker 0 is ending)" in failure_of_join(second, 0.5)


@pytest.mark.parametrize("impatient", [0, 1])
def test_worker_that_times_out_ends_all_others_with_the_same_error(
    first_two: list[Membership], impatient: int
):
    limits = [60.0, 60.0]
    limits[impatient] = 1.5
    with within(20.0), ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(failure_of_join, first_two, limits))
    assert texts[0] == texts[1]
    assert re.findall(r"worker \d", texts[0]) == ["worker 2"]
    assert texts[0].startswith("Waited 2 s for worker 2 (")


def test_all_gather_that_is_complete_is_missing_nobody_and_is_not_ended():
    with members_of(cluster_of(2)) as members:
        gatherings = [member.store.gather("call", "") for member in members]
        assert gatherings[0].texts(10.0) == ["", ""]
        assert gatherings[0].missing() == []
        assert not gatherings[0].withdraw("too late")
        assert gatherings[1].texts(10.0) == ["", ""]


def test_answer_that_came_before_the_end_of_the_first_worker_is_not_lost():
    with members_of(cluster_of(2)) as members:
        gatherings = [member.store.gather("call", "") for member in members]
        assert gatherings[0].texts(10.0) == ["", ""]
        members[0].leave()
        assert gatherings[1].missing() == []
        assert not gatherings[1].withdraw()
        assert gatherings[1].texts(10.0) == ["", ""]


class SlowAcceptor(Acceptor):
    """Acceptor that accepts connections while it is still being created."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        time.sleep(0.5)


def test_worker_that_connects_while_the_first_one_starts_is_accepted(
    monkeypatch: pytest.MonkeyPatch,
):
    cluster = cluster_of(2)
    second = Membership(of_rank(cluster, 1))
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(second.join, 10.0)
        monkeypatch.setattr(membership, "Acceptor", SlowAcceptor)
        first = Membership(of_rank(cluster, 0))
        first.join(10.0)
        joining.result()
    on_all([first, second], Membership.leave)
