"""A worker of a job: trains, evaluates and saves, and meets its fault."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator

from faults.plan import Fault, JobPlan

BATCH, STEPS, BUSY_SECONDS = 16, 10, 30.0


def run(plan: JobPlan, rank: int, ports: list[int], folder: str) -> None:
    """The body of a worker process.

    Args:
        plan: `JobPlan`.
        rank: Int.
        ports: List of int, by rank.
        folder: String, shared by the workers of the job.
    """
    log = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": [f"127.0.0.1:{port}" for port in ports]},
            "task": {"type": "worker", "index": rank},
        }
    )
    error = ""
    try:
        result = _train(plan, rank, folder)
        note(folder, rank, "finished", result)
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
        note(folder, rank, "error", error)
        raise
    finally:
        # At the end of a script, but not of a process that was forked.
        atexit._run_exitfuncs()


def note(folder: str, rank: int, event: str, text: str = "") -> None:
    """Appends a line that the parent reads."""
    line = json.dumps([time.time(), event, text])
    with open(f"{folder}/{rank}.events", "a") as file:
        file.write(line + "\n")


class Trigger:
    """Lets the fault of a plan happen on its worker."""

    def __init__(self, plan: JobPlan, rank: int, folder: str) -> None:
        self._plan = plan
        self._rank = rank
        self._folder = folder
        self._counts: dict[str, int] = {}

    def reach(self, phase: str) -> None:
        """Called where something may happen; counts."""
        count = self._counts[phase] = self._counts.get(phase, 0) + 1
        fault = self._plan.fault
        if fault is None or fault.phase != phase or fault.step != count:
            return
        if fault.rank == self._rank:
            note(self._folder, self._rank, "fault", fault.kind)
            _let_happen(fault)
        elif self._rank == self._plan.busy_rank:
            time.sleep(BUSY_SECONDS)


def _let_happen(fault: Fault) -> None:
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault.kind == "raise":
        raise ArithmeticError("the script's own error")
    if fault.kind == "exit":
        sys.exit(7)
    time.sleep(fault.seconds)


def _train(plan: JobPlan, rank: int, folder: str) -> str:
    import keras
    import numpy as np

    import tfdp

    trigger = Trigger(plan, rank, folder)
    trigger.reach("start")
    options = tfdp.CommunicationOptions(timeout_seconds=plan.timeout_seconds)
    strategy = tfdp.MultiWorkerMirroredStrategy(communication=options)
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(BATCH * STEPS, 8)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    with strategy.scope():
        layers = [keras.layers.Dense(16, "relu"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile(keras.optimizers.Adam(0.01), "mse")

    class Steps(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            trigger.reach("training")

        def on_test_batch_begin(self, batch, logs=None):
            trigger.reach("evaluation")

        def on_epoch_end(self, epoch, logs=None):
            trigger.reach("callback")
            with _trigger_while_saving(trigger):
                tfdp.checkpoint.save(self.model, f"{folder}/checkpoint")
            note(folder, rank, "saved", str(epoch))

    note(folder, rank, "started")
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=plan.epochs,
        verbose=0,
        validation_data=(x[: 4 * BATCH], y[: 4 * BATCH]),
        callbacks=[Steps()],
    )
    return json.dumps(history.history["loss"])


@contextlib.contextmanager
def _trigger_while_saving(trigger: Trigger) -> Iterator[None]:
    """The fault happens between the files and their index."""
    from tfdp import checkpoint_writing as writing

    original = writing.write_own

    def write_own(*args, **kwargs):
        result = original(*args, **kwargs)
        trigger.reach("saving")
        return result

    writing.write_own = write_own
    try:
        yield
    finally:
        writing.write_own = original
