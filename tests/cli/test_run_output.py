"""`tfdp run`: output of workers on terminals, pipes and files."""

from __future__ import annotations

import collections.abc
import errno
import fcntl
import functools
import os
import pathlib
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
import types

import pytest

from tests.cli.launcher import (
    DEADLINE_SECONDS,
    END_SIGNALS,
    STOPS_WITHIN_SECONDS,
    lines_of,
    logs_of,
    read_terminal,
)
from tests.harness.tiers import full
from tests.harness.timing import wait_until
from tfdp.launch.cli import nonblocking_stream, worker
from tfdp.launch.cli.lines import LineReader
from tfdp.launch.cli.noise import is_noise
from tfdp.launch.cli.nonblocking_stream import NonBlockingStream
from tfdp.launch.cli.screen import Screen
from tfdp.launch.cli.start import Starter
from tfdp.launch.cli.worker import LogFile

pytestmark = pytest.mark.processes


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


@pytest.mark.full
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


@pytest.mark.full
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
    while not process.output.unfinished:
        process.read()
    assert process.snapshot() is None
    now[0] += worker._SNAPSHOT_SECONDS
    assert process.snapshot() == "half"
    assert process.snapshot() is None
    process.send(signal.SIGKILL)
    process.close()
    log.close()


TALKS = """
pathlib.Path("ready").touch()
for _ in range(30_000):
    print("x" * 80)
time.sleep(600)
"""
# In the logs when the launcher reads no more: a line of 80 bytes has 12 more in the
# output, and they fill its pipe and what the launcher keeps beside that.
FULL_BYTES = (nonblocking_stream._MAX_BYTES + 65_536) * 80 // 92


def num_bytes_of(launcher) -> int:
    """What the logs of all workers have together."""
    return sum(path.stat().st_size for path in logs_of(launcher.folder))


@pytest.mark.parametrize(
    ("signum", "code"), [*(full(*end) for end in END_SIGNALS), (None, 124)]
)
def test_a_job_whose_output_nobody_reads_can_be_ended(launcher, signum, code):
    launcher.script(TALKS)
    timeout = ["--timeout", "600" if signum else "2"]
    process = launcher.start("-n", "2", "--grace", "0.5", *timeout, "script.py")
    launcher.wait_for("ready")
    wait_until(
        lambda: num_bytes_of(launcher) > FULL_BYTES, "a launcher that reads no more"
    )
    if signum:
        process.send_signal(signum)
    assert process.wait(STOPS_WITHIN_SECONDS) == code
    launcher.assert_nothing_is_left()
    process.stdout.close()


def is_whole(log: pathlib.Path) -> bool:
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - 1000, 0))
        return b"19999 x" in file.read()


def test_a_job_whose_output_nobody_reads_goes_on(launcher):
    launcher.script("for n in range(20_000): print(n, 'x' * 200)")
    process = launcher.start("-n", "1", "--timeout", "15", "script.py")
    wait_until(lambda: any(map(is_whole, logs_of(launcher.folder))), "all in the log")
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0
    assert re.search(r"output was not read in time; [\d,]+ lines are only in", output)


def test_what_a_reader_leaves_in_the_pipe_is_counted_and_a_slow_one_gets_all(
    monkeypatch,
):
    monkeypatch.setattr(nonblocking_stream, "_MAX_BYTES", 10_000)
    reader, writer = os.pipe()
    with open(reader, encoding="utf-8") as text, open(writer, "w") as stream:
        out = NonBlockingStream(stream)
        for _ in range(3000):  # more than a pipe holds
            out.write("x" * 49 + "\n")
        assert out.is_behind
        monkeypatch.setattr(nonblocking_stream, "_STALLED_SECONDS", 0.1)
        wait_until(lambda: not out.is_behind, "a stall", DEADLINE_SECONDS)
        out.write("dropped\n" * 7)
        assert not out.drain(0.0)
        lines = [text.readline() for _ in range(3001)]
        assert out.drain(DEADLINE_SECONDS)
    assert lines[:3000] == ["x" * 49 + "\n"] * 3000
    assert "7 lines are only in the logs" in lines[-1]


class Wanted(threading.Condition):
    """Notes that a thread comes for its lock, before that thread waits."""

    def __init__(self) -> None:
        super().__init__()
        self.is_wanted = threading.Event()

    def __enter__(self) -> bool:
        self.is_wanted.set()
        return super().__enter__()


def test_nobody_waits_for_what_is_written_while_the_output_fails(monkeypatch):
    monkeypatch.setattr(NonBlockingStream, "_serve", lambda self, fd: None)
    with open(os.devnull, "w") as stream:
        out = NonBlockingStream(stream)
        out._changed = changed = Wanted()
        with changed:  # as the thread has it that finds the error
            changed.is_wanted.clear()
            late = threading.Thread(target=out.write, args=("late\n",))
            late.start()
            assert changed.is_wanted.wait(DEADLINE_SECONDS)
            out.error = OSError(errno.ENOSPC, "No space left on device")
        late.join(DEADLINE_SECONDS)
        assert out.drain(0.0)


@pytest.mark.full
@pytest.mark.parametrize("closed", [1, full(2)])
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


@pytest.mark.full
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
