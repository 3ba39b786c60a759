"""A signal to `mpiexec` ends the whole job, and nothing of it is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.commands import HEEDING, ROOT
from tests.harness.mpi import ENVIRONMENT, is_open_mpi, needs_mpi, options
from tests.harness.tiers import full
from tests.harness.timing import wait_until
from tfdp.communication.coordination.preemption import PREEMPTED

pytestmark = [needs_mpi, pytest.mark.processes]

NUM_RANKS, DEADLINE_SECONDS = 2, 60.0

# Trains until it is told to stop, with a line of JSON from each rank after a step.
TRAIN = r"""
import json, os, pathlib, re, sys
import keras, numpy as np
import tfdp

class Tell(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2 and not hasattr(self, "has_told"):
            self.has_told = True
            maps = pathlib.Path("/proc/self/maps").read_text()
            memory = re.findall(r"/dev/shm/mpich_shm_\w+", maps)
            answer = {"pid": os.getpid(), "memory": memory}
            os.write(1, (json.dumps(answer) + "\n").encode())

strategy = tfdp.auto_strategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
x = np.ones((8, 2), "float32")
backup = tfdp.callbacks.BackupAndRestore(sys.argv[1], save_freq=10**9)
options = {"batch_size": 2, "epochs": 10**6, "verbose": 0}
model.fit(x, x[:, :1], callbacks=[backup, Tell()], **options)
"""


@contextlib.contextmanager
def job(*command: str) -> Iterator[tuple[subprocess.Popen, list[dict[str, Any]]]]:
    """The launcher of a job whose ranks have all answered, and the answers."""
    process = subprocess.Popen(
        [*HEEDING, *options(NUM_RANKS), sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    answers: list[dict[str, Any]] = []
    killer = _Killer(process, answers)
    try:
        assert process.stdout is not None
        while len(answers) < NUM_RANKS and (line := process.stdout.readline()):
            if line.startswith("{"):
                answers.append(json.loads(line))
        yield process, answers
    finally:
        killer.end()
        process.communicate()


class _Killer:
    """Kills a job that is still there after a deadline, or when it is to end."""

    def __init__(self, process: subprocess.Popen, answers: list) -> None:
        self._process, self._answers = process, answers
        self._timer = threading.Timer(DEADLINE_SECONDS, self._kill)
        self._timer.start()

    def end(self) -> None:
        self._timer.cancel()
        self._kill()

    def _kill(self) -> None:
        pids = [answer["pid"] for answer in self._answers if answer["pid"]]
        for pid in [self._process.pid, *pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def has_ended(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def check_nothing_is_left(answers: list[dict[str, Any]]) -> None:
    assert len(answers) == NUM_RANKS
    pids = [answer["pid"] for answer in answers]
    wait_until(lambda: all(map(has_ended, pids)), "the end of all ranks", 10.0)
    for answer in answers:
        answer["pid"] = 0  # of nobody, or of another process
    memory = {name for answer in answers for name in answer["memory"]}
    assert len(memory) == (0 if is_open_mpi() else 1)
    assert not any(os.path.exists(name) for name in memory)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGHUP,
        full(signal.SIGTERM),
        full(signal.SIGINT),
        full(signal.SIGKILL),
    ],
    ids=lambda number: number.name,
)
def test_a_signal_to_the_launcher_ends_all_ranks_with_an_error(number):
    with job("-m", "tests.cluster.mpi_agreement", "waits") as (launcher, answers):
        launcher.send_signal(number)
        assert launcher.wait(20.0) != 0
        check_nothing_is_left(answers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [
        full(signal.SIGTERM, PREEMPTED),
        full(signal.SIGINT, None),
        full(signal.SIGHUP, None),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_signal_to_the_launcher_ends_a_training(number, code, tmp_path):
    """SIGTERM, which the launcher passes on, is a preemption: all ranks save."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with job(str(script), str(tmp_path / "backups")) as (launcher, answers):
        launcher.send_signal(number)
        found = launcher.wait(30.0)
        assert found != 0
        check_nothing_is_left(answers)
    if code is not None and not is_open_mpi():
        assert found == code
        (backup,) = Path(tmp_path, "backups").iterdir()
        assert (backup / "index.json").exists()
    else:
        assert not list(Path(tmp_path, "backups").iterdir())
