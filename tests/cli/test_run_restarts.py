"""`tfdp run`: restarts, workers that are left out, and jobs that grow again."""

from __future__ import annotations

import pytest

from tests.cli.launcher import lines_of
from tests.harness.tiers import full
from tfdp.communication.coordination.preemption import PREEMPTED, SAVE_SIGNAL

pytestmark = pytest.mark.processes


def test_a_job_that_fails_is_started_again_and_the_history_is_kept(launcher):
    launcher.script(
        """
        tries = len(list(pathlib.Path(".").glob(f"try-{RANK}-*")))
        pathlib.Path(f"try-{RANK}-{tries}").touch()
        if tries < 2 and RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for("try-1-2")
        print("done", len(CONFIG["cluster"]["worker"]))
        """
    )
    result = launcher.run(
        *("-n", "2", "--max-restarts", "3", "--log-dir", "logs", "script.py")
    )
    assert result.returncode == 0
    assert lines_of(result.stdout, 0)[-1] == "done 2"
    history = (launcher.folder / "logs" / "restarts.log").read_text().splitlines()
    assert len(history) == 2
    assert "restart 1 of 3: worker 1 was killed by SIGKILL" in history[0]
    assert "restart 2 of 3" in result.stdout
    assert launcher.processes() == []


def test_a_worker_that_fails_again_and_again_is_left_out(launcher):
    launcher.script(
        """
        size = len(CONFIG["cluster"]["worker"])
        if RANK == 2:
            sys.exit(5)
        wait_for("never" if size > 2 else ".")
        print("done", size)
        """
    )
    result = launcher.run(
        *("-n", "3", "--max-restarts", "5", "--min-workers", "2", "script.py")
    )
    assert result.returncode == 0
    assert lines_of(result.stdout, 0)[-1] == "done 2"
    assert "2 workers (without slot 2) start again" in result.stdout


def test_after_the_last_restart_the_code_is_the_workers(launcher):
    launcher.script("sys.exit(7)")
    result = launcher.run("-n", "2", "--max-restarts", "1", "script.py")
    assert result.returncode == 7
    assert result.stdout.count("restart ") == 1


def test_a_preempted_job_is_not_started_again_here(launcher):
    launcher.script(f"sys.exit({PREEMPTED})")
    result = launcher.run("-n", "2", "--max-restarts", "3", "script.py")
    assert result.returncode == PREEMPTED
    assert "restart " not in result.stdout


GROWS = ("-n", "3", "--max-restarts", "2", "--min-workers", "2", "--grow-after", "1")


# A worker of three that fails twice; then all train until they are told what to do.
LEFT_OUT_ONCE = """
size = len(CONFIG["cluster"]["worker"])
tries = len(list(pathlib.Path(".").glob(f"try-{RANK}-of-{size}-*")))
pathlib.Path(f"try-{RANK}-of-{size}-{tries}").touch()
if size == 3 and RANK == 1 and tries < 2:
    sys.exit(5)
if size == 3 and RANK != 1:
    wait_for("try-1-of-3-2")
"""


def test_a_job_that_lost_a_worker_saves_when_asked_and_goes_on_with_all(launcher):
    launcher.script(
        LEFT_OUT_ONCE
        + f"""
if size == 2:
    def save(*_):
        sys.exit({PREEMPTED})
    signal.signal(signal.{SAVE_SIGNAL.name}, save)
    time.sleep(600)
print("done", size)
"""
    )
    result = launcher.run(*GROWS, "--log-dir", "logs", "script.py")
    assert result.returncode == 0, result.stdout
    assert lines_of(result.stdout, 2)[-1] == "done 3"
    history = (launcher.folder / "logs" / "restarts.log").read_text().splitlines()
    assert [line.split(" ")[2] for line in history] == ["restart", "restart", "growth:"]
    assert "2 workers (without slot 1) start again" in history[1]
    assert "3 workers start again" in history[2]
    assert launcher.processes() == []


@pytest.mark.full
def test_a_job_that_does_not_save_when_asked_is_never_stopped(launcher):
    launcher.script(LEFT_OUT_ONCE + "time.sleep(3.0)\nprint('done', size)\n")
    result = launcher.run(*GROWS, "script.py")
    assert result.returncode == 0, result.stdout
    assert lines_of(result.stdout, 0)[-1] == "done 2"
    assert "growth" not in result.stdout


@pytest.mark.full
def test_the_worker_that_others_name_as_lost_is_the_one_that_failed(launcher):
    from tfdp.communication.coordination.watch.errors import (
        WorkerFailure,
        failure_message,
    )  # imports TensorFlow

    said = failure_message(
        WorkerFailure(2, "no sign of life for 60 s"), "127.0.0.1:9", "step 3"
    )
    launcher.script(
        f"""
        size = len(CONFIG["cluster"]["worker"])
        if size == 3 and RANK == 0:
            print({said!r})
            sys.exit(1)
        if size == 3:
            os.kill(os.getpid(), signal.SIGSTOP)  # it cannot end by itself
        print("done", size)
        """
    )
    result = launcher.run(
        *("-n", "3", "--max-restarts", "2", "--min-workers", "2", "script.py")
    )
    assert result.returncode == 0, result.stdout
    assert "worker 2 was lost, as worker 0 reports, after" in result.stdout
    assert "2 workers (without slot 2) start again" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        full(["-n", "2", "--grow-after", "5"], "all workers always run"),
        (["-n", "2", "--min-workers", "3"], "Received: --min-workers 3, -n 2"),
        full(["-n", "2", "--min-workers", "0"], "at least 1. Received: 0"),
        full(["-n", "2", "--max-restarts", "-1"], "not negative. Received: -1"),
    ],
)
def test_wrong_numbers_of_restarts_and_workers_are_named(launcher, arguments, text):
    launcher.script("")
    result = launcher.run(*arguments, "script.py")
    assert result.returncode == 2
    assert text in " ".join(result.stdout.split())
