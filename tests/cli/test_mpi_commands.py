"""`tfdp doctor` and `tfdp bench` in the ranks of an MPI job."""

from __future__ import annotations

import json

import pytest

from tests.harness.mpi import needs_mpi, run_ranks

pytestmark = [needs_mpi, pytest.mark.processes, pytest.mark.slow, pytest.mark.full]

DEADLINE_SECONDS = 120.0


def run_tfdp(*words: str) -> str:
    finished = run_ranks(2, "-m", "tfdp", *words, deadline_seconds=DEADLINE_SECONDS)
    assert finished.code == 0, finished.output
    return finished.output


def test_doctor_shows_each_rank_the_cluster_of_the_job():
    output = run_tfdp("doctor")
    for rank in ("0 of 2, the chief\n", "1 of 2\n"):
        assert output.count(f"; this process is worker {rank}") == 1, output
    assert output.count("1 node, 2 workers, 2 replicas") == 2
    assert output.count("this task, a free port") == 2
    assert "from TF_CONFIG" not in output


def test_the_collectives_between_ranks_are_measured_and_reported_once(tmp_path):
    path = tmp_path / "found.json"
    output = run_tfdp(
        *("bench", "collectives", "--sizes", "4KB", "--algorithms", "ring"),
        *("--blocks", "2", "--json", str(path), "--no-plot"),
    )
    assert output.count("collectives between 2 replicas, by mpi") == 1, output
    (row,) = json.loads(path.read_text("utf-8"))["rows"]
    assert row["num_wrong"] == 0
