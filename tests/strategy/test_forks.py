"""Processes that a user forks of a worker: they end, and disturb nobody."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import subprocess
import textwrap
import threading
from collections.abc import Callable

import pytest

from tests.harness import forks
from tests.harness.commands import run_python
from tests.harness.forks import Start
from tests.harness.tf_config import cluster_configs
from tests.harness.timing import wait_until

pytestmark = pytest.mark.processes

DEADLINE_SECONDS = 120.0
# Less than the shortest wait of what once waited in a forked process.
CHILD_SECONDS = 8.0


def _end_of_script(code: int) -> None:
    """What Python does at the end of a script, but not of a process of the harness."""
    gc.collect()
    threading._shutdown()
    atexit._run_exitfuncs()
    os._exit(code)


def _code_of(pid: int) -> int | str:
    try:
        _, status = wait_until(
            lambda: (ended := os.waitpid(pid, os.WNOHANG))[0] and ended,
            f"the end of process {pid}",
            CHILD_SECONDS,
        )
    except TimeoutError:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        return "hangs"
    return os.waitstatus_to_exitcode(status)


class Forked(Exception):
    """Ends `fit` in a process that a callback has forked."""


def fit_and_fork(num_local: int) -> dict:
    """Forks in a callback, in a data source and after training; tells how they end."""
    import keras
    import numpy as np

    import tfdp

    tfdp.testing.logical_cpus(num_local)
    strategy = tfdp.auto_strategy()
    codes: dict = {}
    x = np.arange(64, dtype=np.float32).reshape(32, 2)

    def fork_in_callback(batch: int, logs: dict | None = None) -> None:
        if batch == 1:
            pid = os.fork()
            if pid == 0:
                raise Forked
            codes["in a callback"] = _code_of(pid)
            # Runs in a fork, too, before it becomes another program.
            done = subprocess.run(["true"], preexec_fn=os.setsid, check=False)
            codes["another program"] = done.returncode

    def rows():
        for index in range(4):
            if index == 2:
                pid = os.fork()
                if pid == 0:
                    _end_of_script(6)
                codes["in a data source"] = _code_of(pid)
            yield x[8 * index : 8 * index + 8], x[8 * index : 8 * index + 8, :1]

    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=fork_in_callback)
    try:
        model.fit(rows(), verbose=0, callbacks=[callback])
    except Forked as error:
        error.__traceback__ = None
        _end_of_script(3)
    pid = os.fork()
    if pid == 0:
        _end_of_script(4)
    codes["after training"] = _code_of(pid)
    codes["that trains"], texts = _calls_in_a_fork(
        lambda: model.fit(x, x[:, :1], verbose=0),
        lambda: model.train_on_batch(x, x[:, :1]),
        strategy.scope,
        tfdp.MirroredStrategy,
    )
    model.fit(x, x[:, :1], batch_size=8, verbose=0)  # all are as they were
    rank = strategy.extended.worker_group.rank
    weights = model.get_weights()[0].tolist()
    return {"rank": rank, "codes": codes, "texts": texts, "weights": weights}


def _calls_in_a_fork(*calls: Callable[[], object]) -> tuple[int | str, list[str]]:
    """Returns how a process ends that makes calls, and what these raise there."""
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        for call in calls:
            try:
                sender.send(f"no error, but {call()}")
            except RuntimeError as error:
                sender.send(str(error))
        _end_of_script(5)
    code = _code_of(pid)
    texts = []
    while receiver.poll(0):
        texts.append(receiver.recv())
    return code, texts


def check(found: dict) -> None:
    assert found["codes"] == {
        "in a callback": 3,
        "another program": 0,
        "in a data source": 6,
        "after training": 4,
        "that trains": 5,
    }
    calls = ("`fit`", "`train_on_batch`", "`strategy.scope`", "A strategy")
    for call, text in zip(calls, found["texts"], strict=True):
        assert text.startswith(f"{call} was called in process ")
        assert "which was forked from process " in text


@pytest.mark.full
def test_what_two_workers_fork_ends_and_the_workers_go_on():
    starts = [
        Start(fit_and_fork, config, {"num_local": 1}) for config in cluster_configs(2)
    ]
    answers = forks.run(starts, DEADLINE_SECONDS)
    assert not any(answer.error for answer in answers), answers
    found = [answer.value for answer in answers]
    assert [each["rank"] for each in found] == [0, 1]
    for each in found:
        check(each)
    assert found[0]["weights"] == found[1]["weights"]


@pytest.mark.full
def test_what_a_process_of_two_devices_forks_ends():
    start = Start(fit_and_fork, None, {"num_local": 2})
    (answer,) = forks.run([start], DEADLINE_SECONDS)
    assert not answer.error, answer
    check(answer.value)


@pytest.mark.full
def test_a_script_that_forks_as_users_do_comes_to_its_end():
    code = """
        import os, sys
        import keras, numpy as np, tensorflow as tf
        import tfdp

        tfdp.testing.logical_cpus(2)
        strategy = tfdp.MirroredStrategy()
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")

        def fork(epoch=0, logs=None):
            if os.fork() == 0:
                sys.exit(0)
            print("code", os.wait()[1], flush=True)

        calls = keras.callbacks.LambdaCallback(on_epoch_begin=fork)
        model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0, callbacks=[calls])
        fork()
    """
    done = run_python("-c", textwrap.dedent(code), deadline_seconds=60.0)
    codes = [line for line in done.output.splitlines() if line.startswith("code")]
    assert (done.code, codes) == (0, ["code 0", "code 0"]), done.output
