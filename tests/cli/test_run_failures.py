"""`tfdp run`: failing, lost and preempted workers, and exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from tests.cli.launcher import (
    DEADLINE_SECONDS,
    IGNORE_SIGNALS,
    STOPS_WITHIN_SECONDS,
    WAKING_SLEEP,
    lines_of,
    logs_of,
)
from tests.harness.tiers import full
from tfdp.communication.coordination.preemption import PREEMPTED

pytestmark = pytest.mark.processes


def test_the_failing_workers_last_lines_are_seen_and_the_others_are_stopped(
    launcher,
):
    # Worker 0 notices the end of worker 1, says a lot about that, and does not stop
    # when asked. It looks at the process and not at a closed connection, which a
    # busy machine may show it long before worker 1 has ended.
    os.mkfifo(launcher.folder / "connection")
    launcher.script(
        IGNORE_SIGNALS
        + """
if RANK == 0:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open("connection") as connection:
        peer = pathlib.Path("/proc") / connection.read() / "stat"
    while peer.exists() and peer.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.001)
    while True:
        time.sleep(0.02)
        print("peer lost")
connection = open("connection", "w")
connection.write(str(os.getpid()))
for number in range(100):
    print("line", number)
print("the reason", file=sys.stderr)
sys.exit(7)
"""
    )
    start = time.monotonic()
    result = launcher.run("-n", "2", "script.py")
    assert time.monotonic() - start < STOPS_WITHIN_SECONDS
    assert result.returncode == 7
    launcher.assert_nothing_is_left()
    output = result.stdout.splitlines()
    assert output.index("[worker 0] peer lost") > output.index("[worker 1] the reason")
    # What worker 0 has said since fills a screen.
    heading = output.index("tfdp: the last lines of worker 1:")
    expected = [f"line {number}" for number in range(81, 100)] + ["the reason"]
    assert output[heading + 1 : -1] == [*(f"[worker 1] {x}" for x in expected), ""]
    assert output[-1].startswith(
        "tfdp: worker 1 failed with exit code 7, and the other one was stopped. "
    )
    assert logs_of(launcher.folder)[1].name in output[-1]


SAME_ERROR = (
    IGNORE_SIGNALS
    + """
import atexit
@atexit.register
def end():  # when all have told their error, for the first to end stops the others
    pathlib.Path(f"told-{RANK}").touch()
    for rank in range(3):
        wait_for(f"told-{rank}")
    time.sleep(0.5 if RANK else 1.0)
if RANK:
    wait_for("told-0")
def fit():
    raise ValueError("wrong\\nshape")
print("2/9", end="\\r", flush=True)
fit()
"""
)


def test_one_error_of_all_workers_is_one_traceback(launcher):
    launcher.script(SAME_ERROR)
    result = launcher.run("-n", "3", "script.py")
    assert result.returncode == 1
    assert result.stdout.count("Traceback") == 1
    assert result.stdout.count("ValueError: wrong") == 1
    output = [line for line in result.stdout.splitlines() if "2/9" not in line]
    (first,) = [line[8] for line in output if "Traceback" in line]
    begin = output.index(f"[worker {first}] Traceback (most recent call last):")
    # Nobody's lines are between those of the traceback, the user's frame first.
    traceback = lines_of("\n".join(output[begin : begin + 7]), int(first))
    assert traceback[1].endswith("in <module>")
    assert traceback[-2:] == ["ValueError: wrong", "shape"]
    same = [line for line in output if "tfdp: the same error as on worker" in line]
    assert len(same) == 2
    assert len(output) == 1 + 7 + 2 + 1, result.stdout
    # The message is about the worker with the traceback, which has ended last.
    assert f"tfdp: worker {first} failed with exit code 1" in output[-1]
    assert output[-1].endswith(f"worker-{first}.log")
    assert all(
        path.read_text().count("Traceback") == 1 for path in logs_of(launcher.folder)
    )


# The launcher does not see these imports, before which it would import TensorFlow.
WAITS = """
import importlib
if RANK == 1 and sys.argv[1] == "never joins":
    sys.exit(0)
cluster = importlib.import_module("tfdp.communication.cluster").find_cluster()
membership = importlib.import_module("tfdp.communication.store").Membership(cluster)
membership.join(None)
if RANK == 0:
    time.sleep(1)
membership.leave()
"""

# A launcher that asks often whether workers wait, and keeps the answers.
ASKS = """
from tfdp.launch.cli import job
from tfdp.launch.cli.main import main
job._CHECK_SECONDS, ask = 0.2, job.have_all_joined
def keep(*arguments):
    answer = ask(*arguments)
    print(answer, file=open("answers", "a"))
    return answer
job.have_all_joined = keep
main(["run", "-n", "2", "script.py", {!r}])
"""


@pytest.mark.parametrize("what", ["never joins", "joins"])
def test_workers_do_not_wait_for_one_that_has_ended_with_code_0(launcher, what):
    launcher.script(WAITS)
    process = launcher.python(ASKS.format(what))
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == (what == "never joins"), output
    answers = (launcher.folder / "answers").read_text().split()
    # Who has joined once is not asked again; that others wait is asked twice.
    assert [answer for answer in answers if answer != "None"] == (
        ["False", "False"] if process.returncode else ["True"]
    )
    if process.returncode:
        assert (
            "tfdp: worker 1 ended with exit code 0 without creating a strategy, for "
            "which the rest of the job waits. Full output of worker 1: "
        ) in output.splitlines()[-1]
    else:
        assert len(output.splitlines()) == 1, output


LOST_FIRST = """
if RANK == 0:
    print("ValueError: the error itself", flush=True)
    pathlib.Path("said").touch()
    time.sleep(60)
wait_for("said")
sys.exit("WorkerLost: Worker 0 (127.0.0.1:1) was lost at 'fit'.")
"""


def test_the_worker_that_was_lost_is_named_and_not_only_who_says_so(launcher):
    launcher.script(LOST_FIRST)
    result = launcher.run("-n", "2", "script.py")
    end = result.stdout.splitlines()[-1]
    assert "worker 1 failed with exit code 1 since worker 0 was lost, and" in end
    assert end.endswith("worker-0.log")


@pytest.mark.parametrize("lost", [0, full(1)])
def test_the_exit_code_is_that_of_the_lost_worker_though_others_end_first(
    launcher, lost
):
    launcher.script(
        f"""
        if RANK == {lost}:
            time.sleep(1.5)
            sys.exit(69)
        sys.exit("WorkerLost: Worker {lost} (127.0.0.1:1) was lost at 'fit'.")
        """
    )
    result = launcher.run("-n", "3", "script.py")
    assert result.returncode == 69, result.stdout
    assert f"worker {lost} failed with exit code 69." in result.stdout.splitlines()[-1]


@pytest.mark.full
def test_who_keeps_the_output_in_a_file_sees_the_error_on_the_screen(launcher):
    launcher.script("print('Epoch 1'); raise ValueError('wrong')")
    result = launcher.run("-n", "1", "script.py", stderr=subprocess.PIPE)
    assert lines_of(result.stdout, 0)[-1] == "ValueError: wrong"
    assert lines_of(result.stderr, 0) == lines_of(result.stdout, 0)
    assert "worker 0 failed with exit code 1. " in result.stderr.splitlines()[-1]


# What TensorFlow says where other workers have ended first.
OF_PEERS = """E0000 00:00:1.1  17 ring_alg.cc:291] Aborting RingReduce with CANCELLED
Additional GRPC error information from remote target /job:worker/replica:0/task:3 while
:UNKNOWN:Error received from peer  {grpc_status:1, grpc_message:"CANCELLED"}
W0000 00:00:1.1  17 local_rendezvous.cc:412] Local rendezvous is aborting
The error could be from a previous operation. Restart your program to reset.
\t [[{{function_node __inference_one_step_on_data_890}}{{node logs/CollectiveReduce}}]]
"""


@pytest.mark.full
def test_ctrl_c_of_a_script_that_does_not_catch_it_takes_two_lines(launcher):
    launcher.script(
        f"import atexit\natexit.register(print, {OF_PEERS!r}.strip())\n"
        f"pathlib.Path(f'ready-{{RANK}}').touch()\n{WAKING_SLEEP}"
    )
    done = launcher.signalled(signal.SIGINT, num_workers=3)
    assert done.returncode == 130
    _, stopping, where = done.stdout.splitlines()
    assert stopping.startswith("tfdp: SIGINT received, stopping the workers")
    script = launcher.folder / "script.py"
    line = script.read_text().splitlines().index(WAKING_SLEEP) + 1
    assert where.split("] ")[1] == f"tfdp: interrupted at line {line} of {script}"
    assert all(
        "KeyboardInterrupt" in log.read_text() for log in logs_of(launcher.folder)
    )


def test_a_worker_killed_by_a_signal_gives_128_plus_its_number(launcher):
    launcher.script("if RANK == 1: os.kill(os.getpid(), signal.SIGKILL)\nwait_for('x')")
    result = launcher.run("-n", "2", "script.py")
    assert result.returncode == 128 + signal.SIGKILL
    assert "worker 1 was killed by SIGKILL" in result.stdout
    launcher.assert_nothing_is_left()


def test_the_first_failure_decides_the_exit_code(launcher):
    launcher.script(
        """
        def stop(*_):
            sys.exit(9)
        signal.signal(signal.SIGTERM, stop)
        pathlib.Path(f"ready-{RANK}").touch()
        wait_for("ready-0")
        if RANK == 1:
            sys.exit(5)
        time.sleep(600)
        """
    )
    result = launcher.run("-n", "2", "script.py")
    assert result.returncode == 5
    assert "worker 1 failed with exit code 5" in result.stdout.splitlines()[-1]


def test_workers_that_were_preempted_are_no_failure_and_their_code_is_passed_on(
    launcher,
):
    launcher.script(
        """
        pathlib.Path(f"ready-{RANK}").touch()
        wait_for("ready-0")
        wait_for("ready-1")
        if RANK == 0:
            time.sleep(1)
            print("ends by itself")
        sys.exit(75)
        """
    )
    result = launcher.run("-n", "2", "script.py")
    assert result.returncode == PREEMPTED == 75
    assert "ends by itself" in result.stdout
    assert "was preempted and has saved its training (exit code 75)" in result.stdout
    assert "failed" not in result.stdout


def test_a_launcher_that_is_preempted_tells_its_workers_and_passes_their_code_on(
    launcher,
):
    launcher.script(
        """
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        pathlib.Path(f"ready-{RANK}").touch()
        time.sleep(600)
        """
    )
    done = launcher.signalled(signal.SIGTERM)
    assert done.returncode == PREEMPTED
    assert "training was preempted and is saved" in done.stdout
