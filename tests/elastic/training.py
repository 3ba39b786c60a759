"""The script of a job that loses and gains workers, in the processes of `job`."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

NUM_SAMPLES, BATCH_SIZE, EPOCHS = 54, 9, 4
STEPS_PER_EPOCH = NUM_SAMPLES // BATCH_SIZE
# Column of the features with the index of the sample, which the model only records.
ID = 0


def train(
    rank: int,
    folder: str,
    *,
    epochs: int = EPOCHS,
    kill: dict[str, Any] | None = None,
    kill_later: dict[str, Any] | None = None,
    features: list[str] | None = None,
    memory_every: int | None = 1,
    save_freq: Any = "epoch",
    steps_per_execution: int = 1,
    step_seconds: float = 0.0,
    min_workers: int = 1,
    timeout_seconds: float = 30.0,
    after_fit: str = "",
    other_model: bool = False,
    runs_alone: bool = False,
    data: str = "arrays",
) -> dict[str, Any]:
    """Trains, and returns weights, history and what the callbacks have seen.

    Args:
        rank: Int, this worker's at the start of the job; -1 for one device.
        folder: String, a folder for all workers.
        epochs: Int.
        kill: Dict: `"where"` a worker is killed, its `"rank"` or `"ranks"`, the number
            of the `"step"` from 1, and the `"signal"`; or `None`. The time of the kill
            is written to the file `kills`.
        kill_later: Dict, the same, of a worker that is killed as parameters are divided
            anew.
        features: List of strings, what is switched on.
        memory_every: As for `BackupAndRestore`.
        save_freq: The same.
        steps_per_execution: As for `compile`.
        step_seconds: Float, that each step takes longer.
        min_workers: As for the options.
        timeout_seconds: The same.
        after_fit: String, `"evaluate"` to do so after `fit`.
        data: String, `"arrays"` or a `"dataset"` with a shuffle.
        other_model: Bool, whether the model differs from that of other processes.
        runs_alone: Bool, whether to call `strategy.run` before `fit`.
    """
    import keras
    import tensorflow as tf

    import tfdp

    on = set(features or ())
    options = tfdp.CommunicationOptions(
        on_loss="continue", min_workers=min_workers, timeout_seconds=timeout_seconds
    )
    strategy = (
        tf.distribute.get_strategy()
        if rank < 0
        else tfdp.MultiWorkerMirroredStrategy(communication=options)
    )
    killer = Killer(rank, kill or {}, Path(folder) / "kills")
    spy = _Spy(killer, step_seconds)
    record = Path(folder) / "rows"
    record.mkdir(exist_ok=True)

    def note_rows(ids: Any) -> None:
        rows = sorted(map(int, ids.numpy()))
        if rows and rank >= 0:
            line = [strategy.extended.generation, spy.epoch, spy.batch, rows]
            with (record / f"{os.getpid()}").open("a") as file:
                file.write(json.dumps(line) + "\n")

    class Recorder(keras.layers.Layer):
        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                killer.at("trace", spy.step)
            if not training or not on & {"rows", "compute"}:
                return x[:, 1:]

            def act(ids: Any) -> Any:
                note_rows(ids)
                killer.at("compute", spy.step)
                return np.float32(0)

            with tf.control_dependencies([tf.py_function(act, [x[:, ID]], tf.float32)]):
                return tf.identity(x[:, 1:])

    keras.utils.set_random_seed(3)
    with strategy.scope(init="deferred") if "deferred" in on else strategy.scope():
        last = "tanh" if other_model else None
        model = _model(keras, Recorder(), last)
        model.layers[1].trainable = "frozen" not in on
        model.compile(
            keras.optimizers.Adam(0.02),
            "mse",
            metrics=["mae"],
            steps_per_execution=steps_per_execution,
        )
    if runs_alone:
        strategy.run(lambda: None)
    callbacks = [*_features(tfdp, on), spy.callback(keras)]
    callbacks += _callbacks_of_keras(keras, on, folder)
    if rank >= 0:
        backup = tfdp.callbacks.BackupAndRestore(
            Path(folder) / "backups", save_freq, memory_every=memory_every
        )
        killer.install(backup)
        Killer(rank, kill_later or {}, Path(folder) / "kills").install_renewal()
        callbacks.append(backup)
    x, y = _data()
    killer.at("before", 1)
    history = model.fit(
        **_given(tf, x, y, data),
        epochs=epochs,
        validation_data=(x[:7], y[:7]),
        callbacks=callbacks,
        verbose=0,
    )
    result = {
        "weights": model.get_weights(),
        "history": history.history,
        "begins": spy.begins,
        "ends": spy.ends,
        "steps": spy.steps,
        "epochs": spy.epochs,
        "replicas": strategy.num_replicas_in_sync,
    }
    if after_fit == "evaluate":
        result["evaluated"] = _evaluate(keras, model, killer)
        result["replicas"] = strategy.num_replicas_in_sync
    return result


def _evaluate(keras: Any, model: Any, killer: Killer) -> Any:
    killed = keras.callbacks.LambdaCallback()
    killed.on_test_batch_end = lambda batch, logs=None: killer.at("after", batch)
    x, y = _data()
    return model.evaluate(x, y, batch_size=BATCH_SIZE, verbose=0, callbacks=[killed])


def _data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(NUM_SAMPLES, 5)).astype("float32")
    x[:, ID] = np.arange(NUM_SAMPLES)
    return x, np.tanh(x[:, 1:2] * x[:, 2:3]).astype("float32")


def _given(tf: Any, x: np.ndarray, y: np.ndarray, kind: str) -> dict[str, Any]:
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": BATCH_SIZE}
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(NUM_SAMPLES, seed=7)
    data = data.map(lambda x, y: (x, 2.0 * y)).shuffle(5, seed=2)
    return {"x": data.batch(BATCH_SIZE, drop_remainder=True).prefetch(2)}


def _model(keras: Any, recorder: Any, last: str | None) -> Any:
    return keras.Sequential(
        [
            keras.Input((5,)),
            recorder,
            keras.layers.Dense(6, "tanh"),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(1, last),
        ]
    )


def _callbacks_of_keras(keras: Any, on: set[str], folder: str) -> list[Any]:
    callbacks = [keras.callbacks.ReduceLROnPlateau("loss", patience=1)]
    if "csv" in on:
        callbacks.append(keras.callbacks.CSVLogger(Path(folder) / "log.csv"))
    return callbacks


def _features(tfdp: Any, on: set[str]) -> list[Any]:
    makers = {
        "accumulation": lambda: tfdp.callbacks.GradientAccumulation(steps=3),
        "scaling": lambda: tfdp.callbacks.LossScaling(initial_scale=2.0**10),
        "stage 1": lambda: tfdp.callbacks.ShardedOptimizer(),
        "stage 2": lambda: tfdp.callbacks.ShardedOptimizer(stage=2),
        "stage 3": lambda: tfdp.callbacks.ShardedOptimizer(stage=3),
        "local": lambda: tfdp.callbacks.LocalSGD(sync_every=2),
        "rest": lambda: tfdp.callbacks.GradientAccumulation(steps=4),
    }
    return [make() for name, make in makers.items() if name in on]


class Killer:
    """Sends this process a signal once, at a place and step that were chosen."""

    def __init__(self, rank: int, kill: dict[str, Any], path: Path) -> None:
        self._path = path
        self._kill = kill if rank in kill.get("ranks", [kill.get("rank")]) else {}

    def at(self, where: str, step: int) -> None:
        if self._kill.get("where") == where and step >= self._kill["step"]:
            number = self._kill.get("signal", signal.SIGKILL)
            self._kill = {}
            with self._path.open("a") as file:
                file.write(f"{time.time()}\n")
            os.kill(os.getpid(), number)

    def install_renewal(self) -> None:
        """Lets the moment be a place in which parameters have lost their values."""
        from tfdp.features import elastic

        discard = elastic.discard_values

        def discard_or_die(*args: Any) -> None:
            discard(*args)
            self.at("renewal", 1)

        elastic.discard_values = discard_or_die

    def install(self, backup: Any) -> None:
        """Lets saves of a backup be a place, in their middle, and its loading."""
        from tfdp.callbacks.resumption import Resumption

        save, load = backup._save, Resumption._load

        def load_or_die(resumption: Resumption) -> None:
            self.at("load", 1)
            load(resumption)

        def save_or_die(epoch: int, batches: int, logs: Any, places: Any) -> None:
            for place in places:
                copied = place.save

                def after(step: int, *args: Any, copied: Any = copied) -> None:
                    self.at("save", step)
                    copied(step, *args)

                place.save = after
            try:
                save(epoch, batches, logs, places)
            finally:
                for place in places:
                    del place.save

        backup._save, Resumption._load = save_or_die, load_or_die


class _Spy:
    """What the user's callbacks see, and the number of the step."""

    def __init__(self, killer: Killer, step_seconds: float) -> None:
        self._killer, self._seconds = killer, step_seconds
        self.begins = self.ends = self.epoch = self.batch = 0
        self.steps: list[tuple[float, int]] = []
        self.epochs: list[float] = []

    @property
    def step(self) -> int:
        return self.epoch * STEPS_PER_EPOCH + self.batch + 1

    def callback(self, keras: Any) -> Any:
        spy = self

        class Callback(keras.callbacks.Callback):
            def on_train_begin(self, logs: Any = None) -> None:
                spy.begins += 1

            def on_train_end(self, logs: Any = None) -> None:
                spy.ends += 1

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                spy.epoch, spy.batch = epoch, 0
                spy.epochs.append(time.time())

            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                spy.batch = batch

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                spy.batch = batch
                spy.steps.append((time.time(), spy.step))
                time.sleep(spy._seconds)
                spy._killer.at("batch", spy.step)

            def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
                spy._killer.at("evaluate", spy.step)

        return Callback()
