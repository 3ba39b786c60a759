"""Script of the benchmark `saves`: saves, steps during a save, and restores."""

import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tfdp.checkpoint.backups import Backups
from tfdp.checkpoint.memory_backups import MemoryBackups
from tfdp.checkpoint.reader import LoadPlan
from tfdp.checkpoint.training_state import checkpoint_tensors

UNITS, LAYERS, BLOCKS = map(int, sys.argv[1:4])

tf.config.threading.set_intra_op_parallelism_threads(1)
strategy = tfdp.MultiWorkerMirroredStrategy()
with strategy.scope():
    layers = [keras.layers.Dense(UNITS) for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((UNITS,)), *layers])
    model.compile("adam", "mse")
x = np.ones((64, UNITS), "float32")
callbacks = [tfdp.callbacks.ShardedOptimizer()] if sys.argv[4] == "sharded" else []
seconds: dict[str, list[float]] = {"step": [], "step_while_saving": []}


class Saver(keras.callbacks.Callback):
    """Takes the time of steps: in each second epoch, of those during a save.

    The first step of an epoch is longer than others, and left out.
    """

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self.saves = epoch % 2

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        if self.saves and batch == 1:
            self.pending = timed("pause_in_fit", save_in_background)
        self.is_saving = self.saves and batch and not self.pending.is_done
        self.begin = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        name = "step_while_saving" if self.is_saving else "step"
        if batch and bool(self.saves) == bool(self.is_saving):
            seconds[name].append(time.perf_counter() - self.begin)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if self.saves:
            self.pending.wait()


def timed(name: str, action: Callable[[], Any]) -> Any:
    """Keep the time of an action under a name; return its result."""
    begin = time.perf_counter()
    result = action()
    seconds.setdefault(name, []).append(time.perf_counter() - begin)
    return result


def save_in_background() -> tfdp.checkpoint.PendingSave:
    """Begin a save."""
    return tfdp.checkpoint.save(model, "saved", background=True)


def steps_of_a_save() -> int:
    """Return a number of steps that takes as long as a save for which nobody waits."""
    model.fit(x, x, batch_size=64, epochs=2, verbose=0, callbacks=callbacks)
    begin = time.perf_counter()
    model.fit(x, x, batch_size=64, epochs=5, verbose=0, callbacks=callbacks)
    step = (time.perf_counter() - begin) / 5
    begin, pending = time.perf_counter(), save_in_background()
    while not pending.is_done:
        time.sleep(0.01)
    steps = 1 + int((time.perf_counter() - begin) / step)
    pending.wait()
    return max(group.all_gather("the steps of a save", steps))


group = strategy.extended.worker_group
xs = np.repeat(x, 1 + steps_of_a_save(), axis=0)
model.fit(
    xs, xs, batch_size=64, epochs=2 * BLOCKS, verbose=0, callbacks=[*callbacks, Saver()]
)
half = 3 * model.count_params() // 2
# As in a save, the source lies where TensorFlow puts a variable, in ordinary pages; an
# array of NumPy may have huge ones, and a copy between two of these takes half the
# time.
source = np.frombuffer(memoryview(tf.ones(half)), "float32")
target = np.full(half, 2, "float32")
for _ in range(BLOCKS):
    # As in a save, the workers of a host copy at the same time.
    group.all_gather("the begin of a copy")
    timed("copy", lambda: np.copyto(target, source))
    timed("foreground", lambda: tfdp.checkpoint.save(model, "saved"))
save_in_background().wait()  # allocates the copy
seconds["processor"], seconds["duration"] = [], []
for _ in range(BLOCKS):
    group.all_gather("the end of the save before")
    begin, processor = time.perf_counter(), time.process_time()
    timed("pause", save_in_background).wait()
    seconds["processor"].append(time.process_time() - processor)
    seconds["duration"].append(time.perf_counter() - begin)
disk = Backups("backups", 1, group)
memory = MemoryBackups("backups", 1, group, strategy.extended.connect_workers)
for backups in (disk, memory):
    backups.prepare()
STEP = 1


def save_in_memory() -> None:
    """Keep the state in memory."""
    memory.save(STEP, checkpoint_tensors(model), {"steps": STEP, "batches": 1})


for _ in range(2):  # allocates both slots
    save_in_memory()
for _ in range(BLOCKS):
    group.all_gather("the begin of a save")
    timed("memory_pause", save_in_memory)
disk.save(STEP, checkpoint_tensors(model), {"steps": STEP})


def drop_from_cache() -> None:
    """Have the next read of the backup on the disk read the disk."""
    for path in pathlib.Path("backups").rglob("worker-*"):
        number = os.open(path, os.O_RDONLY)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)


def restore(backups: Any, newest: Any) -> None:
    """Find the newest state, and read it into the model.

    Args:
        backups: `Backups` or `MemoryBackups`.
        newest: Second argument of its `find_newest`.
    """
    found = backups.find_newest(
        lambda index: LoadPlan(checkpoint_tensors(model)), newest
    )
    backups.load(*found)


for _ in range(BLOCKS):
    group.all_gather("the begin of a block")
    timed("from_cache", lambda: restore(disk, disk.list_steps()))
    drop_from_cache()
    group.all_gather("the end of the cache")
    timed("from_disk", lambda: restore(disk, disk.list_steps()))
    timed("from_memory", lambda: restore(memory, (0, False)))
memory.delete()
disk.delete()
if group.rank == 0:
    print("seconds:", json.dumps(seconds), flush=True)
