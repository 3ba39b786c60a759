"""A worker of a job: trains, evaluates and saves, and meets its fault."""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
from typing import Any

from tests.faults import leftovers, pieces
from tests.faults.faulty import Saves, Trigger
from tests.faults.plan import STEPS_PER_EPOCH, JobPlan, Setting

BATCH = 16
# Odd, so that backups fall into epochs and onto their ends.
SAVE_FREQ = 7
_PR_SET_PDEATHSIG = 1


def run(plan: JobPlan, rank: int, setting: Setting) -> None:
    """The body of a worker process.

    Args:
        plan: `JobPlan`.
        rank: Int.
        setting: `Setting`.
    """
    _settle(rank, setting)
    note = functools.partial(_note, setting.notes, rank)
    scripts = {"by hand": _train_by_hand, "calls": _call}
    train = scripts.get(plan.script, _train)
    try:
        note("finished", train(plan, rank, setting, note))
    except BaseException as caught:
        note("error", f"{type(caught).__name__}: {caught}")
        if isinstance(caught, Exception):
            # Called for a script, but not for a process that was forked.
            sys.excepthook(type(caught), caught, caught.__traceback__)
        raise
    finally:
        # At the end of a script, but not of a process that was forked.
        atexit._run_exitfuncs()
        note("left", leftovers.of_this_process())


def _settle(rank: int, setting: Setting) -> None:
    """Makes this process one of its own: what it leaves behind can be found."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    log = os.open(f"{setting.notes}/{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for path, kind in setting.namespaces[rank]:
        with open(path) as file:
            if libc.setns(file.fileno(), kind):
                raise OSError(ctypes.get_errno(), f"setns {path}")
    os.environ["TMPDIR"] = f"{setting.notes}/{rank}.tmp"
    tempfile.tempdir = None
    sys.dont_write_bytecode = True  # of what AutoGraph generates, beside it
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": list(setting.addresses)},
            "task": {"type": "worker", "index": rank},
        }
    )


def _note(folder: str, rank: int, event: str, text: str = "") -> None:
    """Appends a line that the parent reads."""
    line = json.dumps([time.time(), event, text])
    with open(f"{folder}/{rank}.events", "a") as file:
        file.write(line + "\n")


def _train(plan: JobPlan, rank: int, setting: Setting, note: Any) -> str:
    import keras
    import numpy as np

    import tfdp

    trigger = Trigger(plan, rank, setting, note)
    saves = Saves(trigger, note, setting.state)
    saves.install()
    if plan.fault is not None and plan.fault.phase == "collective":
        pieces.install(trigger)
    trigger.reach("start")
    options = tfdp.CommunicationOptions(timeout_seconds=plan.timeout_seconds)
    strategy = tfdp.MultiWorkerMirroredStrategy(communication=options)
    trigger.reach("made")
    keras.utils.set_random_seed(1)
    num_rows = BATCH * STEPS_PER_EPOCH
    x = np.random.default_rng(0).normal(size=(num_rows, 8)).astype("float32")
    y = x.sum(axis=1, keepdims=True)

    class Traced(keras.layers.Layer):
        def call(self, inputs, training=False):
            if training:
                trigger.reach("tracing")
            return inputs

    with strategy.scope():
        layers = [keras.layers.Dense(16, "relu"), Traced(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile(keras.optimizers.Adam(0.01), "mse")
    trigger.reach("compiled")

    class Between(keras.callbacks.Callback):
        def on_test_batch_begin(self, batch, logs=None):
            trigger.reach("between")

    class Steps(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            trigger.reach("begin")

        def on_train_batch_begin(self, batch, logs=None):
            trigger.reach("training")

        def on_test_batch_begin(self, batch, logs=None):
            trigger.reach("evaluation")

        def on_epoch_end(self, epoch, logs=None):
            trigger.reach("callback")
            saves.save(self.model)

    few = {"x": x[: 4 * BATCH], "y": y[: 4 * BATCH]}
    if plan.script == "evaluate and fit":
        model.evaluate(**few, batch_size=BATCH, verbose=0, callbacks=[Between()])
    backup = tfdp.callbacks.BackupAndRestore(f"{setting.state}/backup", SAVE_FREQ)
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=plan.epochs,
        verbose=0,
        validation_data=tuple(few.values()),
        callbacks=[Steps(), backup],
    )
    return json.dumps({"history": history.history, "hash": _hash_of(model)})


def _train_by_hand(plan: JobPlan, rank: int, setting: Setting, note: Any) -> str:
    import tensorflow as tf

    import tfdp

    trigger = Trigger(plan, rank, setting, note)
    options = tfdp.CommunicationOptions(timeout_seconds=plan.timeout_seconds)
    strategy = tfdp.MultiWorkerMirroredStrategy(communication=options)
    with strategy.scope():
        total = tf.Variable(0.0)

    def add() -> None:
        context = tf.distribute.get_replica_context()
        total.assign_add(context.all_reduce("sum", tf.ones([])))

    @tf.function
    def step() -> None:
        strategy.run(add)

    for _ in range(plan.epochs * STEPS_PER_EPOCH):
        trigger.reach("training")
        step()
    return json.dumps({"total": float(total.numpy())})


def _call(plan: JobPlan, rank: int, setting: Setting, note: Any) -> str:
    import tfdp
    from tests.faults.calls import Caller

    options = tfdp.CommunicationOptions(timeout_seconds=plan.timeout_seconds)
    strategy = tfdp.MultiWorkerMirroredStrategy(communication=options)
    caller = Caller(strategy, setting.state)
    caller.trace(plan.calls[rank])
    note("fault", plan.calls[rank])
    caller.call(plan.calls[rank])
    return json.dumps({"called": plan.calls[rank]})


def _hash_of(model: Any) -> str:
    """Of the bits of the weights and of the optimizer's state."""
    found = hashlib.sha256()
    for variable in [*model.weights, *model.optimizer.variables]:
        found.update(variable.numpy().tobytes())
    return found.hexdigest()
