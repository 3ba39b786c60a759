"""A worker that would wait for ever to join its cluster is ended."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import psutil

JOIN = """
import sys, time
from tfdp.communication.cluster import join_deadline

with join_deadline(sys.argv[2:], float(sys.argv[1])):
    print("joining", flush=True)
    time.sleep(float(sys.stdin.readline()))
print("joined", flush=True)
sys.stdin.read()
"""

# A process that is forked meanwhile keeps what it inherits open.
FORKED = """
import os, signal, time
from tfdp.communication.cluster import join_deadline

with join_deadline(["0=localhost:1"], 10.0):
    child = os.fork()
    if not child:
        os.closerange(0, 3)
        time.sleep(60)
try:
    print("joined")
finally:
    os.kill(child, signal.SIGKILL)
"""


def start(limit_seconds: float, *others: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", JOIN, str(limit_seconds), *others],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_worker_that_does_not_join_in_time_is_ended_and_says_who_is_gone():
    with (
        socket.create_server(("localhost", 0)) as here,
        start(1.0, f"0=localhost:{here.getsockname()[1]}", "2=localhost:1") as worker,
    ):
        _, errors = worker.communicate("60\n", timeout=30)
    assert worker.returncode == -signal.SIGKILL
    assert "to join the cluster: worker 2 (localhost:1) does not answer" in errors
    assert "worker 0" not in errors


def test_where_all_answer_one_of_them_stands_still():
    with (
        socket.create_server(("localhost", 0)) as here,
        start(1.0, f"0=localhost:{here.getsockname()[1]}") as worker,
    ):
        _, errors = worker.communicate("60\n", timeout=30)
    assert worker.returncode == -signal.SIGKILL
    assert "to join the cluster: one of them hangs" in errors


def test_a_worker_that_has_joined_has_no_guard_any_more():
    with start(2.0, "0=localhost:1") as worker:
        assert worker.stdout.readline() == "joining\n"
        (guard,) = psutil.Process(worker.pid).children()
        worker.stdin.write("0\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == "joined\n"
        assert not guard.is_running()
        _, errors = worker.communicate(timeout=30)
    assert worker.returncode == 0
    assert errors == ""


def test_the_guard_of_a_worker_that_is_killed_ends_too():
    with start(60.0, "0=localhost:1") as worker:
        assert worker.stdout.readline() == "joining\n"
        (guard,) = psutil.Process(worker.pid).children()
        worker.kill()
        assert psutil.wait_procs([guard], timeout=10)[0] == [guard]


def test_a_process_that_was_forked_while_joining_does_not_keep_the_guard_waiting():
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "joined\n", "")
