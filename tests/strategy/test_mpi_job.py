"""`mpiexec -n 2 python train.py` trains one model, without TF_CONFIG."""

from __future__ import annotations

import functools

import numpy as np
import psutil
import pytest

from tests.harness.commands import run_python
from tests.harness.mpi import answers, needs_mpi, run_ranks

pytestmark = [needs_mpi, pytest.mark.processes, pytest.mark.slow, pytest.mark.standard]

DEADLINE_SECONDS = 120.0
SCRIPT = "tests.strategy.mpi_train"


@functools.cache
def weights_of_one_device() -> list[np.ndarray]:
    finished = run_python("-m", SCRIPT, "alone", deadline_seconds=DEADLINE_SECONDS)
    (answer,) = answers(finished)
    return [np.array(weight) for weight in answer["weights"]]


@pytest.mark.parametrize("name", ["auto_strategy", "MultiWorkerMirroredStrategy"])
def test_the_ranks_of_a_job_train_one_model_as_one_device_does(name):
    finished = run_ranks(2, "-m", SCRIPT, name, deadline_seconds=DEADLINE_SECONDS)
    assert finished.code == 0, finished.output
    found = answers(finished)
    assert [answer["num_replicas"] for answer in found] == [2, 2]
    assert found[0]["weights"] == found[1]["weights"]
    for weight, alone in zip(found[0]["weights"], weights_of_one_device(), strict=True):
        scale = max(np.abs(alone).max(), 1e-3)
        assert np.abs(np.array(weight) - alone).max() / scale <= 1e-5


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
