"""`tfdp run`: log files and their folder."""

from __future__ import annotations

import os
import resource
import subprocess

import pytest

from tests.cli.launcher import lines_of, logs_of
from tests.harness.tiers import full

pytestmark = pytest.mark.processes


def test_logs_are_never_overwritten(launcher):
    launcher.script("print('run', sys.argv[1])")
    for run in ("one", "two"):
        assert launcher.run("-n", "1", "--log-dir", "l", "script.py", run).stdout
        assert launcher.run("-n", "1", "script.py", run).stdout
    log = (launcher.folder / "l" / "worker-0.log").read_text("utf-8")
    assert log == "run one\nrun two\n"
    default = [path.read_text("utf-8") for path in logs_of(launcher.folder)]
    assert sorted(default) == ["run one\n", "run two\n"]


def test_a_full_disk_under_the_logs_does_not_end_the_training(launcher):
    launcher.script("for n in range(20): print(n)\nprint('goes on')")
    result = launcher.run(
        *("-n", "1", "script.py"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8, 8)),
    )
    assert result.returncode == 0, result.stdout
    assert lines_of(result.stdout, 0)[-1] == "goes on"
    assert result.stdout.count("cannot be written (File too large)") == 1


@pytest.mark.full
def test_a_full_disk_under_the_output_does_not_end_the_training(launcher):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    launcher.script("for n in range(20): print(n)")
    with open("/dev/full", "w") as full:
        result = launcher.run(
            *("-n", "1", "script.py"), stdout=full, stderr=subprocess.PIPE
        )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("No space left on device") == 1
    assert "kept in the logs" in result.stderr
    assert logs_of(launcher.folder)[0].read_text().split()[-1] == "19"


@pytest.mark.parametrize(
    "what", [full("fifo"), "symlink", full("hard link"), full("folder")]
)
@pytest.mark.parametrize("name", ["worker-1.log", full("restarts.log")])
def test_a_log_is_a_regular_file_and_no_link(launcher, what, name):
    victim = launcher.folder / "victim"
    victim.write_text("mine")
    log = launcher.folder / "logs" / name
    log.parent.mkdir()
    {
        "fifo": lambda: os.mkfifo(log),
        "symlink": lambda: log.symlink_to(victim),
        "hard link": lambda: log.hardlink_to(victim),
        "folder": log.mkdir,
    }[what]()
    launcher.script("pathlib.Path('started').touch()")
    arguments = ["-n", "2", "--max-restarts", "1", "--log-dir", "logs", "script.py"]
    result = launcher.run(*arguments)
    assert result.returncode == 2
    assert result.stdout.startswith("tfdp: error: A log cannot be written: ")
    assert f"Received: logs/{name}" in result.stdout
    assert result.stdout.count("\n") == 1
    assert victim.read_text() == "mine"
    assert not (launcher.folder / "started").exists()


def test_nobody_else_can_look_into_the_folder_of_logs(launcher):
    launcher.script("print('hello')")
    launcher.run("-n", "1", "--log-dir", "logs", "script.py")
    assert (launcher.folder / "logs").stat().st_mode & 0o777 == 0o700


def test_a_default_log_folder_that_cannot_be_made_gets_one_sentence(launcher):
    launcher.script("")
    (launcher.folder / "tfdp-logs").write_text("a file", "utf-8")
    result = launcher.run("-n", "1", "script.py")
    assert result.returncode == 2
    assert "--log-dir" in result.stdout
    assert result.stdout.count("\n") == 1
