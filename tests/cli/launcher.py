"""`tfdp run` started by tests, and the scripts that it runs."""

from __future__ import annotations

import collections.abc
import contextlib
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
import uuid

import psutil

from tests.harness.commands import HEEDING
from tests.harness.timing import wait_until

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


# A launcher that asks often whether workers train.
IMPATIENT = """
from tfdp.launch.cli import elastic
from tfdp.launch.cli.main import main
elastic._CHECK_SECONDS, elastic.SILENT_SECONDS = 0.5, 2.0
"""


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
        return self._popen(
            [*before, *HEEDING, sys.executable, "-m", "tfdp", "run", *arguments],
            **options,
        )

    def python(self, code: str) -> subprocess.Popen:
        """Run Python code, which calls the command itself."""
        return self._popen([sys.executable, "-c", code])

    def _popen(self, command: list[str], **options) -> subprocess.Popen:
        return subprocess.Popen(
            command,
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

    def run(
        self, *arguments: str, deadline_seconds: float = DEADLINE_SECONDS, **options
    ) -> subprocess.CompletedProcess:
        process = self.start(*arguments, **options)
        output, errors = process.communicate(timeout=deadline_seconds)
        return subprocess.CompletedProcess(
            process.args, process.returncode, output, errors
        )

    def signalled(
        self, signum: signal.Signals, num_workers: int = 2
    ) -> subprocess.CompletedProcess:
        """Runs script.py, and sends the launcher a signal when all workers are ready.

        Each worker says so by a file, `ready-RANK`.
        """
        process = self.start("-n", str(num_workers), "script.py")
        self.wait_for(*(f"ready-{rank}" for rank in range(num_workers)))
        process.send_signal(signum)
        output, _ = process.communicate(timeout=DEADLINE_SECONDS)
        return subprocess.CompletedProcess(process.args, process.returncode, output)

    def wait_for(self, *names: str) -> None:
        wait_until(
            lambda: all((self.folder / name).exists() for name in names),
            f"all files of {names}",
            DEADLINE_SECONDS,
        )

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
        left: list[psutil.Process] = []

        def is_so() -> bool:
            left[:] = self.processes()
            return not left

        # No command line here: to ask a process that just ended raises.
        wait_until(is_so, lambda: f"the end of {left}", within_seconds)

    def close(self) -> None:
        while left := self.processes():
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)


def lines_of(output: str, rank: int) -> list[str]:
    prefix = f"[worker {rank}] "
    return [line[len(prefix) :] for line in output.splitlines() if prefix in line]


def logs_of(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob("tfdp-logs/*/worker-*.log"))


def read_terminal(fd: int, until: bytes) -> bytes:
    """Reads what appears on a terminal until it matches the pattern."""
    data = b""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not re.search(until, data, re.DOTALL):
        assert time.monotonic() < deadline, data
        if select.select([fd], [], [], 0.1)[0]:
            data += os.read(fd, 4096)
    return data


END_SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
