"""Collectives over MPI: sums to the last bit, ends at once, cores for computing.

What each rank does is in `mpi_ranks.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.harness.commands import Finished
from tests.harness.mpi import answers, needs_mpi, run_ranks
from tests.harness.tiers import full
from tfdp.communication.transport import mpi_communicator
from tfdp.communication.transport.communicator import TransportError

pytestmark = [needs_mpi, pytest.mark.processes]

DEADLINE_SECONDS = 100.0
CASES = (
    *("sums", "lanes", "leaves_early", "closed_here", "closed_there", "other_tags"),
    *("other_sizes", "other_dtypes", "other_calls", "waits"),
)
RANKS = [2, full(3), full(4)]


def run(num_ranks: int, *cases: str) -> Finished:
    return run_ranks(
        num_ranks,
        "-m",
        "tests.transport.mpi_ranks",
        *cases,
        deadline_seconds=DEADLINE_SECONDS,
    )


@functools.cache
def job(num_ranks: int) -> Finished:
    """One job for all cases that leave MPI in order."""
    return run(num_ranks, *CASES)


def seen(finished: Finished, case: str, num_ranks: int) -> list[Any]:
    """What the ranks have seen of a case, in their order."""
    found = {a["rank"]: a["seen"] for a in answers(finished) if a["case"] == case}
    assert sorted(found) == list(range(num_ranks)), finished.output
    return [found[rank] for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", RANKS)
def test_each_collective_moves_the_right_bytes_and_sums_are_equal_to_the_last_bit(
    num_ranks,
):
    assert seen(job(num_ranks), "sums", num_ranks) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", RANKS)
def test_groups_and_lanes_of_several_threads_do_not_mix(num_ranks):
    assert seen(job(num_ranks), "lanes", num_ranks) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", RANKS)
def test_what_a_member_sent_before_it_closed_arrives(num_ranks):
    assert seen(job(num_ranks), "leaves_early", num_ranks) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", RANKS)
def test_close_ends_a_waiting_call_at_once_and_all_later_ones(num_ranks):
    first, *others = seen(job(num_ranks), "closed_here", num_ranks)
    name, text, seconds, again = first
    assert name == "TransportClosed"
    assert text == again
    assert text == "This worker has closed its connections: the step was cancelled"
    assert 0.4 < seconds < 1.0  # it was closed after half a second
    for name, text, _ in others:
        assert name == "PeerLost"
        assert text.startswith("Worker 0 has left")
        assert text.endswith(": the step was cancelled")


@pytest.mark.parametrize("num_ranks", RANKS)
def test_members_that_wait_for_one_that_closes_get_its_reason(num_ranks):
    *waiting, _ = seen(job(num_ranks), "closed_there", num_ranks)
    for name, text, seconds in waiting:
        assert name == "PeerLost"
        assert text.endswith(": its disk is full")
        assert f"Worker {num_ranks - 1} " in text
        assert seconds < 1.0


@pytest.mark.parametrize(
    "case", ["other_tags", "other_sizes", "other_dtypes", "other_calls"]
)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_members_that_call_other_collectives_are_told_so_on_all(num_ranks, case):
    for name, text, seconds in seen(job(num_ranks), case, num_ranks):
        # A member may hear of it from another one, before it meets it itself.
        assert name in ("TransportError", "PeerLost")
        assert "The workers run different collectives: worker " in text
        assert seconds < 5.0


@pytest.mark.parametrize("num_ranks", RANKS)
def test_waiting_takes_little_of_a_core(num_ranks):
    seconds, *_ = seen(job(num_ranks), "waits", num_ranks)
    assert 0 < seconds < 0.4  # of one second, of which MPI's own wait takes all


@pytest.mark.parametrize("num_ranks", RANKS)
def test_after_errors_that_were_caught_the_job_ends_well(num_ranks):
    assert job(num_ranks).code == 0, job(num_ranks).output


@pytest.mark.full
def test_a_rank_that_ends_long_before_the_others_waits_for_them():
    finished = run(3, "slow_end")
    assert seen(finished, "slow_end", 3) == ["came to the end"] * 3
    assert finished.code == 0


@pytest.mark.full
def test_a_rank_that_fails_ends_the_job():
    finished = run(3, "fails")
    assert finished.code != 0
    assert "RuntimeError: this rank fails" in finished.output
    assert not answers(finished)


@pytest.mark.full
def test_a_rank_that_stands_still_is_not_waited_for_at_the_end():
    finished = run(2, "stopped")
    assert finished.code != 0
    assert (
        "TransportClosed: This worker has closed its connections: worker 1 stands"
        in (finished.output)
    )


@pytest.mark.full
def test_workers_may_have_another_order_than_ranks():
    finished = run(3, "renumbered")
    assert seen(finished, "renumbered", 3) == [[0, 1, 2]] * 3


@pytest.mark.full
def test_workers_that_are_not_the_ranks_of_the_job_are_refused():
    finished = run(2, "members_only", "same_worker", "too_few")
    for rank, (name, text, _) in enumerate(seen(finished, "members_only", 2)):
        assert name == "TransportError"
        assert text.startswith(f"Worker {rank} is not a member of the group")
    for name, text, _ in seen(finished, "same_worker", 2):
        assert name == "ValueError"
        assert text.endswith("Received: workers [0, 0], by MPI rank")
    for name, text, _ in seen(finished, "too_few", 2):
        assert name == "ValueError"
        assert "the MPI job, which has 2 processes" in text
        assert text.endswith("Received: 3 workers in the cluster")


def test_outside_of_an_mpi_job_there_is_no_backend():
    assert not mpi_communicator.is_mpi_job()
    with pytest.raises(ValueError, match='`backend="mpi"` needs processes that MPI'):
        mpi_communicator.start_and_check_job(2, 0)
    with pytest.raises(TransportError, match="MPI is not running in this process"):
        mpi_communicator.MpiCommunicator([0], "lane")


def test_an_mpi_job_is_known_by_its_launcher_and_its_size(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert mpi_communicator.is_mpi_job()
    assert mpi_communicator.is_mpi_job(2)
    assert not mpi_communicator.is_mpi_job(3)


def test_tasks_of_srun_are_no_mpi_job_until_mpi_is_asked_for(monkeypatch):
    environ = {
        "PMIX_RANK": "1",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_JOB_ID": "7",
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert not mpi_communicator.is_mpi_job()


@pytest.mark.full
def test_an_mpi_that_allows_one_thread_at_a_time_is_called_under_a_lock():
    finished = run(3, "serialized", "sums", "closed_here", "closed_there", "one_order")
    for case in ("sums", "one_order"):
        assert seen(finished, case, 3) == [[]] * 3
    assert seen(finished, "closed_there", 3)[0][0] == "PeerLost"
    assert finished.code == 0
