"""Micro-batches that are found when a replica runs out of memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.harness.commands import run_command
from tests.harness.pool import ClusterPool
from tests.harness.registry import Case
from tfdp.ground.base import memory

CASE_MODULES = ("micro_batches.cases_micro_batches",)


def test_micro_batches(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space")
def test_a_step_fits_below_a_limit_of_the_address_space(tmp_path: Path):
    finished = run_command(
        *(sys.executable, "-m", "tests.micro_batches.below_a_limit"),
        environment={"XDG_CACHE_HOME": str(tmp_path)},
        deadline_seconds=120,
    )
    assert finished.code == 0, finished.output
    limited, free = json.loads(finished.output.splitlines()[-1])
    numbers = limited["micro_batches"]
    assert numbers[0] > numbers[-1] > 1
    np.testing.assert_allclose(limited["loss"], free["loss"], rtol=1e-5)


def test_free_memory_is_that_below_the_limit_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.free_in_container() == float("inf")
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text(
        "anon 600\ninactive_file 60\nactive_file 40\n"
    )
    assert memory.free_in_container() == 400
    assert memory.free_bytes() == 400
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_in_container() == float("inf")
