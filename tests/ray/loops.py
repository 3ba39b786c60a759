"""Training functions that the tests hand to Ray: they run in its workers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

NUM_ROWS, BATCH_SIZE, EPOCHS = 64, 16, 4


def data() -> tuple:
    import numpy as np

    x = np.random.default_rng(0).normal(size=(NUM_ROWS, 8)).astype("float32")
    return x, x[:, :1] - 2 * x[:, 1:2]


def build(rate: float = 0.05) -> Any:
    import keras

    keras.utils.set_random_seed(3)
    hidden = keras.layers.Dense(8, activation="tanh")
    model = keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse")
    return model


def train(config: dict[str, Any]) -> None:
    """Train as a user does; `config` tells what else is to happen."""
    import keras
    import ray.train

    import tfdp
    from tfdp.ray import ReportCallback

    strategy = tfdp.auto_strategy()
    num_workers = ray.train.get_context().get_world_size()
    place = f", {ray.util.get_node_ip_address()}" if "notes_place" in config else ""
    _note(config, f"{num_workers} workers{place}")
    with strategy.scope():
        model = build(config.get("rate", 0.05))
    callbacks: list[keras.callbacks.Callback] = [
        ReportCallback(every=EPOCHS, **config.get("report", {}))
    ]
    if "backup" in config:
        callbacks.append(tfdp.callbacks.BackupAndRestore(config["backup"]))
    if "dies_at" in config:
        callbacks.append(_Dies(Path(config["marker"]), config["dies_at"]))
    if "waits_for" in config:
        callbacks.append(_Waits(config, num_workers))
    x, y = data()
    model.fit(
        x,
        y,
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )


LONG_EPOCHS = 40


def train_in_actor(folder: str) -> tuple[list, int]:
    """Train in an actor; the first one kills itself, and the other waits for a new one.

    Returns:
        The weights, and the number of replicas at the end.
    """
    import signal
    import time

    import keras

    import tfdp

    strategy = tfdp.auto_strategy()
    marker = Path(folder) / "killed"
    with strategy.scope():
        model = build()

    class Disturb(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if not marker.exists() and int(model.optimizer.iterations.numpy()) == 6:
                if strategy.extended.worker_group.rank == 0:
                    marker.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            elif strategy.num_replicas_in_sync == 1:
                time.sleep(0.5)

    backup = tfdp.callbacks.BackupAndRestore(Path(folder) / "backup", memory_every=1)
    x, y = data()
    options = {"batch_size": BATCH_SIZE, "epochs": LONG_EPOCHS, "shuffle": False}
    model.fit(x, y, verbose=0, callbacks=[Disturb(), backup], **options)
    return model.get_weights(), strategy.num_replicas_in_sync


def train_on_shard(config: dict[str, Any]) -> None:
    """Count what the workers are given of a Ray dataset."""
    import keras

    import tfdp
    from tfdp.ray import ReportCallback, dataset_shard

    strategy = tfdp.auto_strategy()
    rows = dataset_shard(features="x", labels="y", batch_size=config["batch_size"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        # The mean of the labels over all rows, each once, whatever the weights are.
        model.compile("sgd", loss=_label)
    model.fit(rows, epochs=2, verbose=0, callbacks=[ReportCallback()])


def _label(y_true: Any, y_pred: Any) -> Any:
    import keras

    return keras.ops.cast(y_true[:, 0], "float32") + 0.0 * y_pred[:, 0]


def _note(config: dict[str, Any], text: str) -> None:
    if "notes" in config:
        with open(config["notes"], "a") as file:
            file.write(text + "\n")


def _callback_base() -> type:
    import keras

    return keras.callbacks.Callback


class _Dies(_callback_base()):
    """Kills the last worker in an epoch, once."""

    def __init__(self, marker: Path, epoch: int) -> None:
        super().__init__()
        self.marker, self.epoch = marker, epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        import ray.train

        context = ray.train.get_context()
        is_last = context.get_world_rank() == context.get_world_size() - 1
        if epoch == self.epoch and is_last and not self.marker.exists():
            self.marker.touch()
            os._exit(7)


class _Waits(_callback_base()):
    """With two workers, tells the test of an epoch, and waits to be stopped by it."""

    def __init__(self, config: dict[str, Any], num_workers: int) -> None:
        super().__init__()
        self.config, self.num_workers = config, num_workers

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        import time

        if epoch == self.config["waits_for"] and self.num_workers == 2:
            Path(self.config["marker"]).touch()
            time.sleep(60)
