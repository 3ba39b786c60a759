"""Steps that do not wait for late workers, on every set-up of several workers."""

from __future__ import annotations

import re

import pytest

from tests.backup_workers import job
from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = ("backup_workers.cases_backup_workers",)


def test_steps_that_do_not_wait(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.processes
def test_a_late_worker_of_three_is_dropped_and_a_lost_one_ends_the_job(tmp_path):
    codes, outputs = job.run(tmp_path)
    assert codes == [1, 1, -9], outputs
    bits = [re.findall(r"weights (\w+)", output) for output in outputs]
    assert bits == [bits[0]] * 3, outputs
    assert len(bits[0]) == 1, outputs
    dropped = re.search(r"tfdp: Of 20 steps, .* without worker 2\.", outputs[0])
    assert dropped, outputs
    for output in outputs[:2]:
        assert re.search(r"Worker 2 .* was lost at", output), output
