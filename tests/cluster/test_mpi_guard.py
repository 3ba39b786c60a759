"""A process that would wait indefinitely for MPI to start is ended."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil

SENTENCE = "MPI did not start within 1 s: one of its processes has ended."

START = """
import sys, time
from tfdp.communication.cluster.mpi_guard import kill_after_deadline

with kill_after_deadline(sys.argv[2], float(sys.argv[1])):
    print("starting", flush=True)
    time.sleep(float(sys.stdin.readline()))
print("started", flush=True)
sys.stdin.read()
"""

# A process that is forked meanwhile keeps what it inherits open.
FORKED = """
import os, signal, time
from tfdp.communication.cluster.mpi_guard import kill_after_deadline

with kill_after_deadline("too late", 10.0):
    child = os.fork()
    if not child:
        os.closerange(0, 3)
        time.sleep(60)
try:
    print("started")
finally:
    os.kill(child, signal.SIGKILL)
"""


def start(limit_seconds: float) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", START, str(limit_seconds), SENTENCE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_process_that_does_not_start_in_time_is_ended_with_the_sentence():
    with start(1.0) as worker:
        output, errors = worker.communicate("60\n", timeout=30)
    assert worker.returncode == -signal.SIGKILL
    assert output == "starting\n"
    assert errors == f"tfdp: {SENTENCE}\n"


def test_a_process_that_has_started_has_no_guard_any_more():
    with start(2.0) as worker:
        assert worker.stdout.readline() == "starting\n"
        (guard,) = psutil.Process(worker.pid).children()
        worker.stdin.write("0\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == "started\n"
        assert not guard.is_running()
        _, errors = worker.communicate(timeout=30)
    assert worker.returncode == 0
    assert errors == ""


def test_the_guard_of_a_process_that_is_killed_ends_too():
    with start(60.0) as worker:
        assert worker.stdout.readline() == "starting\n"
        (guard,) = psutil.Process(worker.pid).children()
        worker.kill()
        assert psutil.wait_procs([guard], timeout=10)[0] == [guard]


def test_a_process_that_was_forked_meanwhile_does_not_keep_the_guard_waiting():
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "started\n", "")
