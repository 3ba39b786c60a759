"""Trains in processes that are killed, and starts them again."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.fork_server import begin, fork_server
from tests.harness.tf_config import cluster_configs

# What is left of a job once one of its workers was killed: a launcher ends it.
_AFTER_A_DEATH_SECONDS = 0.5


@dataclass(frozen=True)
class Layout:
    """Where replicas are.

    Args:
        num_workers: Int, processes.
        devices: Int, logical devices of each.
    """

    num_workers: int
    devices: int

    @property
    def name(self) -> str:
        """String, for the names of tests."""
        return f"{self.num_workers}x{self.devices}"


@dataclass(frozen=True)
class Result:
    """How the processes ended, and what the first one has written.

    Args:
        codes: Tuple of ints, exit codes, negative for signals.
        weights: Dict of arrays, or `None` if training did not end.
        history: Dict of lists.
        epochs: List of ints, the epochs in the history.
        output: String, what all have printed.
        answers: List of what each worker returned.
    """

    codes: tuple[int, ...]
    weights: dict[str, np.ndarray] | None
    history: dict[str, list]
    epochs: list[int]
    output: str
    answers: list[Any]


def run(
    layout: Layout,
    action: Callable[..., Any],
    folder: Path,
    arguments: Mapping[str, Any],
    deadline_seconds: float = 120.0,
) -> Result:
    """Runs an action on every worker, until all have ended or one was killed.

    Args:
        layout: `Layout`.
        action: Function of a module, called with `layout`, `rank` and `arguments`.
        folder: Path of a folder that is there.
        arguments: Keyword arguments.
        deadline_seconds: Float, after which the test fails.

    Returns:
        `Result`.
    """
    context = fork_server()
    configs: list[str | None] = [None]
    if layout.num_workers > 1:
        configs = list(cluster_configs(layout.num_workers, layout.devices))
    number = len(list(folder.glob("run-*")))
    own = folder / f"run-{number}"
    own.mkdir()
    processes = [
        context.Process(
            target=_serve,
            args=(action, layout, rank, config, own, dict(arguments)),
            daemon=True,
        )
        for rank, config in enumerate(configs)
    ]
    for process in processes:
        process.start()
    try:
        is_late = not _wait(processes, deadline_seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()
    output = "\n".join(path.read_text(errors="replace") for path in own.glob("*.log"))
    if is_late:
        pytest.fail(f"not done in {deadline_seconds} s:\n{output[-5000:]}")
    return _result(processes, own, output)


def _result(processes: list, own: Path, output: str) -> Result:
    codes = tuple(process.exitcode for process in processes)
    answers = [
        json.loads(path.read_text()) if path.exists() else None
        for path in (own / f"{rank}.json" for rank in range(len(processes)))
    ]
    weights = None
    if (own / "weights.npz").exists():
        weights = dict(np.load(own / "weights.npz"))
    first = answers[0] or {}
    return Result(
        codes,
        weights,
        first.get("history", {}),
        first.get("epochs", []),
        output,
        answers,
    )


def _wait(processes: list, seconds: float) -> bool:
    """Whether all have ended; a job of which one was killed is ended soon after."""
    end = time.monotonic() + seconds
    died = None
    while any(process.is_alive() for process in processes):
        now = time.monotonic()
        if any(process.exitcode == -signal.SIGKILL for process in processes):
            died = died or now
        if died and now - died > _AFTER_A_DEATH_SECONDS:
            return True
        if now > end:
            return False
        time.sleep(0.02)
    return True


def _serve(
    action: Callable[..., Any],
    layout: Layout,
    rank: int,
    config: str | None,
    own: Path,
    arguments: dict[str, Any],
) -> None:
    begin(own / f"{rank}.log", config)
    code = 0
    try:
        answer = action(layout, rank, **arguments)
    except SystemExit as error:
        code, answer = int(error.code or 0), {"error": "SystemExit"}
    except Exception as error:  # noqa: BLE001 the test looks at it
        traceback.print_exc()
        code, answer = 1, {"error": type(error).__name__, "text": str(error)}
    weights = answer.pop("weights", None)
    (own / f"{rank}.json").write_text(json.dumps(answer))
    if rank == 0 and weights is not None:
        np.savez(own / "weights.npz", **weights)
    sys.stdout.flush()
    sys.stderr.flush()
    # What a script would do at its end; a forked process would not.
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    os._exit(code)
