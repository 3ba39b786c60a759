"""`tfdp run`: signals, time limits, and processes that must not stay behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time

import pytest

from tests.cli.launcher import (
    DEADLINE_SECONDS,
    END_SIGNALS,
    MARK,
    SLEEP,
    STOPS_WITHIN_SECONDS,
    STUBBORN,
    lines_of,
    read_terminal,
)
from tests.cli.nodes import read_until
from tests.harness.tiers import full
from tfdp.launch.cli.attempts import pause
from tfdp.launch.cli.job import JobContext
from tfdp.launch.cli.screen import Screen
from tfdp.launch.cli.signals import SignalPipe
from tfdp.launch.cli.start import Starter

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("signum", "code"), [END_SIGNALS[0], *(full(*end) for end in END_SIGNALS[1:])]
)
def test_a_signal_to_the_launcher_leaves_no_process(launcher, signum, code):
    launcher.script(STUBBORN)
    process = launcher.start("-n", "2", "--grace", "0.5", "script.py")
    launcher.wait_for("ready-0", "ready-1")
    assert len(launcher.processes()) >= 8
    process.send_signal(signum)
    assert process.wait(STOPS_WITHIN_SECONDS) == code
    launcher.assert_nothing_is_left()


def test_a_worker_may_save_its_work_when_asked_to_stop(launcher):
    launcher.script(
        """
        def save(*_):
            time.sleep(1)
            print("saved")
            sys.exit()
        signal.signal(signal.SIGTERM, save)
        pathlib.Path(f"ready-{RANK}").touch()
        time.sleep(600)
        """
    )
    done = launcher.signalled(signal.SIGTERM)
    assert lines_of(done.stdout, 0) == lines_of(done.stdout, 1) == ["saved"]
    assert done.returncode == 143


def test_ctrl_c_raises_keyboard_interrupt_in_the_workers(launcher):
    launcher.script(
        """
        try:
            pathlib.Path(f"ready-{RANK}").touch()
            time.sleep(600)
        except KeyboardInterrupt:
            print("interrupted")
        """
    )
    done = launcher.signalled(signal.SIGINT)
    assert lines_of(done.stdout, 0) == lines_of(done.stdout, 1) == ["interrupted"]
    assert done.returncode == 130
    assert "Traceback" not in done.stdout


def test_a_second_ctrl_c_kills_at_once(launcher):
    launcher.script(STUBBORN)
    process = launcher.start("-n", "2", "--grace", "600", "script.py")
    launcher.wait_for("ready-0", "ready-1")
    process.send_signal(signal.SIGINT)
    read_until(process, "SIGINT received")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    process.send_signal(signal.SIGINT)
    assert process.wait(STOPS_WITHIN_SECONDS) == 130
    launcher.assert_nothing_is_left()


@pytest.mark.full
@pytest.mark.parametrize(
    ("signum", "code"), [END_SIGNALS[0], *(full(*end) for end in END_SIGNALS[1:])]
)
def test_a_signal_while_a_failed_attempt_ends_is_the_end_of_the_job(
    launcher, signum, code
):
    launcher.script(
        """
        if RANK == 1:
            wait_for("ready")
            sys.exit(143)  # as of a worker that was sent SIGTERM
        def save(*_):
            pathlib.Path("asked").touch()
            time.sleep(1)
            print("saved")
            sys.exit()
        signal.signal(signal.SIGTERM, save)
        pathlib.Path("ready").touch()
        time.sleep(600)
        """
    )
    process = launcher.start("-n", "2", "--max-restarts", "4", "script.py")
    launcher.wait_for("asked")
    process.send_signal(signum)
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == code
    assert lines_of(output, 0) == ["saved"]  # it had its grace
    assert "restart" not in output


@pytest.mark.parametrize(
    ("signum", "code"), [END_SIGNALS[0], *(full(*end) for end in END_SIGNALS[1:])]
)
def test_a_signal_between_two_attempts_is_the_end_of_the_job(launcher, signum, code):
    launcher.script("sys.exit(3)")
    process = launcher.start("-n", "1", "--max-restarts", "4", "script.py")
    for line in process.stdout:
        if "restart 1 of 4" in line:
            break
    process.send_signal(signum)
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == code
    assert "received, the job does not start again" in output
    assert "restart" not in output


def test_a_timeout_between_two_attempts_is_the_end_of_the_job(capfd):
    screen = Screen(sys.__stdout__, sys.__stderr__)
    with contextlib.closing(SignalPipe(time.monotonic() + 0.5)) as signals:
        context = JobContext(Starter([]), screen, signals, 0.0)
        assert pause(context, 0.0) is None
        assert pause(context, 30.0) == 124
        assert screen.close(DEADLINE_SECONDS)
    assert "--timeout is over, the job does not start again" in capfd.readouterr().err


@pytest.mark.full
def test_a_closed_terminal_stops_the_workers_with_their_grace(launcher):
    launcher.script(
        """
        def save(*_):
            time.sleep(0.5)
            pathlib.Path(f"saved-{RANK}").touch()
            sys.exit()
        signal.signal(signal.SIGHUP, save)
        pathlib.Path(f"ready-{RANK}").touch()
        while True:
            print("more")
            time.sleep(0.001)
        """
    )
    master, slave = pty.openpty()
    process = launcher.start(
        *("-n", "2", "script.py"),
        **dict.fromkeys(("stdin", "stdout", "stderr"), slave),
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    read_terminal(master, rb"\[worker 0\].*\[worker 1\]|\[worker 1\].*\[worker 0\]")
    launcher.wait_for("ready-0", "ready-1")
    os.close(master)
    assert process.wait(STOPS_WITHIN_SECONDS) == 129
    assert (launcher.folder / "saved-0").exists()
    assert (launcher.folder / "saved-1").exists()


@pytest.mark.full
def test_processes_that_fork_again_and_again_do_not_outlive_the_job(launcher):
    code = """
import os, time
if os.fork(): os._exit(0)
end = time.monotonic() + 30
while time.monotonic() < end and not os.path.exists("stop"):
    os.setsid()
    open("beat", "w").write(str(os.getpid()))
    time.sleep(0.005)
    if os.fork(): os._exit(0)
"""
    launcher.script(
        f"""
        subprocess.Popen(
            [sys.executable, "-c", {code!r}], env={{"{MARK}": os.environ["{MARK}"]}}
        ).wait()
        wait_for("beat")
        beats = set()
        while len(beats) < 10:
            beats.add(pathlib.Path("beat").read_text())
            time.sleep(0.01)
        """
    )
    try:
        assert launcher.run("-n", "1", "script.py").returncode == 0
        beat = (launcher.folder / "beat").read_text()
        time.sleep(0.5)
        assert (launcher.folder / "beat").read_text() == beat
    finally:
        (launcher.folder / "stop").touch()


def test_ctrl_c_while_the_workers_start_leaves_no_process(launcher):
    launcher.script("time.sleep(600)")
    for delay in (0.1, 0.2, 0.3, 0.4):
        process = launcher.start("-n", "3", "script.py")
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=STOPS_WITHIN_SECONDS)
        # On a busy machine it is not ours yet; a worker's has its name before it.
        # Python may turn an interrupt of an import into another error.
        early = re.search("^KeyboardInterrupt$", output, re.MULTILINE)
        if re.search("^Fatal Python error: init_", output, re.MULTILINE):
            assert process.returncode == 1
        elif not (early and process.returncode == 1):
            assert process.returncode in (130, -signal.SIGINT), output
        launcher.assert_nothing_is_left(within_seconds=2)


def test_a_launcher_killed_outright_takes_its_workers_along(launcher):
    launcher.script(STUBBORN)
    process = launcher.start("-n", "2", "script.py")
    launcher.wait_for("ready-0", "ready-1")
    process.kill()
    process.wait(DEADLINE_SECONDS)
    launcher.assert_nothing_is_left(within_seconds=5)


def test_a_job_past_its_timeout_is_stopped_with_code_124(launcher):
    launcher.script(STUBBORN)
    start = time.monotonic()
    result = launcher.run("-n", "2", "--timeout", "2", "--grace", "0.5", "script.py")
    assert result.returncode == 124
    assert 2 < time.monotonic() - start < STOPS_WITHIN_SECONDS
    assert "not done within --timeout" in result.stdout
    launcher.assert_nothing_is_left()


def test_what_a_worker_leaves_behind_neither_holds_up_the_job_nor_stays(launcher):
    # The child keeps the pipe of its worker open, and goes on writing to it.
    code = """
import pathlib, sys
pathlib.Path(sys.argv[1]).touch()
while True: print("still here", flush=True)
"""
    launcher.script(
        f"""
        subprocess.Popen([sys.executable, "-c", {code!r}, f"writes-{{RANK}}"])
        wait_for(f"writes-{{RANK}}")
        """
    )
    start = time.monotonic()
    result = launcher.run("-n", "2", "script.py")
    assert result.returncode == 0
    assert time.monotonic() - start < STOPS_WITHIN_SECONDS
    launcher.assert_nothing_is_left()


@pytest.mark.full
def test_children_of_a_dead_worker_are_found_by_session_and_by_environment(launcher):
    launcher.script(
        f"""
        subprocess.Popen(
            [sys.executable, "-c", {SLEEP!r}],
            env={{"{MARK}": os.environ["{MARK}"]}},
        )
        subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True)
        sys.exit(3)
        """
    )
    assert launcher.run("-n", "2", "script.py").returncode == 3
    launcher.assert_nothing_is_left()


def test_each_worker_has_a_session_of_its_own_so_that_ctrl_c_comes_once(launcher):
    launcher.script("print(os.getsid(0) == os.getpgid(0) == os.getpid())")
    result = launcher.run("-n", "2", "script.py")
    assert lines_of(result.stdout, 0) == lines_of(result.stdout, 1) == ["True"]
