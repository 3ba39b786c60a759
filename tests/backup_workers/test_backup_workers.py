"""Steps that do not wait for late workers, on every set-up of several workers."""

from __future__ import annotations

import re

import pytest

from tests.harness.commands import run_python
from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = ("backup_workers.cases_backup_workers",)
JOB = "tests/backup_workers/job.py"


def test_steps_that_do_not_wait(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)


@pytest.mark.slow
@pytest.mark.processes
def test_a_late_worker_of_three_is_dropped_and_a_lost_one_ends_the_job(tmp_path):
    finished = run_python(
        *("-m", "tfdp", "run", "-n", "3", "--log-dir", str(tmp_path), JOB),
        deadline_seconds=120.0,
    )
    output = finished.output
    assert finished.code != 0, output
    bits = re.findall(r"weights (\w+)", output)
    assert len(bits) == 3, output
    assert len(set(bits)) == 1, output
    dropped = re.search(r"Of 20 steps, .*without worker 2\.", output)
    assert dropped, output
    assert "Worker 2" in output, output
    assert "was lost" in output, output
