"""Runs a command to its end or its deadline, and leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
# Before a command that is sent these: who runs the tests may ignore them, by nohup or
# in the background of a shell, and so would all that it starts.
HEEDING = (shutil.which("env") or "env", "--default-signal=HUP,INT")


@dataclass(frozen=True)
class Finished:
    """How a command ended.

    Args:
        code: Exit code.
        output: What it printed; with its errors, where those are not kept apart.
        errors: What it printed to stderr, or `""`.
    """

    code: int
    output: str
    errors: str = ""


def run_python(*args: str, deadline_seconds: float) -> Finished:
    """Runs this Python with `args` in the checkout, stdout and stderr together."""
    return run_command(sys.executable, *args, deadline_seconds=deadline_seconds)


def run_command(
    *args: str,
    deadline_seconds: float,
    folder: Path = ROOT,
    environment: Mapping[str, str] | None = None,
) -> Finished:
    """Runs a program in a folder, stdout and stderr together.

    Args:
        *args: The program and its arguments.
        deadline_seconds: After so long the test fails, and nothing is left running.
        folder: Working directory.
        environment: Variables beside those of this process.
    """
    inherited = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    process = subprocess.Popen(
        args,
        cwd=folder,
        env={**inherited, "TF_CPP_MIN_LOG_LEVEL": "2", **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=deadline_seconds)
    except subprocess.TimeoutExpired:
        _kill_tree(process.pid)
        output, _ = process.communicate()
        pytest.fail(f"{args} ran past {deadline_seconds} s:\n{output[-5000:]}")
    finally:
        _kill_tree(process.pid)
    return Finished(process.returncode, output)


def _kill_tree(pid: int) -> None:
    """Ends a process and all under it: some of TensorFlow's ignore SIGTERM."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [*root.children(recursive=True), root]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
