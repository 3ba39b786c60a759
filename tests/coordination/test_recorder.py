"""Flight records: who writes one, when, and what it costs the others if it cannot."""

from __future__ import annotations

import collections.abc
import errno
import json
import os
import pathlib
import re
import signal
import threading

import pytest
from click.testing import CliRunner

from tests.cli.launcher import DEADLINE_SECONDS, Launcher
from tests.coordination.test_watch import Store
from tests.harness.forks import run_script
from tests.harness.tiers import full
from tests.harness.timing import wait_until
from tfdp.communication.cluster import process_tree
from tfdp.communication.coordination import flight_record
from tfdp.communication.coordination.flight_record import FlightRecord, file_name
from tfdp.communication.coordination.progress import WorkerProgress
from tfdp.communication.coordination.watch import recorder as module
from tfdp.communication.coordination.watch.failure_detector import FailureDetector
from tfdp.communication.coordination.watch.heartbeat import Heartbeat
from tfdp.communication.coordination.watch.recorder import FlightRecorder
from tfdp.launch.cli.main import cli

SCRIPT = str(pathlib.Path(__file__).with_name("troubled.py"))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> FlightRecorder:
    monkeypatch.setattr(module, "record_folder", lambda: tmp_path / "logs")
    detector = FailureDetector([1], 60.0, host=0)
    return FlightRecorder(Heartbeat(0, Store(), detector), detector)


def read(recorder: FlightRecorder) -> FlightRecord:
    recorder.wait()
    text = (recorder.folder / file_name(0)).read_text("utf-8")
    return FlightRecord.from_json(text)


def test_a_failure_is_written_once_with_the_stacks_of_all_threads(recorder):
    assert not recorder.folder.exists()
    assert recorder.command == ""
    ends = threading.Event()
    waiting = threading.Thread(target=ends.wait, name="waits for the end")
    waiting.start()
    recorder.record_failure("its process has ended", 1)
    ends.set()
    waiting.join()
    assert recorder.command == f"tfdp doctor {recorder.folder}"
    recorder.record_failure("another one", 0)
    recorder.record_request("a signal")
    found = read(recorder)
    assert (found.rank, found.num_workers, found.lost) == (0, 2, 1)
    assert found.reason == "its process has ended"
    assert found.process == os.getpid()
    names = {stack.name: stack for stack in found.threads}
    assert "in wait" in names["waits for the end"].frames[0]
    assert not names["waits for the end"].is_main
    assert "recorder.record_failure" in found.user_line
    assert found.peers.keys() == {1}


def test_requests_at_the_same_time_are_one(recorder, monkeypatch):
    now = [50.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    for reason in "first", "second":
        recorder.record_request(reason)
        assert read(recorder).reason == "first"
    now[0] += 1.5
    recorder.record_request("third")
    assert read(recorder).reason == "third"
    assert recorder.command == ""  # no failure is known


def test_a_full_disk_is_one_sentence(recorder, monkeypatch, capsys):
    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pathlib.Path, "write_text", full_disk)
    recorder.record_request("a signal")
    recorder.wait()
    recorder.record_failure("its process has ended", 1)
    assert recorder.command == ""
    assert capsys.readouterr().err.splitlines() == [
        "tfdp: the flight record of this worker cannot be written to "
        f"{recorder.folder}: No space left on device"
    ]
    assert list(recorder.folder.iterdir()) == []


def test_a_record_that_can_be_written_after_all_is_named(recorder, monkeypatch, capsys):
    monkeypatch.setattr(module, "make_private_folder", lambda path: None)
    recorder.record_request("a signal")
    recorder.wait()
    assert "No such file or directory" in capsys.readouterr().err
    monkeypatch.undo()
    recorder.record_failure("its process has ended", 1)
    assert recorder.command == f"tfdp doctor {recorder.folder}"


def test_a_signal_of_its_own_replaces_the_record_for_that_of_another(recorder):
    asked = ("another's", False), ("its own", True), ("its own again", True)
    for reason, is_own in (*asked, ("another's again", False)):
        recorder.record_request(reason, is_own=is_own)
    recorder.wait()
    assert read(recorder).reason == "its own"


def test_an_error_of_the_recorder_hides_no_lost_worker(recorder, monkeypatch, capsys):
    def fails() -> None:
        raise KeyError("rank")

    monkeypatch.setattr(module.progress, "spans", fails)
    recorder.record_failure("its process has ended", 1)
    assert recorder.command == ""
    assert "cannot be written" in capsys.readouterr().err


def test_a_file_system_that_hangs_delays_the_error_for_a_limited_time(
    recorder, monkeypatch
):
    ends = threading.Event()
    monkeypatch.setattr(module, "_WRITE_SECONDS", 0.1)
    monkeypatch.setattr(module, "make_private_folder", lambda path: ends.wait())
    recorder.record_failure("its process has ended", 1)
    assert recorder.command  # it may yet be written
    monkeypatch.setattr(module, "_WRITE_SECONDS", 10.0)
    recorder.folder.mkdir()
    ends.set()
    assert read(recorder).lost == 1


def test_a_request_reaches_the_other_workers_once(monkeypatch):
    monkeypatch.setattr(Heartbeat, "progress", WorkerProgress(7, "fit", 0.0))
    asked, other = Heartbeat(1, Store(), FailureDetector([0], 60.0, host=0)), []
    heartbeat = Heartbeat(0, Store(), FailureDetector([1], 60.0, host=0))
    heartbeat.record_requested = other.append
    for num_requests in (0, 1, 1, 2):
        asked.num_record_requests = num_requests
        beat = {"1": [0.0, json.dumps(asked._report())]}
        heartbeat._receive({"beats": beat})
    assert other == [1, 1]
    asked._beat()
    asked._beat()
    sent = [(each["is_news"], each["is_notable"]) for each in asked._store.sent]
    assert sent == [(True, False), (False, False)]


def test_only_a_process_with_a_handler_is_asked():
    own, number = os.getpid(), signal.SIGWINCH
    before = signal.signal(number, lambda *_: None)
    try:
        assert process_tree.has_signal_handler(own, number)
        signal.signal(number, signal.SIG_IGN)
        assert not process_tree.has_signal_handler(own, number)
    finally:
        signal.signal(number, before)
    assert not process_tree.has_signal_handler(2**22 + 1, number)  # no such process


def test_the_signals_of_records_are_used_for_nothing_else():
    used = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGURG, signal.SIGCHLD}
    signals = {flight_record.RECORD_SIGNAL, flight_record.LAUNCHER_SIGNAL}
    assert len(signals) == 2
    assert not signals & used


FORKS = """
import ctypes, os, socket, time
from tfdp.communication.coordination.watch import recorder
stops = []
recorder.forks.at_exit = stops.append
socket.setdefaulttimeout(0.01)
recorder.listen(lambda: print("asked", flush=True))
time.sleep(0.1)
os.kill(os.getpid(), recorder.RECORD_SIGNAL)
if os.fork() == 0 or ctypes.PyDLL(None).fork() == 0:  # the latter calls no hooks
    time.sleep(600)
stops[0]()
print("ended")
"""


def test_a_process_that_was_forked_does_not_keep_the_recorder_from_its_end():
    # As a `multiprocessing.Pool` does that is still open when the script ends.
    done = run_script(FORKS, deadline_seconds=DEADLINE_SECONDS)
    first, *_, last = done.output.split()
    assert (first, last) == ("asked", "ended"), done


CLOSES = """
import os
from tfdp.communication.coordination.watch import recorder
stops = []
recorder.forks.at_exit = stops.append
before = os.listdir("/proc/self/fd")
recorder.listen(print)
stops[0]()
print(os.listdir("/proc/self/fd") == before)
"""


def test_the_recorder_closes_its_sockets_at_its_end():
    # With `-W error` Python reports each open one.
    assert run_script(CLOSES, deadline_seconds=DEADLINE_SECONDS).output == "True\n"


# With two workers.


@pytest.fixture
def launcher(tmp_path) -> collections.abc.Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()


def explained(folder: pathlib.Path) -> str:
    result = CliRunner().invoke(cli, ["doctor", str(folder)])
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()[0]


def ranks_with_records(folder: pathlib.Path) -> list[int]:
    return [rank for rank in range(3) if (folder / file_name(rank)).exists()]


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [2, full(3)])
def test_after_a_kill_all_others_write_and_the_missing_one_is_named(
    launcher, num_workers, tmp_path
):
    last = num_workers - 1
    result = launcher.run("-n", str(num_workers), "--log-dir", "logs", SCRIPT, "kill")
    assert result.returncode == 137, result.stdout
    assert ranks_with_records(tmp_path / "logs") == list(range(last))
    assert "tfdp: who was where when it failed: tfdp doctor logs" in result.stdout
    found = explained(tmp_path / "logs")
    assert f"worker {last} has left no record" in found
    assert "step 6 of epoch 1 of fit" in found


@pytest.mark.processes
@pytest.mark.full
def test_a_worker_that_sits_in_a_callback_is_named_with_its_line(launcher, tmp_path):
    line = ("-n", "2", "--log-dir", "logs", SCRIPT, "sleep", "12")
    result = launcher.run(*line)
    assert result.returncode, result.stdout
    assert ranks_with_records(tmp_path / "logs") == [0, 1]
    found = explained(tmp_path / "logs")
    assert "Worker 0 waits for worker 1 in all-gather of texts" in found
    assert "worker 1 has not entered it, and was at the callbacks of step 6" in found
    assert "`time.sleep(1000)`" in found


@pytest.mark.processes
@pytest.mark.full
def test_a_slow_worker_is_named_with_what_the_others_have_waited(launcher, tmp_path):
    result = launcher.run("-n", "2", "--log-dir", "logs", SCRIPT, "slow")
    assert result.returncode == 0, result.stdout
    assert ranks_with_records(tmp_path / "logs") == [0, 1]
    found = explained(tmp_path / "logs")
    assert re.search(r"worker 1 on \S+ is slow: for \d+\.\d of \d+\.\d s", found)


@pytest.mark.processes
@pytest.mark.full
def test_the_sentence_of_replicas_that_drift_begins_with_the_cause(launcher, tmp_path):
    result = launcher.run("-n", "2", "--log-dir", "logs", SCRIPT, "drift")
    assert result.returncode == 1, result.stdout
    assert ranks_with_records(tmp_path / "logs") == [0, 1]
    # One of them may learn of the other one's end before its own.
    found = re.match(
        r"Workers? [01 and]+: its script has ended(, after| with) RuntimeError: "
        r"Replicas have drifted apart, as seen at step 8 of `fit`",
        explained(tmp_path / "logs"),
    )
    assert found


@pytest.mark.processes
@pytest.mark.full
def test_a_worker_that_is_stopped_is_named_by_the_record_of_the_other_one(
    launcher, tmp_path
):
    result = launcher.run("-n", "2", "--log-dir", "logs", SCRIPT, "stop", "6")
    assert result.returncode == 1, result.stdout
    assert ranks_with_records(tmp_path / "logs") == [0]
    found = explained(tmp_path / "logs")
    assert "Worker 0 waits for worker 1 in " in found
    assert "worker 1 has left no record (no sign of life for " in found
    assert "its process exists but hangs" in found


@pytest.mark.processes
@pytest.mark.full
def test_nothing_is_written_where_nothing_happens(launcher, tmp_path):
    result = launcher.run("-n", "2", "--log-dir", "logs", SCRIPT, "nothing")
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("is through") == 2
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "goodput.jsonl",
        "worker-0.log",
        "worker-1.log",
    ]


@pytest.mark.processes
@pytest.mark.full
def test_another_order_of_collectives_is_in_the_records(launcher, tmp_path):
    result = launcher.run("-n", "2", "--log-dir", "logs", SCRIPT, "order")
    assert result.returncode == 1, result.stdout
    found = explained(tmp_path / "logs")
    assert found.startswith("The workers run their collectives in different orders")
    assert "worker 0 is at all_reduce" in found
    assert "16 bytes of float32" in found
    assert "worker 1 is at all_reduce" in found
    assert "36 bytes of float32" in found


@pytest.mark.processes
@pytest.mark.full
def test_another_order_of_collectives_of_tensorflow_is_in_the_records(
    launcher, tmp_path
):
    line = ("-n", "2", "--log-dir", "logs", "--timeout", "40", SCRIPT)
    result = launcher.run(*line, "order by TensorFlow")
    assert result.returncode, result.stdout
    assert explained(tmp_path / "logs") == (
        "The workers run their collectives in different orders: as number 1 of a call "
        "of TensorFlow, worker 0 has all_reduce of float32[4] and worker 1 has "
        "all_reduce of float32[9]."
    )


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize(
    ("backend", "waits"),
    [
        ("direct", "Worker 0 waits for worker 1 in all_reduce"),
        (
            "ring",
            "Worker 0 waits for worker 1 in collectives of TensorFlow (all_reduce",
        ),
    ],
)
def test_a_pipeline_that_is_stuck_is_named_with_its_line(
    launcher, tmp_path, backend, waits
):
    script = str(pathlib.Path(__file__).with_name("hanging_data.py"))
    where = {"kind": "generator", "at": 4, "ranks": [1], "timeout_seconds": 6.0}
    where["backend"] = backend
    line = ("-n", "2", "--log-dir", "logs", script, json.dumps(where))
    result = launcher.run(*line)
    assert result.returncode == 69, result.stdout
    found = explained(tmp_path / "logs")
    assert found.startswith(waits)
    assert "in step 5 of epoch 1 of fit for" in found
    assert "worker 1 waits for a batch of the generator `batches`" in found
    assert "`time.sleep(1000)`" in found


@pytest.mark.processes
@pytest.mark.full
def test_an_error_of_a_script_is_in_the_records(launcher, tmp_path):
    result = launcher.run("-n", "2", "--log-dir", "logs", SCRIPT, "raise")
    assert result.returncode == 1, result.stdout
    found = explained(tmp_path / "logs")
    assert "worker 1 has not entered it: its script has ended with ValueError: bad" in (
        found
    )


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("asks_worker", [False, True])
def test_on_a_signal_all_workers_write_and_continue(launcher, tmp_path, asks_worker):
    process = launcher.start("-n", "2", "--log-dir", "logs", SCRIPT, "sleep")
    launcher.wait_for("sleeps")
    pid = int((tmp_path / "sleeps").read_text("utf-8"))
    os.kill(pid if asks_worker else process.pid, signal.SIGUSR2)
    own = "this worker has received a signal for it"
    others = "worker 1 has received a signal for it" if asks_worker else own

    seen = set()

    def have_written() -> bool:
        # A busy worker hears of the signal to the other one at any time, and then
        # writes another record, before or after that for its own signal.
        for rank in range(2):
            path = tmp_path / "logs" / file_name(rank)
            if path.exists():
                seen.add((rank, json.loads(path.read_text("utf-8"))["reason"]))
        return {(0, others), (1, own)} <= seen

    wait_until(have_written, "the records", DEADLINE_SECONDS)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE_SECONDS)
