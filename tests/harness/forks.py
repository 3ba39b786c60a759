"""Worker processes that start at once, forked from one that has TensorFlow loaded.

Loading TensorFlow takes seconds, and a test of what goes wrong at start-up needs
many fresh processes. Python's own fork server loads it once, without creating
any device, and every process of a test is a fork of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.cluster import free_ports

ROOT = Path(__file__).resolve().parents[2]
# The first fork waits until the server has loaded TensorFlow.
LOADING_SECONDS = 120.0
WAITING_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Start:
    """What one process is to do.

    Args:
        action: Function of a module, called in the new process.
        tf_config: The text of `TF_CONFIG`, or `None` for none.
        arguments: Keyword arguments of `action`.
    """

    action: Callable[..., Any]
    tf_config: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What came of it: the value returned, or the error raised.

    Args:
        value: What the action returned.
        error: Name of the class of what it raised, or `""`.
        text: Message of what it raised.
        seconds: Time that the action took.
    """

    value: Any = None
    error: str = ""
    text: str = ""
    seconds: float = 0.0


def run(starts: Sequence[Start], deadline_seconds: float) -> list[Answer]:
    """Runs processes side by side and returns what each of them answered.

    Fails the test if one has not answered by the deadline, or died. Nothing is
    left running.
    """
    _load()
    with tempfile.TemporaryDirectory(prefix="forks-") as folder:
        return _run(starts, deadline_seconds, Path(folder))


def cluster_configs(
    num_workers: int, devices_per_worker: int | Sequence[int] | None = None
) -> list[str]:
    """The `TF_CONFIG` of each worker of a cluster on free ports."""
    addresses = [f"localhost:{port}" for port in free_ports(num_workers)]
    texts = []
    for rank in range(num_workers):
        config: dict[str, Any] = {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": rank},
        }
        if devices_per_worker is not None:
            listed = isinstance(devices_per_worker, Sequence)
            count = devices_per_worker[rank] if listed else devices_per_worker
            config["tfdp"] = {"devices_per_worker": count}
        texts.append(json.dumps(config))
    return texts


@functools.cache
def _load() -> None:
    """Starts the server, and waits until it has TensorFlow."""
    context = multiprocessing.get_context("forkserver")
    with _environment(
        TF_CPP_MIN_LOG_LEVEL="3",
        CUDA_VISIBLE_DEVICES="-1",
        KERAS_BACKEND="tensorflow",
        PYTHONPATH=str(ROOT),
    ):
        context.set_forkserver_preload(["tfdp.strategy.strategy"])
        first = context.Process(target=_nothing, daemon=True)
        first.start()
    first.join(LOADING_SECONDS)
    if first.exitcode != 0:
        first.kill()
        pytest.fail(f"The fork server did not start in {LOADING_SECONDS} s")


def _nothing() -> None:
    pass


def _run(starts: Sequence[Start], seconds: float, folder: Path) -> list[Answer]:
    context = multiprocessing.get_context("forkserver")
    processes, connections = [], []
    try:
        for index, start in enumerate(starts):
            parent, child = context.Pipe(duplex=False)
            log = folder / f"{index}.log"
            process = context.Process(
                target=_serve, args=(start, child, log), daemon=True
            )
            process.start()
            child.close()
            processes.append(process)
            connections.append(parent)
        return _collect(connections, seconds, folder)
    finally:
        for process in processes:
            _kill_tree(process)


def _collect(connections: Sequence[Any], seconds: float, folder: Path) -> list[Answer]:
    end = time.monotonic() + seconds
    answers = []
    for index, connection in enumerate(connections):
        fate = f"did not answer in {seconds} s"
        if connection.poll(max(0.0, end - time.monotonic())):
            with contextlib.suppress(EOFError):
                answers.append(connection.recv())
                continue
            fate = "died"
        output = (folder / f"{index}.log").read_text(errors="replace")
        pytest.fail(
            f"Process {index} {fate}. Before it: {answers}\n{output[-5000:]}",
            pytrace=False,
        )
    return answers


def _serve(start: Start, connection: Any, log: Path) -> None:
    """Runs an action and sends its answer; this is the new process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.pop("TF_CONFIG", None)
    if start.tf_config is not None:
        os.environ["TF_CONFIG"] = start.tf_config
    begin = time.monotonic()
    try:
        answer = Answer(start.action(**start.arguments))
    except Exception as error:  # noqa: BLE001 the test looks at it
        traceback.print_exc()
        seconds = time.monotonic() - begin
        answer = Answer(None, type(error).__name__, str(error), seconds)
    connection.send(answer)
    # The others may still need this one; the test kills all when it has heard them.
    while True:
        time.sleep(WAITING_SECONDS)


def _kill_tree(process: Any) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.join()


@contextlib.contextmanager
def _environment(**variables: str):
    """Sets variables of this process for as long as the server takes to start."""
    old = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
