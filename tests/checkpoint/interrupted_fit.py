"""The training that is interrupted and goes on, in the processes of `interrupted`."""

from __future__ import annotations

import atexit
import errno
import os
import pathlib
import shutil
import signal
import tempfile
import time
from typing import Any

import numpy as np

from tests.harness.interrupted import Layout
from tests.harness.timing import wait_until

NUM_SAMPLES, BATCH_SIZE = 40, 8
STEPS_PER_EPOCH = NUM_SAMPLES // BATCH_SIZE


def fit(
    layout: Layout,
    rank: int,
    *,
    directory: str | None = None,
    save_freq: Any = "epoch",
    epochs: int = 5,
    kill: dict[str, Any] | None = None,
    crash_in_save: int | None = None,
    full_disk: list[int] | None = None,
    bucket: str | None = None,
    environment: dict[str, str] | None = None,
    die_at_put: dict[str, Any] | None = None,
    data: str = "dataset",
    everything: bool = True,
    learning_rate: float = 0.02,
    keep: int = 3,
    delete_at_end: bool = True,
    units: int = 6,
    stage: int = 1,
    per_replica: int | None = None,
    schedule: bool = False,
    micro_batch: int = BATCH_SIZE,
    compression: str | None = None,
    backend: str = "auto",
    memory_every: int | None = None,
    lacks_copy: int | None = None,
    hosts: list[str] | None = None,
) -> dict[str, Any]:
    """Trains, and returns weights and history.

    Args:
        layout: `Layout`.
        rank: Int, this worker's.
        directory: String, of the backups, or `None` for none.
        save_freq: As for the callback.
        epochs: Int.
        kill: Dict with a step, a rank and a signal, see `_killer`, or `None`.
        crash_in_save: Int, the save in which the first worker is killed after the
            parts are written and before the index is, or `None`.
        full_disk: List of a save and a rank: from that save on, this worker's disk is
            full; or `None`.
        bucket: String, the folder of the object store `bucket://`, or `None`.
        environment: Dict of variables to set, or `None` for none.
        die_at_put: Dict with the name of a backup and a rank: that worker is killed at
            its second put of a part of the backup; or `None`.
        data: String: `"dataset"` with a seed, `"arrays"` that are shuffled, or the
            dataset again and again, `"endless"`. Of the others workers read their own
            rows only: a dataset with a `"map"`, a `PyDataset` of `"rows"`, `"files"`.
        everything: Bool, whether everything is switched on that has a state, or only
            what is exact on any number of replicas.
        learning_rate: Float.
        keep: As for the callback.
        delete_at_end: As for the callback.
        units: Int, of the hidden layer.
        stage: Int, of the sharding. Without everything, 1 stands for none.
        per_replica: Int, samples of each replica's batch, which it keeps on another
            number of replicas; or `None` for a global batch.
        schedule: Bool, whether the learning rate is a schedule.
        micro_batch: Int, samples of a batch, of which as many make an update as have
            two batches of `BATCH_SIZE`.
        compression: String, as for the options of communication.
        backend: The same.
        memory_every: As for the callback.
        lacks_copy: Int, a worker that cannot copy its part in memory from the second
            time on; or `None`.
        hosts: List of strings, for each worker the folder that stands for the memory of
            its host; or `None` for that of this one.
    """
    import keras
    import tensorflow as tf

    import tfdp

    os.environ.update(environment or {})
    if bucket is not None:
        from tests.checkpoint.bucket import install

        install(pathlib.Path(bucket))
    if hosts is not None:
        _set_memory(hosts[rank], lacks_copy=lacks_copy == rank)
    if die_at_put is not None and die_at_put["rank"] == rank:
        _die_at_second_put(die_at_put["backup"])
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.experimental.enable_op_determinism()
    strategy = _strategy(layout, tfdp, compression, backend)
    keras.utils.set_random_seed(5)
    with strategy.scope():
        rate: Any = learning_rate
        if schedule:
            rate = keras.optimizers.schedules.InverseTimeDecay(learning_rate, 4, 0.5)
        model = _model(keras, units, rate, dropout=0.3 * everything)
    steps = 2 * BATCH_SIZE // micro_batch
    callbacks = _callbacks(keras, tfdp, everything, stage, steps)
    if directory is not None:
        callbacks.append(
            tfdp.callbacks.BackupAndRestore(
                directory,
                save_freq,
                keep,
                delete_at_end=delete_at_end,
                batch="global" if per_replica is None else "per_replica",
                memory_every=memory_every,
            )
        )
    if kill is not None:
        callbacks.append(_killer(keras, rank, **kill))
    if crash_in_save is not None:
        _crash_in_save(crash_in_save, rank)
    if full_disk is not None and full_disk[1] == rank:
        _fill_disk(full_disk[0])
    x, y = arrays()
    batch_size = micro_batch
    if per_replica is not None:
        batch_size = per_replica * strategy.num_replicas_in_sync
    options = _data_of_kind(data, x, y, batch_size)
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


def asked_to_end_before_fit(layout: Layout, rank: int, *, folder: str) -> None:
    """Is sent SIGTERM when all have their strategy, and then stays for long."""
    import tfdp

    _strategy(layout, tfdp)
    pathlib.Path(folder, f"ready-{rank}").touch()
    # Who ends earlier is lost to one that still makes its strategy.
    ready = pathlib.Path(folder)
    wait_until(
        lambda: len(list(ready.glob("ready-*"))) == layout.num_workers, "all workers"
    )
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60.0)


def asked_to_end_while_joining(layout: Layout, rank: int, *, at: int) -> None:
    """Is sent SIGTERM when it waits for the others to join, on one worker."""
    from tfdp.communication.store import Gathering, Store

    gather = Store.gather

    def gather_and_end(store: Store, key: str, text: str, **how: Any) -> Gathering:
        gathering = gather(store, key, text, **how)
        if key == "join" and rank == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return gathering

    Store.gather = gather_and_end
    import tfdp

    # The other one may wait for this one to start again.
    options = tfdp.CommunicationOptions(timeout_seconds=10.0)
    tfdp.MultiWorkerMirroredStrategy(communication=options)
    time.sleep(60.0 if rank == at else 5.0)


def by_hand(
    layout: Layout,
    rank: int,
    *,
    plan: list[tuple[float, list[list[int]]]],
) -> dict[str, Any]:
    """The same training on one device, in plain TensorFlow, without tfdp.

    Args:
        layout: Not used.
        rank: Not used.
        plan: List of pairs of a learning rate and the micro-batches of an update, by
            the numbers of their samples.
    """
    import keras
    import tensorflow as tf

    del layout, rank
    keras.utils.set_random_seed(5)
    model = _model(keras, 6, 0.0, dropout=0.0)
    optimizer, weights = model.optimizer, model.trainable_variables
    x, y = arrays()
    for rate, batches in plan:
        totals = [0.0] * len(weights)
        for batch in batches:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x[batch]) - y[batch]) ** 2)
            gradients = tape.gradient(loss, weights)
            pairs = zip(totals, gradients, strict=True)
            totals = [total + gradient for total, gradient in pairs]
        optimizer.learning_rate = rate
        optimizer.apply([total / len(batches) for total in totals], weights)
    return {"weights": {str(i): w for i, w in enumerate(model.get_weights())}}


def order_of_samples(
    layout: Layout, rank: int, *, epochs: int, data: str
) -> dict[str, Any]:
    """The numbers of the samples, epoch by epoch, in which Keras's `fit` takes them."""
    import keras
    import tensorflow as tf

    del layout, rank
    keras.utils.set_random_seed(5)  # what `shuffle` draws depends on it, too
    x, _ = arrays()
    seen: list[int] = []

    class Recorder(keras.Model):
        def train_step(self, data: Any) -> dict[str, float]:
            row = data[0].numpy()
            seen.append(int(np.argmin(np.abs(x - row).sum(axis=1))))
            return {"loss": 0.0}

    recorder = Recorder()
    recorder.compile(run_eagerly=True)
    dataset, steps = samples(tf).batch(1), None
    if data == "endless":
        dataset, steps = samples(tf).repeat().batch(1), NUM_SAMPLES
    recorder.fit(dataset, epochs=epochs, steps_per_epoch=steps, verbose=0)
    return {"orders": np.reshape(seen, (epochs, NUM_SAMPLES)).tolist()}


def samples(tf: Any) -> Any:
    """Shuffled samples, in an order that can be repeated."""
    dataset = tf.data.Dataset.from_tensor_slices(arrays())
    return dataset.shuffle(NUM_SAMPLES, seed=3)


def _data_of_kind(data: str, x: Any, y: Any, batch_size: int) -> dict[str, Any]:
    """Arguments of `fit`, see there."""
    import keras
    import tensorflow as tf

    if data == "dataset":
        return {"x": samples(tf).batch(batch_size)}
    if data == "map":
        prepared = samples(tf).map(lambda x, y: (tf.identity(x), y))
        return {"x": prepared.batch(batch_size).prefetch(tf.data.AUTOTUNE)}
    if data == "rows":
        return {"x": _py_dataset(keras, batch_size), "shuffle": False}
    if data == "endless":
        endless = samples(tf).repeat().batch(batch_size)
        return {"x": endless, "steps_per_epoch": NUM_SAMPLES // batch_size}
    if data == "files":
        folder = pathlib.Path(tempfile.mkdtemp())
        np.save(folder / "x.npy", x)
        x = np.load(folder / "x.npy", mmap_mode="r")
        atexit.register(shutil.rmtree, folder)
    return {"x": x, "y": y, "batch_size": batch_size}


def _py_dataset(keras: Any, batch_size: int) -> Any:
    """Batches in order, of which some rows can be read."""
    arrays_of_all = arrays()

    class Rows(keras.utils.PyDataset):
        def __len__(self) -> int:
            return NUM_SAMPLES // batch_size

        def num_rows(self, index: int) -> int:
            return batch_size

        def rows(self, index: int, start: int, stop: int) -> tuple:
            assert stop - start < batch_size, "whole batches are read"
            first = index * batch_size
            return tuple(a[first + start : first + stop] for a in arrays_of_all)

        def __getitem__(self, index: int) -> tuple:
            raise AssertionError("whole batches are read")

    return Rows()


def _strategy(
    layout: Layout, tfdp: Any, compression: str | None = None, backend: str = "auto"
) -> Any:
    # So slow that everything that can be is compressed.
    slow = tfdp.options.Links(tfdp.options.Link(0.0, 1.0), tfdp.options.Link(0.0, 1.0))
    options = tfdp.CommunicationOptions(
        compression=compression,
        links=slow if compression else None,
        backend=backend,
    )
    if layout.num_workers > 1:
        return tfdp.MultiWorkerMirroredStrategy(communication=options)
    import tfdp.testing

    tfdp.testing.logical_cpus(layout.devices)
    devices = [f"/cpu:{i}" for i in range(layout.devices)]
    return tfdp.MirroredStrategy(devices, communication=options)


def _model(keras: Any, units: int, learning_rate: Any, dropout: float) -> Any:
    class Model(keras.Sequential):
        """Lists each metric twice, as `super().metrics` with attributes does."""

        @property
        def metrics(self) -> list:
            return 2 * super().metrics

    layers = [
        keras.Input((4,)),
        keras.layers.Dense(units, activation="tanh"),
        *([keras.layers.Dropout(dropout)] if dropout else []),
        keras.layers.Dense(1),
    ]
    model = Model(layers)
    metrics = ["mae", _sum_from_three(keras)]
    model.compile(keras.optimizers.Adam(learning_rate), "mse", metrics=metrics)
    return model


def _sum_from_three(keras: Any) -> Any:
    """A metric that begins the first epoch with three, and the others with zero."""

    class Sum(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="sum")
            begin = keras.initializers.Constant(3.0)
            self.total = self.add_variable((), begin, name="total")

        def update_state(self, y: Any, prediction: Any, sample_weight: Any = None):
            self.total.assign_add(keras.ops.sum(prediction))

        def result(self) -> Any:
            return keras.ops.convert_to_tensor(self.total)

    return Sum()


def _callbacks(keras: Any, tfdp: Any, everything: bool, stage: int, steps: int) -> list:
    chosen = [tfdp.callbacks.GradientAccumulation(steps=steps)]
    if everything or stage > 1:
        chosen.append(tfdp.callbacks.ShardedOptimizer(stage=stage))
    if not everything:
        return chosen
    return [
        *chosen,
        tfdp.callbacks.LossScaling(initial_scale=2.0**10, growth_steps=3),
        tfdp.callbacks.LearningRateWarmup(steps=4),
        keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=0.5),
        keras.callbacks.EarlyStopping(
            "val_loss", patience=3, restore_best_weights=True
        ),
    ]


def arrays() -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(NUM_SAMPLES, 4)).astype("float32")
    return x, (np.sin(x[:, :1]) + 0.5 * x[:, 1:2]).astype("float32")


def _killer(
    keras: Any,
    rank: int,
    *,
    step: int,
    at: int | None,
    number: int,
    backup: str | None = None,
) -> Any:
    """A callback that sends a worker a signal at the end of a step.

    Args:
        keras: The module.
        rank: Int, this worker's.
        step: Int, or 0 for before the first one, -1 for after the last one.
        at: Int, the worker that is sent it, or `None` for all.
        number: Int, of the signal.
        backup: String, a file that is waited for before: saves are in the background.
    """
    at = rank if at is None else at

    class Killer(keras.callbacks.Callback):
        steps = 0

        def on_train_begin(self, logs: Any = None) -> None:
            if step == 0 and rank == at:
                os.kill(os.getpid(), number)

        def on_train_end(self, logs: Any = None) -> None:
            if step == -1 and rank == at:
                os.kill(os.getpid(), number)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            if self.steps == step and rank == at:
                if backup is not None:
                    wait_until(lambda: os.path.exists(backup), backup)
                os.kill(os.getpid(), number)

    return Killer()


def _crash_in_save(number: int, rank: int) -> None:
    from tfdp.checkpoint import writer

    replace, count = writer.replace_index, [0]

    def replace_or_die(*arguments: Any) -> None:
        count[0] += 1
        if count[0] == number and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*arguments)

    writer.replace_index = replace_or_die


def _set_memory(root: str, *, lacks_copy: bool) -> None:
    from tfdp.checkpoint import host_memory, memory_backups

    host_memory.ROOT = root
    copy, count = memory_backups.copy_to_host, [0]

    def copy_or_fail(*arguments: Any) -> Any:
        count[0] += 1
        if lacks_copy and count[0] > 1:
            raise MemoryError("no room")
        return copy(*arguments)

    memory_backups.copy_to_host = copy_or_fail


def _fill_disk(number: int) -> None:
    from tfdp.checkpoint import writer

    write, count = writer.write_shards, [0]

    def write_or_fail(*arguments: Any) -> Any:
        count[0] += 1
        if count[0] >= number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    writer.write_shards = write_or_fail


def _die_at_second_put(backup: str) -> None:
    from tfdp.checkpoint import files
    from tfdp.checkpoint.object_store import ObjectStore

    files.SHARD_BYTES = 64  # several parts
    upload, count = ObjectStore._upload, [0]

    def upload_or_die(self: ObjectStore, *arguments: Any) -> None:
        count[0] += f"/{backup}/" in self.path
        if count[0] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        upload(self, *arguments)

    ObjectStore._upload = upload_or_die
