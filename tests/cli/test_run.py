"""`tfdp run`: real workers, real signals; no TensorFlow, so each test is short."""

from __future__ import annotations

import collections.abc
import contextlib
import errno
import fcntl
import functools
import json
import os
import pathlib
import pty
import re
import resource
import select
import signal
import subprocess
import sys
import termios
import textwrap
import threading
import time
import types
import uuid
import zipfile

import click
import psutil
import pytest

from tests.harness.commands import HEEDING
from tfdp.communication.cluster import Cluster
from tfdp.communication.cluster import ports as cluster_ports
from tfdp.communication.cluster.gpus import visible_gpus
from tfdp.communication.coordination.preemption import PREEMPTED, SAVE_SIGNAL
from tfdp.launch.cli import launch, main, outlet, worker
from tfdp.launch.cli.attempts import pause
from tfdp.launch.cli.job import JobContext
from tfdp.launch.cli.lines import LineReader
from tfdp.launch.cli.noise import is_noise
from tfdp.launch.cli.outlet import Outlet
from tfdp.launch.cli.program import check_program
from tfdp.launch.cli.screen import Screen
from tfdp.launch.cli.signals import SignalPipe
from tfdp.launch.cli.start import Starter
from tfdp.launch.cli.worker import LogFile

pytestmark = pytest.mark.processes

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 60
# The grace of 5 seconds, and room for a slow machine.
STOPS_WITHIN_SECONDS = 15
MARK = "TFDP_TEST_MARK"

# What the scripts of these tests begin with.
PRELUDE = """
import json, os, pathlib, signal, subprocess, sys, time
CONFIG = json.loads(os.environ["TF_CONFIG"])
RANK = CONFIG["task"]["index"]
def wait_for(path):
    while not pathlib.Path(path).exists():
        time.sleep(0.01)
"""
SLEEP = "import time; time.sleep(600)"
# A signal that comes just before a sleep begins is seen only when that sleep ends.
WAKING_SLEEP = "for _ in range(6000): time.sleep(0.1)"
IGNORE_SIGNALS = """
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(signum, signal.SIG_IGN)
"""
# A worker that ignores signals, and children that do not: one that left its
# session, and one that has lost its TF_CONFIG.
STUBBORN = (
    IGNORE_SIGNALS
    + f"""
subprocess.Popen([sys.executable, "-c", {SLEEP!r}])
subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True)
subprocess.Popen(
    [sys.executable, "-c", {SLEEP!r}], env={{"{MARK}": os.environ["{MARK}"]}}
)
pathlib.Path(f"ready-{{RANK}}").touch()
print("ready")
time.sleep(600)
"""
)


class Launcher:
    """Runs `tfdp run` in a folder, and leaves no process when the test ends."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            MARK: self.mark,
        }
        for name in (
            *("TF_CONFIG", "OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"),
            "TF_ENABLE_ONEDNN_OPTS",
        ):
            self.environment.pop(name, None)

    def script(self, body: str, name: str = "script.py") -> None:
        (self.folder / name).write_text(PRELUDE + textwrap.dedent(body), "utf-8")

    def start(
        self, *arguments: str, before: collections.abc.Sequence[str] = (), **options
    ) -> subprocess.Popen:
        return subprocess.Popen(
            [*before, *HEEDING, sys.executable, "-m", "tfdp", "run", *arguments],
            **{
                "cwd": self.folder,
                "env": self.environment,
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.STDOUT,
                "text": True,
                "start_new_session": True,
                **options,
            },
        )

    def run(self, *arguments: str, **options) -> subprocess.CompletedProcess:
        process = self.start(*arguments, **options)
        output, errors = process.communicate(timeout=DEADLINE_SECONDS)
        return subprocess.CompletedProcess(
            process.args, process.returncode, output, errors
        )

    def wait_for(self, *names: str) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < deadline, f"none of {names} appeared"
            time.sleep(0.02)

    def processes(self) -> list[psutil.Process]:
        """All that was started here and still runs, the launcher too."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                running = process.status() != psutil.STATUS_ZOMBIE
                if running and process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def assert_nothing_is_left(self, within_seconds: float = 0.0) -> None:
        deadline = time.monotonic() + within_seconds
        while left := self.processes():
            # No command line here: to ask a process that just ended raises.
            assert time.monotonic() < deadline, left
            time.sleep(0.05)

    def close(self) -> None:
        while left := self.processes():
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)


@pytest.fixture
def launcher(tmp_path) -> collections.abc.Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()


def lines_of(output: str, rank: int) -> list[str]:
    prefix = f"[worker {rank}] "
    return [line[len(prefix) :] for line in output.splitlines() if prefix in line]


def logs_of(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob("tfdp-logs/*/worker-*.log"))


def test_each_worker_gets_the_same_cluster_and_its_own_task(launcher):
    launcher.script("print(json.dumps(CONFIG))")
    result = launcher.run("-n", "3", "script.py")
    assert result.returncode == 0, result.stdout
    configs = [json.loads(lines_of(result.stdout, rank)[0]) for rank in range(3)]
    assert [config["task"] for config in configs] == [
        {"type": "worker", "index": rank} for rank in range(3)
    ]
    addresses = configs[0]["cluster"]["worker"]
    assert all(config["cluster"] == {"worker": addresses} for config in configs)
    assert len(set(addresses)) == 3
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    assert all(
        Cluster.from_tf_config(json.dumps(config)).devices_per_worker is None
        for config in configs
    )


def test_as_many_workers_as_gpus_or_else_as_cpu_cores(launcher):
    launcher.environment["CUDA_VISIBLE_DEVICES"] = "0,1,2"
    launcher.script("print(len(CONFIG['cluster']['worker']), sys.argv[1:])")
    # What follows the script is its own, an option of another launcher too.
    result = launcher.run("-n", "auto", "script.py", "-np")
    assert lines_of(result.stdout, 0) == ["3 ['-np']"]
    launcher.environment["CUDA_VISIBLE_DEVICES"] = ""
    result = launcher.run("-n", "auto", "script.py")
    assert lines_of(result.stdout, 0) == [f"{launch.num_cores()} []"]


@pytest.mark.parametrize("option", ["-D", "--devices-per-worker"])
def test_devices_per_worker_travel_in_tf_config(launcher, option):
    launcher.script("print(CONFIG['tfdp']['devices_per_worker'])")
    result = launcher.run("-n", "2", option, "3", "script.py")
    assert lines_of(result.stdout, 0) == lines_of(result.stdout, 1) == ["3"]


def test_rebalance_travels_in_tf_config_and_says_where_it_has_no_effect(launcher):
    launcher.script("print(CONFIG['tfdp'].get('rebalance'))")
    for arguments, expected in ((["--rebalance"], "True"), ([], "None")):
        result = launcher.run("-n", "2", *arguments, "script.py")
        assert lines_of(result.stdout, 0) == lines_of(result.stdout, 1) == [expected]
        assert "no effect" not in result.stdout
    result = launcher.run("-n", "1", "--rebalance", "script.py")
    assert result.returncode == 0
    assert "--rebalance has no effect with one worker" in result.stdout


def test_cores_are_divided_among_workers(launcher):
    launcher.script(
        "print(os.environ['TF_NUM_INTRAOP_THREADS'], os.environ['OMP_NUM_THREADS'])"
    )
    result = launcher.run("-n", "2", "script.py")
    share = max(1, launch.num_cores() // 2)
    assert lines_of(result.stdout, 1) == [f"{share} {share}"]


def test_the_users_own_number_of_threads_and_choice_of_kernels_stand(launcher):
    launcher.environment["OMP_NUM_THREADS"] = "7"
    launcher.script(
        "print(os.environ['OMP_NUM_THREADS'], os.environ['TF_ENABLE_ONEDNN_OPTS'])"
    )
    launcher.environment["TF_ENABLE_ONEDNN_OPTS"] = "0"
    assert lines_of(launcher.run("-n", "2", "script.py").stdout, 0) == ["7 0"]


def gpus_of(slot: int, environ: dict, count: int = 2, num_workers: int = 2):
    workers = tuple(f"127.0.0.1:{port}" for port in range(1, num_workers + 1))
    environment = launch.worker_environment(
        Cluster(workers), slot, count, "job", environ=environ
    )
    return environment.get("CUDA_VISIBLE_DEVICES")


def test_gpus_are_shared_out_among_workers():
    chosen = {"CUDA_VISIBLE_DEVICES": "4,5, 6,7"}
    assert [gpus_of(rank, chosen) for rank in range(2)] == ["4,5", "6,7"]
    assert gpus_of(1, chosen, count=3) == "5"
    assert gpus_of(0, chosen, count=1) == "4,5, 6,7"
    assert gpus_of(0, {"CUDA_VISIBLE_DEVICES": ""}) == ""
    assert gpus_of(1, {"CUDA_VISIBLE_DEVICES": "0"}) == "0"


@pytest.mark.parametrize(
    ("chosen", "gpus"),
    [
        ("-1", []),
        ("0,-1,1", ["0"]),
        ("NoDevFiles", []),
        ("GPU-8932f937,MIG-2", ["GPU-8932f937", "MIG-2"]),
    ],
)
def test_gpus_are_counted_up_to_the_first_name_that_is_none(chosen, gpus):
    environ = {"CUDA_VISIBLE_DEVICES": chosen}
    assert visible_gpus(environ) == gpus
    if not gpus:
        assert gpus_of(0, environ) == chosen


def test_who_is_left_out_takes_its_gpus_along():
    chosen = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    # Of four slots that with GPU 1 is left out, or all but that with GPU 3.
    left = [gpus_of(slot, chosen, 4, num_workers=3) for slot in (0, 2, 3)]
    assert left == ["0", "2", "3"]
    assert gpus_of(3, chosen, 4, num_workers=1) == "3"


def test_output_is_unbuffered_prefixed_and_logged_for_each_worker(launcher):
    launcher.script(
        """
        print("to stdout of", RANK)
        print("to stderr of", RANK, file=sys.stderr)
        print("bytes \\x1b[31mred\\x1b[0m ✓")
        print()
        print("no end of line", end="")
        """
    )
    result = launcher.run("-n", "2", "script.py", stderr=subprocess.PIPE)
    assert result.returncode == 0
    for rank in range(2):
        expected = [
            f"to stdout of {rank}",
            f"to stderr of {rank}",
            "bytes red ✓",
            "no end of line",
        ]
        assert lines_of(result.stdout, rank) == expected
        log = logs_of(launcher.folder)[rank].read_text("utf-8")
        assert log.splitlines() == [*expected[:3], "", expected[3]]
    assert "tfdp-logs" in result.stderr


def test_lines_come_while_the_worker_still_runs(launcher):
    launcher.script("print('early'); wait_for('go')")
    process = launcher.start("-n", "1", "script.py", stderr=subprocess.DEVNULL)
    assert process.stdout.readline() == "[worker 0] early\n"
    assert process.poll() is None
    (launcher.folder / "go").touch()
    assert process.wait(DEADLINE_SECONDS) == 0


def test_a_progress_bar_becomes_one_line_in_a_file(launcher):
    launcher.script(
        """
        for step in range(1, 4):
            print("\\b" * 9 + f"\\r\\x1b[1m{step}/3\\x1b[0m", end="", flush=True)
            time.sleep(0.05)
        print()
        print("done")
        """
    )
    result = launcher.run("-n", "1", "script.py")
    assert lines_of(result.stdout, 0) == ["3/3", "done"]
    assert logs_of(launcher.folder)[0].read_text("utf-8") == "3/3\ndone\n"


def read_terminal(fd: int, until: bytes) -> bytes:
    """Reads what appears on a terminal until it matches the pattern."""
    data = b""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not re.search(until, data, re.DOTALL):
        assert time.monotonic() < deadline, data
        if select.select([fd], [], [], 0.1)[0]:
            data += os.read(fd, 4096)
    return data


def test_a_progress_bar_moves_on_a_terminal_below_the_lines_of_others(launcher):
    launcher.environment |= {"TERM": "xterm-256color", "COLUMNS": "40"}
    launcher.script(
        """
        if RANK == 1:
            wait_for("drawn")
            print("a line", end="", flush=True)
            time.sleep(0.3)
            print()
            sys.exit()
        print("\\r\\x1b[32m1/2\\x1b[0m " + "x" * 100, end="", flush=True)
        wait_for("drawn again")
        print("\\r2/2", end="", flush=True)
        wait_for("end")
        print()
        """
    )
    master, slave = pty.openpty()
    process = launcher.start("-n", "2", "script.py", stdout=slave, stderr=slave)
    os.close(slave)
    drawn = read_terminal(master, rb"\[worker 0\][^\n]*1/2")
    (launcher.folder / "drawn").touch()
    # The bar is taken away, the line printed, and the bar drawn again, though
    # the line comes in two pieces, of which the first looks like a bar too.
    drawn += read_terminal(
        master, rb"\r\x1b\[2K[^\n]*\[worker 1\][^\n]*a line\r\n[^\n]*1/2"
    )
    (launcher.folder / "drawn again").touch()
    drawn += read_terminal(master, rb"\r\x1b\[2K[^\n]*\[worker 0\][^\n]*2/2")
    (launcher.folder / "end").touch()
    assert process.wait(DEADLINE_SECONDS) == 0
    os.close(master)
    # A bar wider than the screen is cut, for it could not be erased.
    assert b"x" * 10 in drawn
    assert b"x" * 40 not in drawn


def test_what_a_terminal_echoes_of_ctrl_c_does_not_stand_before_the_message(launcher):
    launcher.environment |= {"TERM": "xterm-256color"}
    launcher.script("pathlib.Path('ready').touch()\ntime.sleep(600)")
    master, slave = pty.openpty()
    process = launcher.start(
        *("-n", "1", "script.py"),
        **dict.fromkeys(("stdin", "stdout", "stderr"), slave),
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    launcher.wait_for("ready")
    os.write(master, b"\x03")
    shown = read_terminal(master, rb"kills it at once\)\r\n.*interrupted at line \d+")
    assert b"^C\r\x1b[2Ktfdp: SIGINT received, stopping the worker (" in shown
    assert process.wait(DEADLINE_SECONDS) == 130
    os.close(master)


def test_force_color_makes_no_terminal_of_a_pipe(launcher):
    launcher.environment["FORCE_COLOR"] = "1"
    launcher.script("print('\\r1/2', end=''); print('\\r2/2')")
    result = launcher.run("-n", "1", "script.py", stderr=subprocess.DEVNULL)
    assert result.stdout == "[worker 0] 2/2\n"


def test_a_full_line_is_read_from_pieces_of_characters_and_returns():
    reader = LineReader()
    text = "10/10 ━━ é\r\nnext".encode()
    lines = [line for byte in text for line in reader.feed(bytes([byte]))]
    assert lines == ["10/10 ━━ é"]
    assert reader.unfinished == "next"
    assert reader.close() == ["next"]


CUINIT = "E0000 00:00:1.5  7 cuda_platform.cc:52] failed call to cuInit: UNKNOWN"
CHATTER = f"""
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795402432.307807   15452 cudart_stub.cc:31] Could not find cuda drivers
{CUINIT}
E0000 00:00:1795402432.307807   15452 server.cc:3] a real error
W0000 00:00:1795402432.307807   15452 server.cc:3] a warning
I1123 02:15:21.123456   15452 train.py:3] the script's own
In 2 epochs
"""


def test_chatter_of_tensorflow_is_in_the_log_and_not_on_the_screen(launcher):
    launcher.environment.pop("TF_CPP_MIN_LOG_LEVEL", None)
    launcher.environment["CUDA_VISIBLE_DEVICES"] = ""
    launcher.script(f"print({CHATTER!r}, os.environ['TF_CPP_MIN_LOG_LEVEL'])")
    result = launcher.run("-n", "1", "--log-dir", "logs", "script.py")
    shown = [line for line in lines_of(result.stdout, 0) if line.strip()]
    assert [line.split("] ")[-1] for line in shown] == [
        "a real error",
        "a warning",
        "the script's own",
        "In 2 epochs",
        " 1",
    ]
    log = (launcher.folder / "logs" / "worker-0.log").read_text("utf-8")
    assert all(line in log for line in CHATTER.splitlines())


def test_who_sets_the_level_of_tensorflow_or_has_a_gpu_sees_more(launcher):
    launcher.environment |= {"TF_CPP_MIN_LOG_LEVEL": "0"}
    launcher.script(f"print({CHATTER!r}, os.environ['TF_CPP_MIN_LOG_LEVEL'])")
    result = launcher.run("-n", "1", "script.py")
    assert {*CHATTER.split("\n"), " 0"} - {""} == {*lines_of(result.stdout, 0)} - {""}
    assert is_noise(CUINIT, {"CUDA_VISIBLE_DEVICES": ""})
    assert not is_noise(CUINIT, {"CUDA_VISIBLE_DEVICES": "0"})


@pytest.mark.parametrize("text", ["    indented\n", "1/9\r    indented\n", "a\r  \n"])
def test_a_line_is_the_same_in_however_many_pieces_it_comes(text):
    whole = LineReader().feed(text.encode())
    for cut in range(len(text)):
        reader = LineReader()
        lines = reader.feed(text[:cut].encode()) + reader.feed(text[cut:].encode())
        assert lines == whole


def test_a_line_without_end_does_not_fill_the_memory():
    reader = LineReader()
    for _ in range(100):
        reader.feed(b"x" * 4096)
    assert len(reader.unfinished) < 100_000
    for step in range(10_000):
        reader.feed(b"\r%d " % step + b"x" * 100)
    assert len(reader._pending) < 1000


def start_of(code: str) -> collections.abc.Callable[[int], int]:
    starter = Starter([sys.executable, "-c", code])
    return functools.partial(starter.start, os.environ)


def test_a_bar_is_shown_now_and_then_in_files(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "_SNAPSHOT_SECONDS", 0.0)
    code = "import sys; sys.stdout.write('1/9'); sys.stdout.flush()"
    log = LogFile(tmp_path / "log", pytest.fail)
    process = worker.Worker(0, start_of(code), log)
    output = open(tmp_path / "output", "w")  # noqa: SIM115
    screen = Screen(output)
    while process.is_running:
        process.poll()
        process.read()
    text = process.snapshot()
    screen.snapshot(0, text)
    assert screen.close(DEADLINE_SECONDS)
    process.close()
    log.close()
    output.close()
    assert text == "1/9"
    assert (tmp_path / "log").read_text("utf-8") == "1/9\n"
    assert (tmp_path / "output").read_text("utf-8") == "[worker 0] 1/9\n"


def test_a_line_is_not_shown_in_halves(tmp_path, monkeypatch):
    # Unbuffered, as under the launcher, Python writes a line and its end apart.
    now = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr(worker, "time", clock)
    code = "import time; print('half', end='', flush=True); time.sleep(600)"
    log = LogFile(tmp_path / "log", pytest.fail)
    process = worker.Worker(0, start_of(code), log)
    now[0] = 60.0  # nothing was written for a minute
    while not process.unfinished:
        process.read()
    assert process.snapshot() is None
    now[0] += worker._SNAPSHOT_SECONDS
    assert process.snapshot() == "half"
    assert process.snapshot() is None
    process.send(signal.SIGKILL)
    process.close()
    log.close()


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


SAME_ERROR = """
import atexit
@atexit.register
def end():  # when all have told their error, for the first to end stops the others
    pathlib.Path(f"told-{RANK}").touch()
    for rank in range(3):
        wait_for(f"told-{rank}")
def fit():
    raise ValueError("wrong\\nshape")
print("2/9", end="\\r", flush=True)
fit()
"""


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
    assert all(
        path.read_text().count("Traceback") == 1 for path in logs_of(launcher.folder)
    )


LOST_FIRST = """
import json, os, sys, time
if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
    print("ValueError: the error itself", flush=True)
    time.sleep(60)
time.sleep(0.5)
sys.exit("WorkerLost: Worker 0 (127.0.0.1:1) was lost at 'fit'.")
"""


def test_the_worker_that_was_lost_is_named_and_not_only_who_says_so(launcher):
    launcher.script(LOST_FIRST)
    result = launcher.run("-n", "2", "script.py")
    end = result.stdout.splitlines()[-1]
    assert "worker 1 failed with exit code 1 since worker 0 was lost, and" in end
    assert end.endswith("worker-0.log")


@pytest.mark.parametrize("lost", [0, 1])
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


def test_ctrl_c_of_a_script_that_does_not_catch_it_takes_two_lines(launcher):
    launcher.script(
        f"import atexit\natexit.register(print, {OF_PEERS!r}.strip())\n"
        f"pathlib.Path(f'ready-{{RANK}}').touch()\n{WAKING_SLEEP}"
    )
    process = launcher.start("-n", "3", "script.py")
    launcher.wait_for("ready-0", "ready-1", "ready-2")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 130
    _, stopping, where = output.splitlines()
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
    process = launcher.start("-n", "2", "script.py")
    launcher.wait_for("ready-0", "ready-1")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == PREEMPTED
    assert "training was preempted and is saved" in output


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
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
    process = launcher.start("-n", "2", "script.py")
    launcher.wait_for("ready-0", "ready-1")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert lines_of(output, 0) == lines_of(output, 1) == ["saved"]
    assert process.returncode == 143


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
    process = launcher.start("-n", "2", "script.py")
    launcher.wait_for("ready-0", "ready-1")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert lines_of(output, 0) == lines_of(output, 1) == ["interrupted"]
    assert process.returncode == 130
    assert "Traceback" not in output


def test_a_second_ctrl_c_kills_at_once(launcher):
    launcher.script(STUBBORN)
    process = launcher.start("-n", "2", "--grace", "600", "script.py")
    launcher.wait_for("ready-0", "ready-1")
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(STOPS_WITHIN_SECONDS) == 130
    launcher.assert_nothing_is_left()


END_SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]


@pytest.mark.parametrize(("signum", "code"), END_SIGNALS)
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


@pytest.mark.parametrize(("signum", "code"), END_SIGNALS)
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
    with contextlib.closing(SignalPipe()) as signals:
        screen = Screen(sys.__stdout__, sys.__stderr__)
        until = time.monotonic() + 0.1
        context = JobContext(Starter([]), screen, signals, 0.0, until)
        assert pause(context, 0.0) is None
        assert pause(context, 30.0) == 124
        assert screen.close(DEADLINE_SECONDS)
    assert "--timeout is over, the job does not start again" in capfd.readouterr().err


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


TALKS = """
pathlib.Path("ready").touch()
for _ in range(30_000):
    print("x" * 80)
time.sleep(600)
"""


@pytest.mark.parametrize(("signum", "code"), [*END_SIGNALS, (None, 124)])
def test_a_job_whose_output_nobody_reads_can_be_ended(launcher, signum, code):
    launcher.script(TALKS)
    timeout = ["--timeout", "600" if signum else "2"]
    process = launcher.start("-n", "2", "--grace", "0.5", *timeout, "script.py")
    launcher.wait_for("ready")
    time.sleep(0.7)  # the pipe is full
    if signum:
        process.send_signal(signum)
    assert process.wait(STOPS_WITHIN_SECONDS) == code
    launcher.assert_nothing_is_left()
    process.stdout.close()


def test_a_job_whose_output_nobody_reads_goes_on(launcher):
    launcher.script("for n in range(20_000): print(n, 'x' * 200)")
    process = launcher.start("-n", "1", "--timeout", "15", "script.py")
    log = launcher.folder / "tfdp-logs"
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not any("19999 x" in path.read_text() for path in log.glob("*/worker-0.log")):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0
    assert re.search(r"output was not read in time; [\d,]+ lines are only in", output)


def test_what_a_reader_leaves_in_the_pipe_is_counted_and_a_slow_one_gets_all(
    monkeypatch,
):
    monkeypatch.setattr(outlet, "_MAX_BYTES", 10_000)
    monkeypatch.setattr(outlet, "_STALLED_SECONDS", 0.1)
    reader, writer = os.pipe()
    with open(reader, encoding="utf-8") as text, open(writer, "w") as stream:
        out = Outlet(stream)
        for _ in range(3000):  # more than a pipe holds
            out.write("x" * 49 + "\n")
        assert out.is_behind
        time.sleep(0.2)
        assert not out.is_behind
        out.write("dropped\n" * 7)
        assert not out.drain(0.0)
        lines = [text.readline() for _ in range(3001)]
        assert out.drain(DEADLINE_SECONDS)
    assert lines[:3000] == ["x" * 49 + "\n"] * 3000
    assert "7 lines are only in the logs" in lines[-1]


def test_nobody_waits_for_what_is_written_while_the_output_fails(monkeypatch):
    monkeypatch.setattr(Outlet, "_serve", lambda self, fd: None)
    with open(os.devnull, "w") as stream:
        out = Outlet(stream)
        with out._changed:  # as the thread has it that finds the error
            late = threading.Thread(target=out.write, args=("late\n",))
            late.start()
            time.sleep(0.2)
            out.error = OSError(errno.ENOSPC, "No space left on device")
        late.join(DEADLINE_SECONDS)
        assert out.drain(0.0)


@pytest.mark.parametrize("closed", [1, 2])
def test_a_job_needs_no_open_output(launcher, closed):
    launcher.script("print('goes on')")
    result = launcher.run(
        *("-n", "2", "script.py"),
        stderr=subprocess.PIPE,
        preexec_fn=lambda: os.close(closed),
    )
    assert result.returncode == 0
    assert "Traceback" not in result.stderr
    assert [path.read_text() for path in logs_of(launcher.folder)] == ["goes on\n"] * 2


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
        time.sleep(0.3)
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
        if re.search("^Fatal Python error: init_", output, re.MULTILINE):
            assert process.returncode == 1
        else:
            assert process.returncode in (130, -signal.SIGINT)
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
    code = "while True: print('still here', flush=True)"
    launcher.script(
        f"subprocess.Popen([sys.executable, '-c', {code!r}]); time.sleep(0.5)"
    )
    start = time.monotonic()
    result = launcher.run("-n", "2", "script.py")
    assert result.returncode == 0
    assert time.monotonic() - start < STOPS_WITHIN_SECONDS
    launcher.assert_nothing_is_left()


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


def test_a_worker_may_close_its_output_and_go_on(launcher):
    launcher.script("os.close(1); os.close(2); time.sleep(1); os._exit(4)")
    assert launcher.run("-n", "1", "script.py").returncode == 4


def test_a_reader_that_goes_away_ends_the_job(launcher):
    launcher.script("while True: print('more'); time.sleep(0.01)")
    process = launcher.start("-n", "2", "script.py", stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(DEADLINE_SECONDS) == 141
    assert "Traceback" not in errors
    assert "Exception" not in errors
    launcher.assert_nothing_is_left()


def test_arguments_after_the_script_are_the_scripts_own(launcher):
    launcher.script("print(sys.argv[1:])")
    arguments = ["-n", "7", "--timeout", "x", "--", "--help", "-m", "", "a b", "*"]
    for separator in ([], ["--"]):
        result = launcher.run("-n", "1", *separator, "script.py", *arguments)
        assert lines_of(result.stdout, 0) == [str(arguments)]


def test_a_module_is_run_as_python_m_does(launcher):
    (launcher.folder / "package").mkdir()
    launcher.script("print(__name__, sys.argv[1:])", "package/job.py")
    result = launcher.run("-n", "2", "-m", "package.job", "--epochs", "3", "-m")
    assert result.returncode == 0, result.stdout
    assert lines_of(result.stdout, 1) == ["__main__ ['--epochs', '3', '-m']"]


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


@pytest.mark.parametrize("what", ["fifo", "symlink", "hard link", "folder"])
@pytest.mark.parametrize("name", ["worker-1.log", "restarts.log"])
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


def test_a_tf_config_of_somebody_else_is_replaced_with_a_warning(launcher):
    launcher.environment["TF_CONFIG"] = '{"cluster": {"worker": ["other:1"]}}'
    launcher.script("print(len(CONFIG['cluster']['worker']))")
    result = launcher.run("-n", "2", "script.py")
    assert lines_of(result.stdout, 0) == ["2"]
    assert "TF_CONFIG is set, and is replaced" in result.stdout


BAD_INPUT = [
    (["-n", "0", "script.py"], "Received: 0"),
    (["-n", "-1", "script.py"], "Received: -1"),
    (["-n", "two", "script.py"], "Received: two"),
    (["-n", "1000000", "script.py"], "CPU cores. Received: -n 1000000"),
    (["-n", "1.5", "script.py"], "Received: 1.5"),
    (["-n", "2", "-D", "0", "script.py"], "Received: 0"),
    (["-n", "2", "--devices-per-worker", "x", "script.py"], "Received: x"),
    (["-n", "2", "--timeout", "-1", "script.py"], "Received: -1"),
    (["-n", "2", "--timeout", "nan", "script.py"], "Received: nan"),
    (["-n", "2", "--timeout", "soon", "script.py"], "Received: soon"),
    (["-n", "2", "missing.py"], "Received: missing.py"),
    (["-n", "2", "-m", "no_such_module.x"], "Received: no_such_module.x"),
    (["-n", "2", "-m", ".x"], "Received: .x"),
    (["-n", "2", "."], "Received: ."),
    (["-n", "2", "--log-dir", "script.py/logs", "script.py"], "script.py/logs"),
    (["-n", "2", "--log-dir", "script.py", "script.py"], "Received: script.py"),
    (["script.py"], "-n"),
    (["-n", "2"], "SCRIPT"),
    (["-n", "2", "--no-such-option", "script.py"], "--no-such-option"),
    (["-np", "2", "script.py"], "Give the number of workers with -n. Received: -np"),
    (["--nproc-per-node=2", "script.py"], "with -n. Received: --nproc-per-node"),
    (["-np2", "script.py"], "with -n. Received: -np2"),
    (["--nproc_per_node", "2", "script.py"], "Received: --nproc_per_node"),
    (["--np", "2", "script.py"], "with -n. Received: --np"),
    (["--gpus", "2", "script.py"], "with -n. Received: --gpus"),
    (["--timeout", "9", "-H", "a,b", "script.py"], "with --hosts HOST:N,HOST:N. Re"),
    (["-Ha,b", "script.py"], "Give the machines with --hosts"),
    (["--hostfile", "missing", "script.py"], "the hostfile cannot be read"),
    (["--nnodes=2", "script.py"], "Give the number of machines with --nodes"),
    (["--master_port=29500", "script.py"], "address of node 0 with --rendezvous. Rec"),
    (["--rdzv-backend=c10d", "script.py"], "address of node 0 with --rendezvous"),
    (["--standalone", "script.py"], "Remove it"),
    (["-n", "2", "-m", "script.py"], "remove -m for a path. Received: script.py"),
    (["-n", "2"], "See `tfdp run --help`."),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_INPUT)
def test_bad_input_gets_one_sentence_and_code_2_at_once(launcher, arguments, words):
    launcher.script("pathlib.Path('started').touch()")
    start = time.monotonic()
    result = launcher.run(*arguments, stderr=subprocess.PIPE)
    assert time.monotonic() - start < 10
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("tfdp: error: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr
    assert not (launcher.folder / "started").exists()


NO_SCRIPTS = {
    "a b.ipynb": (
        b'{"cells": []}',
        "--to script 'a b.ipynb'`, or train in the notebook",
    ),
    "job.sh": (b'#!/bin/sh\npython x.py "$@"\n', 'in line 2, `python x.py "$@"`. '),
    "binary": (b"\x7fELF\0\0\0\1" * 9, "null bytes. Received: binary"),
    "latin.py": (b"print('\xff')", "'utf-8' codec can't decode byte 0xff"),
    "wrong.py": (b"import os\ndef f(:\n    pass\n", "in line 2, `def f(:`. "),
}


@pytest.mark.parametrize("name", NO_SCRIPTS)
def test_a_file_that_is_no_script_is_told_before_any_worker_starts(
    tmp_path, monkeypatch, name
):
    content, words = NO_SCRIPTS[name]
    monkeypatch.chdir(tmp_path)
    pathlib.Path(name).write_bytes(content)
    with pytest.raises(click.UsageError) as error:
        check_program(name, is_module=False)
    assert words in error.value.message
    assert error.value.message.endswith(f". Received: {name}")
    assert "\n" not in error.value.message


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.py", b""),
        ("no suffix", b"print(1)"),
        ("warns.py", b'print("\\d")'),
        ("latin.py", b"# coding: latin-1\nprint('\xff')"),
        ("bytes.pyc", b"\0\0"),
    ],
)
def test_what_python_can_run_is_let_through(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    check_program(str(tmp_path / name), is_module=False)
    archive = tmp_path / f"{name}z"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("__main__.py", content)
    check_program(str(archive), is_module=False)
    check_program("/dev/stdin", is_module=False)  # nothing is taken from a pipe


def test_a_script_in_the_place_of_a_command_is_told_how_to_run_it(capsys):
    with pytest.raises(SystemExit) as stopped:
        main.main(["train.py", "--epochs", "3"])
    assert stopped.value.code == 2
    assert "by `tfdp run -n 2 train.py`" in capsys.readouterr().err


# Processes of `spawn` import the script again, and so need the guard.
SPAWNS = """
import multiprocessing
def work(queue):
    queue.put(__name__)
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    print("child", queue.get())
    process.join()
"""


def test_a_script_may_have_any_name_no_guard_and_start_processes(launcher):
    launcher.script("print('plain', __name__)", "my scrípt ü.py")
    result = launcher.run("-n", "2", "my scrípt ü.py")
    assert lines_of(result.stdout, 1) == ["plain __main__"]
    launcher.script(SPAWNS)
    result = launcher.run("-n", "2", "script.py")
    assert result.returncode == 0
    assert lines_of(result.stdout, 0) == lines_of(result.stdout, 1)
    assert lines_of(result.stdout, 0) == ["child __mp_main__"]


def test_a_default_log_folder_that_cannot_be_made_gets_one_sentence(launcher):
    launcher.script("")
    (launcher.folder / "tfdp-logs").write_text("a file", "utf-8")
    result = launcher.run("-n", "1", "script.py")
    assert result.returncode == 2
    assert "--log-dir" in result.stdout
    assert result.stdout.count("\n") == 1


def test_the_command_line_imports_no_tensorflow():
    code = "import sys, tfdp.launch.cli.main; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--version"], "tfdp "),
        (["--help"], "doctor"),
        ([], "doctor"),
        (["run", "--help"], "--log-dir"),
    ],
)
def test_python_m_tfdp_is_the_command(arguments, words):
    result = subprocess.run(
        [sys.executable, "-m", "tfdp", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert result.returncode == 0
    assert words in result.stdout


def test_ports_are_distinct_free_and_outside_the_kernels_own_range():
    ports = cluster_ports.free_ports(200)
    assert len(set(ports)) == 200
    assert min(ports) >= 10000
    assert max(ports) < cluster_ports._first_ephemeral_port()


@pytest.mark.parametrize(
    ("files", "processes", "most", "reason"),
    [
        (10**6, -1, 128, "64 for each of its 2 CPU cores"),
        (256, -1, 16, r"of open files, 256 \(ulimit -n\): each of 17 needs 260"),
        (-1, 1600, 10, r"limit of threads, 1600 \(ulimit -u\): each needs 160"),
        (-1, -1, 128, "CPU cores"),
    ],
)
def test_more_workers_than_the_machine_can_hold_are_refused(
    monkeypatch, files, processes, most, reason
):
    limits = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_NPROC: processes}
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limits[what], -1))
    monkeypatch.setattr(launch, "num_cores", lambda: 2)
    monkeypatch.setattr(launch, "visible_gpus", list)
    monkeypatch.setattr(launch, "needed_threads", lambda: 160)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    launch.check_num_workers(most)
    with pytest.raises(ValueError, match=f"holds {most}, .*{reason}"):
        launch.check_num_workers(most + 1)


def test_too_many_workers_for_the_ports_are_refused(monkeypatch):
    monkeypatch.setattr(cluster_ports, "_first_ephemeral_port", lambda: 10010)
    with pytest.raises(ValueError, match="-n 20"):
        cluster_ports.free_ports(20)


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
        (["-n", "2", "--grow-after", "5"], "all workers always run"),
        (["-n", "2", "--min-workers", "3"], "Received: --min-workers 3, -n 2"),
        (["-n", "2", "--min-workers", "0"], "at least 1. Received: 0"),
        (["-n", "2", "--max-restarts", "-1"], "not negative. Received: -1"),
    ],
)
def test_wrong_numbers_of_restarts_and_workers_are_named(launcher, arguments, text):
    launcher.script("")
    result = launcher.run(*arguments, "script.py")
    assert result.returncode == 2
    assert text in " ".join(result.stdout.split())
