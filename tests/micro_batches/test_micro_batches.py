"""Micro-batches that are found when a replica runs out of memory."""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.elastic import job
from tests.harness.commands import run_command
from tests.harness.pool import ClusterPool
from tests.harness.registry import Case
from tests.micro_batches import failing_update
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


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.processes
def test_an_update_that_runs_out_of_memory_on_one_worker_ends_all(tmp_path: Path):
    outcome = job.run(tmp_path, 2, script=failing_update.train, deadline_seconds=35)
    peer, own = (outcome.results[rank]["error"] for rank in (0, 1))
    assert "had computed all rows: the update itself does not fit" in own
    assert peer, outcome.output


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


def test_a_process_has_no_limit_of_its_data_where_none_is_known(
    monkeypatch: pytest.MonkeyPatch,
):
    on_macos = collections.namedtuple("pmem", "rss vms pfaults pageins")(1, 2, 3, 4)
    monkeypatch.setattr(psutil.Process, "memory_info", lambda self: on_macos)
    assert memory.free_of_process() > 0
