"""The training that is interrupted and goes on, in the processes of `interrupted`."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

from interrupted import Layout

NUM_SAMPLES, BATCH_SIZE = 40, 8
STEPS_PER_EPOCH = NUM_SAMPLES // BATCH_SIZE


def fit(
    layout: Layout,
    rank: int,
    *,
    directory: str | None = None,
    save_freq: Any = "epoch",
    epochs: int = 5,
    kill: dict[str, int] | None = None,
    crash_in_save: int | None = None,
    data: str = "dataset",
    everything: bool = True,
    learning_rate: float = 0.02,
    keep: int = 3,
    delete_at_end: bool = True,
    units: int = 6,
    stage: int = 1,
) -> dict[str, Any]:
    """Trains, and returns weights and history.

    Args:
        layout: `Layout`.
        rank: Int, this worker's.
        directory: String, of the backups, or `None` for none.
        save_freq: As for the callback.
        epochs: Int.
        kill: Dict with a step, a rank and a signal, or `None`.
        crash_in_save: Int, the save in which the first worker is killed after the
            parts are written and before the index is, or `None`.
        data: String: `"dataset"` with a seed, `"arrays"` that are shuffled.
        everything: Bool, whether everything is switched on that has a state, or only
            what is exact on any number of replicas.
        learning_rate: Float.
        keep: As for the callback.
        delete_at_end: As for the callback.
        units: Int, of the hidden layer.
        stage: Int, of the sharding.
    """
    import keras
    import tensorflow as tf

    import tfdp

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.experimental.enable_op_determinism()
    strategy = _strategy(layout, tfdp)
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = _model(keras, units, learning_rate, dropout=0.3 * everything)
    callbacks = _callbacks(keras, tfdp, everything, stage)
    if directory is not None:
        callbacks.append(
            tfdp.callbacks.BackupAndRestore(
                directory, save_freq, keep, delete_at_end=delete_at_end
            )
        )
    if kill is not None:
        callbacks.append(_killer(keras, rank, **kill))
    if crash_in_save is not None:
        _crash_in_save(crash_in_save, rank)
    x, y = _arrays()
    options: dict[str, Any] = {"x": x, "y": y, "batch_size": BATCH_SIZE}
    if data == "dataset":
        dataset = tf.data.Dataset.from_tensor_slices((x, y))
        options = {"x": dataset.shuffle(NUM_SAMPLES, seed=3).batch(BATCH_SIZE)}
    history = model.fit(
        **options,
        epochs=epochs,
        callbacks=callbacks,
        validation_data=(x[:16], y[:16]),
        verbose=0,
    )
    return {
        "weights": {str(i): w for i, w in enumerate(model.get_weights())},
        "history": {k: list(map(float, v)) for k, v in history.history.items()},
        "epochs": history.epoch,
    }


def _strategy(layout: Layout, tfdp: Any) -> Any:
    if layout.num_workers > 1:
        return tfdp.MultiWorkerMirroredStrategy()
    import tfdp.testing

    tfdp.testing.logical_cpus(layout.devices)
    return tfdp.MirroredStrategy([f"/cpu:{i}" for i in range(layout.devices)])


def _model(keras: Any, units: int, learning_rate: float, dropout: float) -> Any:
    layers = [
        keras.Input((4,)),
        keras.layers.Dense(units, activation="tanh"),
        *([keras.layers.Dropout(dropout)] if dropout else []),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(learning_rate), "mse", metrics=["mae"])
    return model


def _callbacks(keras: Any, tfdp: Any, everything: bool, stage: int) -> list:
    chosen = [tfdp.callbacks.GradientAccumulation(steps=2)]
    if not everything:
        return chosen
    return [
        *chosen,
        tfdp.callbacks.LossScaling(initial_scale=2.0**10, growth_steps=3),
        tfdp.callbacks.ShardedOptimizer(stage=stage),
        tfdp.callbacks.LearningRateWarmup(steps=4),
        keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=0.5),
        keras.callbacks.EarlyStopping(
            "val_loss", patience=3, restore_best_weights=True
        ),
    ]


def _arrays() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(NUM_SAMPLES, 4)).astype("float32")
    return x, (np.sin(x[:, :1]) + 0.5 * x[:, 1:2]).astype("float32")


def _killer(keras: Any, rank: int, *, step: int, at: int, number: int) -> Any:
    """A callback that sends one worker a signal at the end of a step."""

    class Killer(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            if self.steps == step and rank == at:
                os.kill(os.getpid(), number)

    return Killer()


def _crash_in_save(number: int, rank: int) -> None:
    from tfdp import checkpoint_writing

    replace, count = checkpoint_writing.replace_index, [0]

    def replace_or_die(*arguments: Any) -> None:
        count[0] += 1
        if count[0] == number and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*arguments)

    checkpoint_writing.replace_index = replace_or_die
