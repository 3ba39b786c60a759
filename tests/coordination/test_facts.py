"""Facts of a moment are compared in one all-gather, with one error on all workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.store.clusters import cluster_of, members_of, on_all
from tfdp.communication.coordination.facts import SharedFact, compare
from tfdp.communication.coordination.worker_group import WorkerGroup


@pytest.fixture
def workers() -> Iterator[list[WorkerGroup]]:
    """The groups of four workers of one job."""
    with members_of(cluster_of(4)) as members:
        yield [
            WorkerGroup(rank, 4, timeout_seconds=10.0, store=member.store)
            for rank, member in enumerate(members)
        ]


def _errors(workers: list[WorkerGroup], facts) -> list[str]:
    def error(worker: WorkerGroup) -> str:
        with pytest.raises(ValueError, match="differ") as raised:
            compare(worker, "start", facts(worker.rank))
        return str(raised.value)

    return on_all(workers, error)


def test_facts_that_are_alike_cost_one_exchange(workers: list[WorkerGroup]):
    def gather(worker: WorkerGroup) -> list[int]:
        facts = [
            SharedFact("short", {"b": 1}, ""),
            SharedFact("long", [2], "", lambda: 1 / 0),
        ]
        return compare(worker, "start", facts, worker.rank)

    assert on_all(workers, gather) == [[0, 1, 2, 3]] * 4
    assert [worker.num_calls for worker in workers] == [1] * 4


def test_the_first_fact_that_differs_is_the_error_of_all(workers: list[WorkerGroup]):
    def facts(rank: int) -> list[SharedFact]:
        return [
            SharedFact("alike", 1, "Never."),
            SharedFact("names", {"n": rank > 1}, "Names differ."),
            SharedFact("others", rank, "Others differ."),
        ]

    received = "n: False on worker 0, False on worker 1, True on worker 2, True on"
    expected = f"Names differ. Received: {received} worker 3"
    assert _errors(workers, facts) == [expected] * 4
    assert [worker.num_calls for worker in workers] == [1] * 4


def test_a_long_value_is_sent_by_two_workers_if_digests_differ(
    workers: list[WorkerGroup],
):
    sent = []

    def facts(rank: int) -> list[SharedFact]:
        value = [0] * 9 + [rank // 2]
        return [
            SharedFact(
                "long", value, "They differ.", lambda: sent.append(rank) or value
            )
        ]

    expected = "They differ. Received: 9: 0 on worker 0, 1 on worker 2"
    assert _errors(workers, facts) == [expected] * 4
    assert sorted(sent) == [0, 2]


def test_a_harmless_difference_does_not_hide_another(workers: list[WorkerGroup]):
    def facts(rank: int) -> list[SharedFact]:
        value = [1, 1.0, 1, 2][rank]
        return [SharedFact("long", value, "They differ.", lambda: value)]

    expected = "They differ. Received: : 1 on worker 0, 2 on worker 3"
    assert _errors(workers, facts) == [expected] * 4


def test_a_fact_may_allow_a_difference(workers: list[WorkerGroup]):
    def gather(worker: WorkerGroup) -> list[str]:
        seen: list[list] = []
        fact = SharedFact("rank", worker.rank, lambda ranks: "")
        compare(worker, "start", [fact], "own", before=seen.append)
        return seen

    assert on_all(workers, gather) == [[("own",) * 4]] * 4


@pytest.mark.parametrize("num_workers", [1, 4])
def test_what_comes_before_is_raised_first(workers: list[WorkerGroup], num_workers):
    def before(gathered) -> None:
        raise OSError(f"{gathered[0]} of {len(gathered)}")

    def error(worker: WorkerGroup) -> str:
        with pytest.raises(OSError) as raised:
            compare(
                worker if num_workers > 1 else WorkerGroup(0, 1),
                "start",
                [SharedFact("rank", worker.rank, "Differs.")],
                "problem",
                before=before,
            )
        return str(raised.value)

    assert on_all(workers, error) == [f"problem of {num_workers}"] * 4
