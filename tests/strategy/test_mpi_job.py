"""`mpiexec -n 2 python train.py` trains one model, without TF_CONFIG."""

from __future__ import annotations

import psutil
import pytest

from tests.harness.mpi import answers, needs_mpi, run_ranks
from tests.strategy.trained import SCRIPT, check_answers

pytestmark = [needs_mpi, pytest.mark.processes, pytest.mark.slow, pytest.mark.full]

DEADLINE_SECONDS = 120.0


@pytest.mark.parametrize("name", ["auto_strategy", "MultiWorkerMirroredStrategy"])
def test_the_ranks_of_a_job_train_one_model_as_one_device_does(name):
    finished = run_ranks(2, "-m", SCRIPT, name, deadline_seconds=DEADLINE_SECONDS)
    assert finished.code == 0, finished.output
    found = answers(finished)
    assert len(found) == 2
    check_answers(found, num_replicas=2, backend="mpi")


def test_a_rank_that_is_killed_ends_the_job_and_leaves_no_process():
    finished = run_ranks(
        2, "-m", SCRIPT, "auto_strategy", "dies", deadline_seconds=DEADLINE_SECONDS
    )
    assert finished.code != 0
    assert not answers(finished)
    left = [p for p in psutil.process_iter(["cmdline"]) if SCRIPT in _words(p)]
    assert not left


def _words(process: psutil.Process) -> list[str]:
    return process.info["cmdline"] or []
