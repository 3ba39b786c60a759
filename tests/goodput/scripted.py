"""A training whose time is scripted: losses, data, saves and callbacks that sleep.

As a program, under `tfdp run`: FOLDER of its backups and of what it measures, and the
global step after which worker 0 kills itself, once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tfdp  # isort: skip  # before TensorFlow
import keras
import numpy as np
import tensorflow as tf

STEP_SECONDS, DATA_SECONDS, IDLE_SECONDS = 0.08, 0.06, 0.03
SAVE_SECONDS, AFTER_FIT_SECONDS = 0.8, 1.0
STEPS, EPOCHS, VALIDATION_STEPS = 20, 2, 15


# When each iterator of the source was asked for its first batch.
_asked_at: list[float] = []


class Cut(Exception):
    """What ends an attempt."""


@dataclasses.dataclass
class Times:
    """What a fit took, by the script's own clock.

    Args:
        startup: Float, seconds until the first batch.
        first_batch_at: Float, its time by the wall clock.
        first_step: Float, seconds of the first step, which is traced.
        evaluation: Float, seconds of evaluations.
        between: Float, seconds of Keras from the last batch of an epoch to them.
        opening: Float, seconds from the begin of a later epoch until its source was
            asked for the first batch.
    """

    startup: float = 0.0
    first_batch_at: float = 0.0
    first_step: float = 0.0
    evaluation: float = 0.0
    between: float = 0.0
    opening: float = 0.0


class Watch(keras.callbacks.Callback):
    """Sleeps after each batch and in each save, and cuts the fit after a step."""

    def __init__(
        self, times: Times, began: float, cut: Callable[[int, Times], None]
    ) -> None:
        super().__init__()
        self.times, self.began, self.cut = times, began, cut
        self.epoch = 0
        self.step_began = self.epoch_began = self.begun_at = self.left_at = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch, self.epoch_began = epoch, time.monotonic()
        self.begun_at = self.begun_at or self.epoch_began

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.step_began = time.monotonic()
        if not self.times.startup:
            self.times.startup = self.step_began - self.began
            self.times.first_batch_at = time.time()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        seconds = time.monotonic() - self.step_began
        self.times.first_step = self.times.first_step or seconds
        if batch == 0 and self.epoch_began > self.begun_at:
            self.times.opening += _asked_at[-1] - self.epoch_began
        time.sleep(IDLE_SECONDS)
        self.left_at = time.monotonic()
        self.cut(self.epoch * STEPS + batch + 1, self.times)

    def get_state(self) -> int:
        time.sleep(SAVE_SECONDS)
        return 0

    def set_state(self, state: int) -> None:
        del state


class Scripted(keras.Sequential):
    """A model that measures its evaluations."""

    watch: Watch

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            self.watch.times.evaluation += time.monotonic() - began
            self.watch.times.between += began - self.watch.left_at


def scripted_loss(truth: tf.Tensor, guess: tf.Tensor) -> tf.Tensor:
    def sleep(loss: np.ndarray) -> np.ndarray:
        time.sleep(STEP_SECONDS)
        return loss

    loss = tf.reduce_mean(tf.square(truth - guess), axis=-1)
    slow = tf.numpy_function(sleep, [tf.stop_gradient(loss)], tf.float32)
    slow.set_shape(loss.shape)
    return loss + 0.0 * slow


def slow_source() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    _asked_at.append(time.monotonic())
    for _ in range(STEPS):
        time.sleep(DATA_SECONDS)
        yield np.ones((4, 2), "float32"), np.ones((4, 1), "float32")


def no_cut(step: int, times: Times) -> None:
    """Lets a fit complete."""


def cut_after(last: int) -> Callable[[int, Times], None]:
    """Returns a cut that raises after a step."""

    def cut(step: int, times: Times) -> None:
        if step == last:
            raise Cut

    return cut


def fit(folder: Path, cut: Callable[[int, Times], None] = no_cut) -> Times:
    """Trains with backups, and returns what it took; also if it is cut.

    Args:
        folder: `Path` of the backups.
        cut: Callable that is called after each step with its number, from 1 in the
            whole training, and with the times so far.
    """
    times, began = Times(), time.monotonic()
    with tfdp.MirroredStrategy(["CPU:0"]).scope():
        model = Scripted([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", scripted_loss, jit_compile=False)
    model.watch = Watch(times, began, cut)
    kinds = (tf.TensorSpec([4, 2]), tf.TensorSpec([4, 1]))
    data = tf.data.Dataset.from_generator(slow_source, output_signature=kinds)
    rows = (np.ones((4 * VALIDATION_STEPS, 2)), np.ones((4 * VALIDATION_STEPS, 1)))
    backup = tfdp.callbacks.BackupAndRestore(folder, delete_at_end=False)
    with contextlib.suppress(Cut):
        model.fit(
            data.apply(tf.data.experimental.assert_cardinality(STEPS)),
            epochs=EPOCHS,
            validation_data=rows,
            validation_batch_size=4,
            callbacks=[model.watch, backup],
            verbose=0,
        )
    return times


def kill_once(folder: Path, after: int) -> Callable[[int, Times], None]:
    """Returns a cut that kills this process, once, after a step and the next line.

    It waits for the line since the test compares what is written; what a kill loses
    at most has a test of its own.
    """
    found = folder.with_name(f"{folder.name}.goodput.jsonl")
    sizes = [0]

    def cut(step: int, times: Times) -> None:
        sizes.append(found.stat().st_size if found.exists() else 0)
        if step > after and sizes[-1] > sizes[-2] and not report(folder, 0).exists():
            write_report(folder, times, step)
            os.kill(os.getpid(), signal.SIGKILL)

    return cut


def report(folder: Path, attempt: int) -> Path:
    """The path of what an attempt has measured."""
    return folder.with_name(f"attempt-{attempt}.json")


def write_report(folder: Path, times: Times, step: int) -> None:
    """Writes what an attempt has measured, up to a step."""
    attempt = int(report(folder, 0).exists())
    content = {**dataclasses.asdict(times), "step": step, "at": time.time()}
    report(folder, attempt).write_text(json.dumps(content))


def main(folder: Path, kill_after: int) -> None:
    """Trains, and sleeps afterwards."""
    times = fit(folder, kill_once(folder, kill_after))
    write_report(folder, times, STEPS * EPOCHS)
    time.sleep(AFTER_FIT_SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
