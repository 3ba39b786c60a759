"""Workers exchange texts, and who is missing is named by all alike."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.store.clusters import cluster_of, members_of, on_all
from tfdp.communication.coordination.progress import ProgressRecorder, WorkerProgress
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.communication.store import Membership

SECONDS = 1.0


@pytest.fixture
def members() -> Iterator[list[Membership]]:
    """Three members of one job."""
    with members_of(cluster_of(3)) as members:
        yield members


@pytest.fixture
def workers(members: list[Membership]) -> list[WorkerGroup]:
    """The groups of three workers of one job."""
    return [
        WorkerGroup(rank, 3, timeout_seconds=SECONDS, store=member.store)
        for rank, member in enumerate(members)
    ]


def exchange(worker: WorkerGroup, after_seconds: float = 0.0) -> list[str]:
    time.sleep(after_seconds)
    return worker.all_gather("topic", f"from {worker.rank}")


def test_all_get_the_texts_of_all(workers: list[WorkerGroup]):
    texts = on_all(workers, exchange)
    assert texts == [["from 0", "from 1", "from 2"]] * 3


def test_a_first_worker_that_ends_once_all_have_its_answer_is_no_error(
    workers: list[WorkerGroup], members: list[Membership]
):
    def exchange_and_end(worker: WorkerGroup) -> list[str]:
        texts = exchange(worker)
        if worker.rank == 0:
            members[0].leave()
        return texts

    texts = on_all(workers, exchange_and_end)
    assert texts == [["from 0", "from 1", "from 2"]] * 3


@pytest.mark.parametrize("waiting", [(0,), (1, 2), (0, 2)])
def test_all_that_wait_name_all_that_are_missing(
    workers: list[WorkerGroup], waiting: tuple[int, ...]
):
    def failure(worker: WorkerGroup) -> str:
        # The last one has waited for as long as it would before the first one has.
        after_seconds = SECONDS / 2 * (worker.rank == waiting[0])
        with pytest.raises(TimeoutError) as raised:
            exchange(worker, after_seconds)
        return str(raised.value)

    names = ", ".join(f"worker {rank}" for rank in range(3) if rank not in waiting)
    for text in on_all([workers[rank] for rank in waiting], failure):
        assert text.startswith(f"Waited 1 s for {names} at 'topic'. Start every worker")


def test_who_waits_for_too_long_says_where_the_missing_one_is(
    workers: list[WorkerGroup],
):
    found = {
        "fit": WorkerProgress(1, "fit", 1.0),
        "an operation of TensorFlow": WorkerProgress(1, "", 1.0, is_computing=True),
        "no call of Keras or tfdp": WorkerProgress(1, "", 1.0),
    }
    for name, progress in found.items():
        workers[0].progress_of = {1: progress, 2: None}.get
        words = rf"for worker 1 \(at {name}\), worker 2 at 'topic'. Start"
        with pytest.raises(TimeoutError, match=words):
            exchange(workers[0])


@pytest.mark.parametrize("rank", [0, 1])
def test_who_takes_no_part_after_all_has_made_no_call(
    workers: list[WorkerGroup], rank: int
):
    seen = []

    def check(missing: int) -> None:
        seen.append(missing)
        raise ValueError("others have left")

    for worker in workers:
        worker.timeout_seconds = 20.0
    with pytest.raises(ValueError, match="others have left"):
        workers[rank].all_gather("scope", check=check)
    assert seen == [1 - rank]
    assert workers[rank].num_calls == 0
    texts = on_all(workers, exchange)
    assert texts == [["from 0", "from 1", "from 2"]] * 3


def test_a_scope_is_left_by_who_has_passed_its_line_once_more_since_the_last_call():
    own, other = ProgressRecorder(), ProgressRecorder()
    assert not own.has_left_scope(other.current, "a")
    for recorder in own, other:
        recorder.record_scope_left("a")
    assert not own.has_left_scope(other.current, "a")  # in a loop, the time before
    other.record_scope_left("a")
    assert own.has_left_scope(other.current, "a")
    assert not own.has_left_scope(other.current, "b")
    own.record_texts_gathered()  # what is known of the other one is from before
    assert not own.has_left_scope(other.current, "a")
    other.record_texts_gathered()
    assert not own.has_left_scope(other.current, "a")
