"""Temporary files of killed processes are removed by the next, and only these."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.commands import ROOT
from tfdp.checkpoint.object_store import open_storage
from tfdp.ground.base import temporary
from tfdp.ground.base.files import replaced
from tfdp.ground.base.temporary import TemporaryFolder, remove_left_over, temporary_name
from tfdp.training.keras_hooks import saving

# Makes one of each in a folder, says so, and waits to be killed.
MAKE = """
import pathlib, sys, time
from tfdp.ground.base import temporary
from tfdp.ground.base.files import replaced
from tfdp.ground.base.temporary import TemporaryFolder, temporary_name
with replaced("model.keras") as path, TemporaryFolder("store") as folder:
    for each in (path, folder + "/half", "." + temporary_name("probe")):
        pathlib.Path(each).write_text("half")
    print("made", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A working directory, which is that of temporary folders, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def maker(folder) -> Iterator[subprocess.Popen]:
    """A process that has made temporary files in the folder."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE], env=environment, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"made\n"
        yield process
    finally:
        process.kill()
        process.wait(60)
        process.stdout.close()


STARTS = {
    "a write": lambda: replaced("links.json").__enter__(),
    "a temporary folder": lambda: TemporaryFolder("profile").cleanup(),
    "a backup's start": lambda: open_storage(".").remove_left_over(),
}


@pytest.mark.parametrize("start", STARTS)
def test_the_next_start_removes_what_a_killed_process_has_left(start, maker, folder):
    def purposes() -> list[str]:
        return sorted(name.split("-")[1] for name in os.listdir(folder))

    STARTS[start]()
    assert purposes() == ["file", "probe", "store"]  # it is running
    maker.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, maker.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    STARTS[start]()
    assert not purposes()


def aged(name: str, seconds: float = 0.0) -> str:
    """Makes a file that was last changed some time ago."""
    path = Path(name)
    path.write_text("mine")
    changed = path.stat().st_mtime - seconds
    os.utime(path, (changed, changed))
    return name


def test_files_of_other_hosts_stay_until_they_are_old(folder):
    host = "00000000" if temporary._host() != "00000000" else "11111111"
    aged(f".tfdp-probe-{host}-1-1-a")
    aged(f".tfdp-probe-{host}-1-1-b", seconds=7200)
    os.mkdir(f"tfdp-store-{host}-1-1-c")
    os.utime(f"tfdp-store-{host}-1-1-c", (0, 0))
    remove_left_over(folder)
    left = sorted(os.listdir(folder))
    assert left == [f".tfdp-probe-{host}-1-1-a", f"tfdp-store-{host}-1-1-c"]


def test_a_process_that_has_the_number_of_another_is_not_that_one(folder):
    own = aged(temporary_name("probe"))
    *before, start, end = own.split("-")
    other = aged("-".join([*before, str(int(start) - 1), end]))
    remove_left_over(folder)
    assert os.listdir(folder) == [own]
    assert other != own


def test_only_files_with_such_a_name_are_removed(folder):
    mine = [
        aged("model.keras", 1e8),
        aged("tfdp-probe", 1e8),
        aged(".tfdp-probe-00000000-x-1-a", 1e8),
        aged("tfdp-input-notes.txt", 1e8),
    ]
    os.symlink("/", f"tfdp-store-{temporary._host()}-0-1-a")
    remove_left_over(folder)
    assert sorted(os.listdir(folder)) == sorted(mine)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_files_of_other_users_stay(folder):
    theirs = aged(f"tfdp-store-{temporary._host()}-0-1-a")
    os.chown(theirs, 12345, 12345)
    remove_left_over(folder)
    assert os.listdir(folder) == [theirs]


def test_a_long_name_keeps_its_ending(folder):
    name = "x" * 240 + ".weights.h5"
    with replaced(name) as temporary_path:
        assert temporary_path.endswith(".weights.h5")
        Path(temporary_path).write_text("new")
    assert os.listdir(folder) == [name]


def test_a_save_removes_the_files_of_workers_that_are_no_more(folder):
    """Of a job of four, killed in a save; the next one has two."""
    for rank in range(4):
        aged(saving._temporary_path("model.keras", f"worker{rank}"))
    mine = [aged(".model.worker.keras"), aged(".model.worker3.keras.old")]
    pattern = saving._temporary_path("model.keras", "worker(rank)")
    saving._remove_stale_files(pattern, 2)
    left = [".model.worker0.keras", ".model.worker1.keras", *mine]
    assert sorted(os.listdir(folder)) == sorted(left)


def test_files_of_running_processes_stay_where_processes_cannot_be_listed(monkeypatch):
    monkeypatch.setattr(temporary, "machine", lambda: "")
    monkeypatch.setattr(temporary, "state_and_start", lambda pid: ("X", ""))
    temporary._host.cache_clear()
    try:
        name = temporary_name("probe")
        assert not temporary.is_left_over(name, age_seconds=60.0)
        assert temporary.is_left_over(name, age_seconds=10.0**6)
    finally:
        temporary._host.cache_clear()
