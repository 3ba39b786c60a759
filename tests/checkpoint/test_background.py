"""Saves in the background: what they promise, and that no failure is silent."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.checkpoint import interrupted_fit
from tests.checkpoint.test_backup_files import PLAIN, names
from tests.data.test_position import (
    EPOCHS,
    STEPS,
    Cut,
    PowerCut,
    arrays,
    assert_same,
    build,
    fit,
)
from tests.harness.interrupted import Layout, run
from tests.harness.timing import wait_until
from tfdp.callbacks import BackupAndRestore
from tfdp.checkpoint import background, copies, files, writer
from tfdp.checkpoint.backups import Backups
from tfdp.checkpoint.index_file import load_index
from tfdp.checkpoint.training_state import checkpoint_tensors
from tfdp.communication.coordination.model_group import worker_group_of
from tfdp.communication.coordination.preemption import PREEMPTED
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.ground._compat import tf_distribute
from tfdp.ground.plans.shards import Segment
from tfdp.training.keras_hooks import install
from tfdp.training.sharding.optimizer_state import _FlatBuffer, _range_shard

pytestmark = pytest.mark.slow

NUM_STEPS = EPOCHS * STEPS
FULL_DISK = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def model_of(value: float) -> keras.Model:
    """A compiled model, all of whose weights have a value."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    set_all(model, value)
    return model


def set_all(model: keras.Model, value: float) -> None:
    model.set_weights([np.full_like(weight, value) for weight in model.get_weights()])


def complete(folder: Path) -> list[str]:
    """The backups that have an index, by their steps."""
    found = [path.parent.name for path in folder.glob("step-*/index.json")]
    return sorted(found, key=lambda name: int(name.removeprefix("step-")))


class Gate:
    """Writing of shards that stops at a gate; counts how many have begun."""

    def __init__(self) -> None:
        self.begun, self.threads = 0, set()
        self.is_open = threading.Event()
        self.fails, self.fails_from = False, 1000

    def __call__(self, *arguments: Any) -> Any:
        self.begun += 1
        self.threads.add(threading.current_thread().name)
        assert self.is_open.wait(30.0)
        if self.fails or self.begun >= self.fails_from:
            raise FULL_DISK
        return write_shards(*arguments)


write_shards = writer.write_shards


@pytest.fixture
def gate(monkeypatch) -> Iterator[Gate]:
    made = Gate()
    monkeypatch.setattr(writer, "write_shards", made)
    yield made
    made.is_open.set()


@pytest.fixture
def ctrl_c_raises() -> Iterator[None]:
    """A shell starts what it does not wait for with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_save_keeps_the_values_of_its_call_and_returns_before_they_are_written(
    gate, tmp_path
):
    model = model_of(1.0)
    pending = tfdp.checkpoint.save(model, tmp_path, background=True)
    set_all(model, 2.0)
    assert not pending.is_done
    gate.is_open.set()
    pending.wait()
    assert pending.is_done
    tfdp.checkpoint.restore(model, tmp_path)
    for weight in model.get_weights():
        np.testing.assert_array_equal(weight, np.ones_like(weight))
    assert gate.threads == {"tfdp-save"}


def test_a_save_leaves_training_the_processor_until_somebody_waits(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(files, "SHARD_BYTES", 64)  # several files
    monkeypatch.setattr(background, "_PROCESSOR_SHARE", 1e-6)
    model = model_of(1.0)
    pending = tfdp.checkpoint.save(model, tmp_path, background=True)
    wait_until(lambda: list(tmp_path.glob("data-*/worker-0-0.data")), "the first file")
    time.sleep(0.5)
    assert not pending.is_done
    assert not list(tmp_path.glob("data-*/worker-0-1.data"))
    pending.wait()
    monkeypatch.setattr(background, "_MAX_PAUSED_SECONDS", 0.2)
    pending = tfdp.checkpoint.save(model, tmp_path, background=True)
    wait_until(lambda: pending.is_done, "the end of the pauses")
    pending.wait()


def test_a_save_is_complete_before_the_next_of_equal_intervals(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SHARD_BYTES", 64)  # several files
    monkeypatch.setattr(background, "_PROCESSOR_SHARE", 1e-6)
    model = model_of(1.0)
    tfdp.checkpoint.save(model, tmp_path, background=True).wait()
    time.sleep(1.0)
    pending = tfdp.checkpoint.save(model, tmp_path, background=True)
    begin = time.monotonic()
    wait_until(lambda: pending.is_done, "the end of the pauses")
    assert 0.3 < time.monotonic() - begin < 5.0
    pending.wait()


def test_every_next_call_waits_for_the_save_under_way(gate, tmp_path):
    model = model_of(1.0)
    calls: list[Callable[[], Any]] = [
        lambda: tfdp.checkpoint.restore(model, tmp_path),
        lambda: tfdp.checkpoint.save(model, tmp_path),
        lambda: tfdp.checkpoint.save(model, tmp_path, background=True).wait(),
        lambda: model.fit(*ONE_BATCH, verbose=0, callbacks=[to(tmp_path / "backup")]),
    ]
    for call in calls:
        gate.is_open.clear()
        pending = tfdp.checkpoint.save(model, tmp_path, background=True)
        threading.Timer(0.3, gate.is_open.set).start()
        call()
        assert pending.is_done


ONE_BATCH = (np.ones((4, 3), "float32"), np.ones((4, 2), "float32"))


def to(folder: Path, **options: Any) -> BackupAndRestore:
    return BackupAndRestore(folder, 1, delete_at_end=False, **options)


def test_a_failure_is_raised_once_by_wait_or_else_by_the_next_save(gate, tmp_path):
    model = model_of(1.0)
    gate.is_open.set()
    tfdp.checkpoint.save(model, tmp_path)
    before = load_index(str(tmp_path)).token
    gate.fails = True
    pending = tfdp.checkpoint.save(model, tmp_path, background=True)
    for _ in range(2):
        with pytest.raises(OSError, match=r"No space left.*the previous contents"):
            pending.wait()
    tfdp.checkpoint.save(model, tmp_path, background=True)
    with pytest.raises(OSError, match="No space left"):
        tfdp.checkpoint.save(model, tmp_path, background=True)
    assert load_index(str(tmp_path)).token == before
    assert len(names(tmp_path)) == 2
    gate.fails = False
    tfdp.checkpoint.save(model, tmp_path, background=True).wait()
    assert load_index(str(tmp_path)).token != before


@pytest.mark.parametrize(("failing", "last"), [(5, 6), (NUM_STEPS, NUM_STEPS)])
def test_fit_raises_the_failure_of_a_save_at_the_next_one_or_at_its_end(
    failing, last, gate, tmp_path
):
    gate.is_open.set()
    gate.fails_from = failing
    watch = Cut()
    with pytest.raises(OSError, match="No space left"):
        fit(arrays(**PLAIN), watch, to(tmp_path))
    assert len(watch.seen) == last
    assert complete(tmp_path) == [f"step-{failing - k}" for k in (3, 2, 1)]
    gate.fails_from = 1000
    assert_same(fit(arrays(**PLAIN), to(tmp_path)), fit(arrays(**PLAIN)))


def test_fit_returns_when_the_last_backup_is_complete(gate, tmp_path):
    backup = to(tmp_path)
    threading.Timer(1.0, gate.is_open.set).start()
    fit(arrays(**PLAIN), backup)
    assert complete(tmp_path) == [f"step-{NUM_STEPS - k}" for k in (2, 1, 0)]


class CtrlC(Cut):
    """Is interrupted at the end of a step, as by Ctrl-C."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if len(self.seen) == self.step:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("cut", "raised"), [(Cut, PowerCut), (CtrlC, KeyboardInterrupt)]
)
def test_a_fit_that_raises_completes_the_save_under_way(
    cut, raised, gate, tmp_path, capfd, ctrl_c_raises
):
    def run() -> None:
        with pytest.raises(raised):
            fit(arrays(**PLAIN), BackupAndRestore(tmp_path, 1), cut(2))

    threading.Timer(0.5, gate.is_open.set).start()
    run()
    assert complete(tmp_path) == ["step-1"]
    gate.fails = True
    run()
    assert "tfdp: The checkpoint was not saved" in capfd.readouterr().err
    assert complete(tmp_path) == ["step-1"]


def test_backups_hold_what_a_callback_listed_later_does_to_the_weights(tmp_path):
    class SetWeights(keras.callbacks.Callback):
        step = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.step += 1
            set_all(self.model, self.step)

    backup = BackupAndRestore(tmp_path, 1, keep=STEPS, delete_at_end=False)
    fit(arrays(**PLAIN), backup, SetWeights(), epochs=1)
    model, steps = build(), range(1, STEPS + 1)
    for step in steps:
        tfdp.checkpoint.restore(model, tmp_path / f"step-{step}")
        for weight in model.get_weights():
            np.testing.assert_array_equal(weight, np.full_like(weight, step))
    assert complete(tmp_path) == [f"step-{step}" for step in steps]


def test_steps_go_on_while_a_backup_is_written(gate, tmp_path):
    """A save waits for the one before, and no other step waits for any."""
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            seen.append(gate.begun)
            if len(seen) == 4:
                wait_until(lambda: gate.begun == 1, "the first save")
                gate.is_open.set()

    fit(arrays(**PLAIN), Watch(), BackupAndRestore(tmp_path, 3))
    assert len(seen) == NUM_STEPS
    assert gate.begun == NUM_STEPS // 3


def test_the_memory_of_a_copy_is_used_again_and_free_after_fit(tmp_path, monkeypatch):
    copy, buffers = copies.copy_to_host, []

    def counted(state: Any, buffer: np.ndarray) -> Any:
        buffers.append(buffer)
        return copy(state, buffer)

    monkeypatch.setattr(background, "copy_to_host", counted)
    strategy = tfdp.MirroredStrategy(["/cpu:0"])
    with strategy.scope():
        model = model_of(1.0)
    model.fit(*ONE_BATCH, epochs=4, verbose=0, callbacks=[to(tmp_path)])
    assert len(buffers) == 4
    assert all(buffer is buffers[1] for buffer in buffers[1:])
    own = background.background_saves(strategy.extended.worker_group)
    assert own._buffer.size == 0


def test_the_old_memory_is_freed_before_a_larger_one_is_allocated(
    tmp_path, monkeypatch
):
    strategy = tfdp.MirroredStrategy(["/cpu:0"])
    with strategy.scope():
        model = model_of(1.0)
    own = background.background_saves(strategy.extended.worker_group)
    empty, sizes = np.empty, []

    def noted(size: Any, dtype: Any = float) -> np.ndarray:
        sizes.append((size, own._buffer.size))
        return empty(size, dtype)

    tfdp.checkpoint.save(model, tmp_path, background=True).wait()
    own._buffer = own._buffer[:64]
    with monkeypatch.context() as patch:
        patch.setattr(background.np, "empty", noted)
        tfdp.checkpoint.save(model, tmp_path, background=True).wait()
    grown = [old for size, old in sizes if size and size > 64]
    assert grown == [0]


def test_without_memory_for_a_copy_it_saves_in_the_foreground_and_says_so(
    gate, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(background, "free_bytes", lambda: 1000)
    gate.is_open.set()
    strategy = tfdp.MirroredStrategy(["/cpu:0"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(300)])
        model.compile("adam", "mse")
    with caplog.at_level(logging.WARNING, "tfdp"):
        for _ in range(2):
            assert tfdp.checkpoint.save(model, tmp_path, background=True).is_done
    assert caplog.text.count("training waits for each save: copies of the state") == 1
    assert gate.threads == {threading.main_thread().name}
    gate.fails = True
    with pytest.raises(OSError, match="No space left"):
        tfdp.checkpoint.save(model, tmp_path, background=True)


def test_memory_is_shared_by_the_workers_of_a_host(monkeypatch):
    """Two of three workers are on one host, and each alone would have enough."""

    needs = [("here", 300, 1000), ("here", 300, 900), ("there", 300, 700)]
    saves = background.BackgroundSaves(WorkerGroup(0, 1))
    assert not saves._has_memory(needs, False)
    monkeypatch.setattr(background, "MEMORY_SHARE", 0.7)
    assert saves._has_memory(needs, False)


def test_a_copy_that_fails_is_an_error_of_all(gate, tmp_path, monkeypatch):
    def fails(*arguments: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(background, "copy_to_host", fails)
    pending = tfdp.checkpoint.save(model_of(1.0), tmp_path, background=True)
    with pytest.raises(OSError, match="not saved: MemoryError: no room"):
        pending.wait()


def test_an_interrupted_wait_is_waited_for_again(gate, tmp_path, ctrl_c_raises):
    model = model_of(1.0)
    pending = tfdp.checkpoint.save(model, tmp_path, background=True)
    ctrl_c = [threading.main_thread().ident, signal.SIGINT]
    threading.Timer(0.3, signal.pthread_kill, ctrl_c).start()
    with pytest.raises(KeyboardInterrupt):
        tfdp.checkpoint.save(model, tmp_path)
    threading.Timer(0.3, gate.is_open.set).start()
    tfdp.checkpoint.save(model, tmp_path)
    assert pending.is_done
    assert len(names(tmp_path)) == 2


def test_a_save_of_another_model_is_waited_for(gate, tmp_path):
    """It may have the same directory."""
    strategy = tfdp.MirroredStrategy(["/cpu:0"])
    with strategy.scope():
        first = model_of(1.0)
    second = model_of(2.0)
    pending = tfdp.checkpoint.save(first, tmp_path, background=True)
    threading.Timer(0.3, gate.is_open.set).start()
    tfdp.checkpoint.restore(second, tmp_path)
    assert pending.is_done
    assert float(second.get_weights()[0][0, 0]) == 1.0


def test_a_backup_in_the_foreground_waits_for_a_save_of_the_script(
    gate, tmp_path, monkeypatch
):
    """Both may write the same directory."""
    model = model_of(1.0)
    backups = Backups(str(tmp_path / "backups"), 1, worker_group_of(model))
    pending = tfdp.checkpoint.save(model, tmp_path / "saved", background=True)
    wait_until(lambda: gate.begun == 1, "the save of the script")

    def write_second(*arguments: Any) -> Any:
        assert pending.is_done
        return write_shards(*arguments)

    monkeypatch.setattr(writer, "write_shards", write_second)
    threading.Timer(0.3, gate.is_open.set).start()
    backups.save(1, checkpoint_tensors(model), None)
    assert complete(tmp_path / "backups") == ["step-1"]


def test_sigterm_after_a_failed_save_still_saves(gate, tmp_path, capfd):
    class Terminate(Cut):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if len(self.seen) == 8:
                wait_until(lambda: gate.begun == 1, "the first save")
                gate.fails_from = 1000
                signal.raise_signal(signal.SIGTERM)

    gate.is_open.set()
    gate.fails_from = 1
    with pytest.raises(SystemExit) as raised:
        fit(arrays(**PLAIN), Terminate(99), BackupAndRestore(tmp_path, 7))
    assert raised.value.code == PREEMPTED
    assert complete(tmp_path) == ["step-8"]
    assert "tfdp: The checkpoint was not saved" in capfd.readouterr().err


def test_a_save_that_is_slower_than_the_time_between_two_is_reported_once(
    gate, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(background, "_MIN_REPORTED_SECONDS", 0.1)
    model = model_of(1.0)
    strategy = tfdp.MirroredStrategy(["/cpu:0"])
    with strategy.scope():
        model = model_of(1.0)
    with caplog.at_level(logging.WARNING, "tfdp"):
        for _ in range(3):
            gate.is_open.clear()
            threading.Timer(0.4, gate.is_open.set).start()
            pending = tfdp.checkpoint.save(model, tmp_path, background=True)
        pending.wait()
    assert len(re.findall(r"waited \d+ s for the one before", caplog.text)) == 1


def test_sigterm_waits_for_the_backup(gate, tmp_path):
    class Terminate(Cut):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if len(self.seen) == self.step:
                threading.Timer(0.5, gate.is_open.set).start()
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as raised:
        fit(arrays(**PLAIN), Terminate(7), BackupAndRestore(tmp_path, 1000))
    assert raised.value.code == PREEMPTED
    assert load_index(str(tmp_path / "step-7")).run["steps"] == 7


def test_a_forked_process_does_not_wait_for_the_save(gate, tmp_path):
    model = model_of(1.0)
    backups = Backups(str(tmp_path), 1, worker_group_of(model), background=True)
    pending = tfdp.checkpoint.save(model, tmp_path / "saved", background=True)
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            background._finish_all()
            backups.finish()
            with pytest.raises(RuntimeError, match=r"PendingSave\.wait was called in"):
                pending.wait()
            os._exit(0)
        os._exit(1)
    found = wait_until(lambda: os.waitpid(pid, os.WNOHANG)[0] and [True], "the child")
    assert found
    gate.is_open.set()
    pending.wait()


SCRIPT = """
import sys, time
import keras, tfdp
from tfdp.ground.base.threads import run_on_thread
from tfdp.checkpoint import writer
write = writer.write_shards
def slow(*arguments):
    time.sleep(1.0)
    run_on_thread("request", time.sleep, 0.1).result()  # as for an object store
    if sys.argv[2] == "fails":
        raise OSError("the disk is gone")
    return write(*arguments)
writer.write_shards = slow
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
model.compile("adam", "mse")
tfdp.checkpoint.save(model, sys.argv[1], background=True)
"""


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("end", ["works", "fails"])
def test_the_end_of_a_script_waits_for_a_save_and_prints_its_failure(end, tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "saved"), end]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    is_there = (tmp_path / "saved" / "index.json").exists()
    assert is_there == (end == "works")
    assert ("tfdp: The checkpoint was not saved" in found.stderr) == (end == "fails")


@pytest.mark.processes
def test_a_worker_that_cannot_write_ends_all_workers_with_one_error(tmp_path):
    directory = tmp_path / "backups"
    found = run(
        Layout(2, 1),
        interrupted_fit.fit,
        tmp_path,
        {"directory": str(directory), "save_freq": 3, "full_disk": [3, 1]},
    )
    assert [answer["error"] for answer in found.answers] == ["OSError"] * 2
    for answer in found.answers:
        assert "worker 1: [Errno 28] No space left" in answer["text"]
    assert complete(directory) == ["step-3", "step-6"]


def test_shards_of_one_variable_are_written_without_slices():
    """TensorFlow copies a variable at each read once a slice of it was assigned."""
    variable = tf.Variable(tf.range(8, dtype="float32"))
    before = variable.read_value()
    buffer = _FlatBuffer(variable)
    shards = [
        _range_shard(variable, begin, Segment(0, 10, 12), buffer) for begin in (2, 5)
    ]
    shards[0].write(np.full(2, 20, "float32"))
    shards[1].write(tf.fill([2], 50.0))
    np.testing.assert_array_equal(variable, [0, 1, 20, 20, 4, 50, 50, 7])
    np.testing.assert_array_equal(shards[0].read(), [20, 20])
    first, second = (tf_distribute.elements_of(variable, 0, 8) for _ in range(2))
    assert np.shares_memory(first, second)
    shards[0].write(np.full(2, 30, "float32"))  # into other memory: views exist
    np.testing.assert_array_equal(first, [0, 1, 20, 20, 4, 50, 50, 7])
    variable.assign_add(tf.ones([8]))  # a step that uses what is not restored whole
    shards[1].write(np.zeros(2, "float32"))
    np.testing.assert_array_equal(variable, [1, 2, 31, 31, 5, 0, 0, 8])
    np.testing.assert_array_equal(first, [0, 1, 20, 20, 4, 50, 50, 7])
    np.testing.assert_array_equal(before, range(8))


@pytest.mark.parametrize("has_buffer", [False, True])
def test_shards_of_a_variable_that_is_copied_on_reads(has_buffer):
    variable = tf.Variable(tf.zeros([8]))
    variable[0:1].assign([9.0])
    buffer = _FlatBuffer(variable) if has_buffer else None
    shards = [
        _range_shard(variable, begin, Segment(0, 10, 12), buffer) for begin in (2, 5)
    ]
    for _ in range(2):
        for shard, value in zip(shards, (20.0, 50.0), strict=True):
            shard.write(np.full(2, value, "float32"))
        np.testing.assert_array_equal(variable, [9, 0, 20, 20, 0, 50, 50, 0])
        np.testing.assert_array_equal(shards[1].read(), [50, 50])


def test_an_argument_that_is_no_bool_is_refused(tmp_path):
    with pytest.raises(ValueError, match="background"):
        BackupAndRestore(tmp_path, background=1)
    with pytest.raises(ValueError, match="background"):
        tfdp.checkpoint.save(model_of(1.0), tmp_path, background="yes")


def test_a_fit_that_is_cut_leaves_no_thread(gate, tmp_path):
    threading.Timer(0.5, gate.is_open.set).start()
    with pytest.raises(PowerCut):
        fit(arrays(**PLAIN), BackupAndRestore(tmp_path, 2), Cut(3))
    assert not [t for t in threading.enumerate() if t.name == "tfdp-save"]


def test_a_background_save_waits_for_that_of_another_model(gate, tmp_path):
    """Each would remove the files of the other in the same directory."""
    first, second = model_of(1.0), model_of(2.0)
    pending = tfdp.checkpoint.save(first, tmp_path, background=True)
    threading.Timer(0.3, gate.is_open.set).start()
    last = tfdp.checkpoint.save(second, tmp_path, background=True)
    assert pending.is_done
    last.wait()
    tfdp.checkpoint.restore(first, tmp_path)
    assert float(first.get_weights()[0][0, 0]) == 2.0


@pytest.mark.parametrize("devices", [[], ["/cpu:0"]])
def test_fit_raises_the_failure_of_a_save_that_a_callback_has_begun(
    gate, tmp_path, devices
):
    class Save(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            tfdp.checkpoint.save(self.model, tmp_path, background=True)

    scope = tfdp.MirroredStrategy(devices).scope() if devices else None
    with scope or contextlib.nullcontext():
        model = model_of(1.0)
    install.install()  # a `fit` that has begun cannot wait for the first save
    gate.fails_from = 1
    threading.Timer(0.3, gate.is_open.set).start()
    x = np.zeros((4, 3), "float32")
    with pytest.raises(OSError, match="was not saved"):
        model.fit(x, x[:, :2], verbose=0, callbacks=[Save()])
    model.fit(x, x[:, :2], verbose=0)


def test_a_directory_that_is_removed_during_a_save_is_reported_and_made_again(
    gate, tmp_path
):
    model, directory = model_of(1.0), tmp_path / "saved"
    pending = tfdp.checkpoint.save(model, directory, background=True)
    wait_until(lambda: gate.begun == 1, "the save")
    shutil.rmtree(directory)
    gate.is_open.set()
    with pytest.raises(OSError, match="The save has not changed"):
        pending.wait()
    tfdp.checkpoint.save(model, directory)
    tfdp.checkpoint.restore(model, directory)


@pytest.mark.parametrize("has_backups", [False, True])
def test_fit_does_not_wait_for_the_save_of_another_model(gate, tmp_path, has_backups):
    """Only some workers may have begun it."""
    first, second = model_of(1.0), model_of(2.0)
    gate.is_open.set()
    tfdp.checkpoint.save(second, tmp_path / "second", background=True).wait()
    gate.is_open.clear()
    pending = tfdp.checkpoint.save(first, tmp_path / "first", background=True)
    x = np.zeros((4, 3), "float32")
    callbacks = [BackupAndRestore(tmp_path / "backups", 99)] if has_backups else []
    second.fit(x, x[:, :2], verbose=0, callbacks=callbacks)
    assert not pending.is_done
    gate.is_open.set()
    first.fit(x, x[:, :2], verbose=0)
    assert pending.is_done
