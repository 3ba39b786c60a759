"""Micro-batches that are found when a replica runs out of memory."""

from __future__ import annotations

import collections
import json
import os
import sys
from collections.abc import Iterator
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


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup in that of this process, or skips the test."""
    found = [folder for folder, names in memory._cgroups() if _has(folder, names)]
    if not found:
        pytest.skip("this process is in no cgroup that counts memory")
    folder = found[-1] / f"tfdp-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"this process may not make a cgroup: {error}")
    try:
        if not any(_has(folder, names) for names in (memory._V1, memory._V2)):
            pytest.skip("cgroups inside that of this process count no memory")
        yield folder
    finally:
        folder.rmdir()


def _has(folder: Path, names: memory._Names) -> bool:
    return (folder / names.limit).exists()


def check_below_a_limit(cache: Path, *arguments: str) -> None:
    """Trains with micro-batches below a limit as without one."""
    finished = run_command(
        *(sys.executable, "-m", "tests.micro_batches.below_a_limit", *arguments),
        environment={"XDG_CACHE_HOME": str(cache)},
        deadline_seconds=120,
    )
    assert finished.code == 0, finished.output
    limited, free = json.loads(finished.output.splitlines()[-1])
    numbers = limited["micro_batches"]
    assert numbers[0] > numbers[-1] > 1
    np.testing.assert_allclose(limited["loss"], free["loss"], rtol=1e-5)


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space")
def test_a_step_fits_below_a_limit_of_the_address_space(tmp_path: Path):
    check_below_a_limit(tmp_path)


@pytest.mark.full
@pytest.mark.processes
def test_a_step_fits_below_the_limit_of_a_cgroup(tmp_path: Path, cgroup: Path):
    check_below_a_limit(tmp_path, str(cgroup))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.processes
def test_an_update_that_runs_out_of_memory_on_one_worker_ends_all(tmp_path: Path):
    outcome = job.run(tmp_path, 2, script=failing_update.train, deadline_seconds=35)
    peer, own = (outcome.results[rank]["error"] for rank in (0, 1))
    assert "had computed all rows: the update itself does not fit" in own
    assert peer, outcome.output


@pytest.mark.parametrize(
    ("own", "folder", "names", "prefix"),
    [
        ("0::/", "", ("memory.max", "memory.current"), ""),
        ("0::/a.slice/b", "a.slice", ("memory.max", "memory.current"), ""),
        (
            "9:cpu,memory:/docker/1\n0::/",
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            "total_",
        ),
    ],
)
def test_free_memory_is_that_below_the_limits_of_containers_and_services(
    tmp_path, monkeypatch, own, folder, names, prefix
):
    monkeypatch.setattr(memory, "_PROCESS", tmp_path)
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    assert memory.free_in_container() == float("inf")
    (tmp_path / "cgroup").write_text(f"{own}\n")
    folder = tmp_path / folder
    folder.mkdir(exist_ok=True)
    limit, used = (folder / name for name in names)
    limit.write_text("1000\n")
    used.write_text("700\n")
    cached = f"{prefix}inactive_file 60\n{prefix}active_file 40\n"
    (folder / "memory.stat").write_text(f"anon 600\n{cached}")
    assert memory.free_in_container() == 400
    for unlimited in "max", str(2**63 - 4096):
        limit.write_text(f"{unlimited}\n")
        assert memory.free_in_container() == float("inf")


def test_a_process_has_no_limit_of_its_data_where_none_is_known(
    monkeypatch: pytest.MonkeyPatch,
):
    on_macos = collections.namedtuple("pmem", "rss vms pfaults pageins")(1, 2, 3, 4)
    monkeypatch.setattr(psutil.Process, "memory_info", lambda self: on_macos)
    assert memory.free_of_process() > 0
