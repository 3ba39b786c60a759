"""The one process that has TensorFlow loaded, of which workers of tests are forks.

Loading TensorFlow takes seconds, and a test of what goes wrong needs many fresh
processes. Python's own fork server loads it once, without creating any device.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import multiprocessing.context
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import iterators
from tests.harness.registry import MODULES, ROOT

PRELOADED = [
    *("tfdp.callbacks", "tfdp.checkpoint", "tfdp.training.strategy.strategy"),
    *(f"tests.{module}" for module in MODULES),
]
# The first fork waits until the server has loaded TensorFlow.
LOADING_SECONDS = 120.0
_PR_SET_PDEATHSIG = 1
# Each set-up asks from a thread of its own.
_starting = threading.Lock()


def fork_server() -> multiprocessing.context.ForkServerContext:
    """Starts the server, unless it runs, and waits until it has TensorFlow."""
    with _starting:
        return _start()


@functools.cache
def _start() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    with _environment(
        TF_CPP_MIN_LOG_LEVEL="2",
        CUDA_VISIBLE_DEVICES="-1",
        KERAS_BACKEND="tensorflow",
        PYTHONPATH=str(ROOT),
    ):
        context.set_forkserver_preload(PRELOADED)
        first = context.Process(target=_nothing, daemon=True)
        first.start()
    first.join(LOADING_SECONDS)
    if first.exitcode != 0:
        first.kill()
        pytest.fail(f"The fork server did not start in {LOADING_SECONDS} s")
    return context


def begin(log: Path, tf_config: str | None) -> None:
    """Makes a fork a worker: it ends with the server and writes to a file.

    Args:
        log: Path of the file for stdout and stderr.
        tf_config: The text of `TF_CONFIG`, or `None` for none.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.pop("TF_CONFIG", None)
    if tf_config is not None:
        os.environ["TF_CONFIG"] = tf_config
    iterators.delete_in_background()


def _nothing() -> None:
    pass


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
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
