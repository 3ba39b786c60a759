"""`fit` on several workers: sharding off, files by hand, and backups."""

from __future__ import annotations

import os

import keras
import numpy as np
import tensorflow as tf

from tests.docs.published.bed import Bed

# Differs: 70 and 20 on the page; backups after every 30 steps there.
STEPS = 7
FURTHER_STEPS = 2
BACKUP_STEPS = 3


def endless_dataset(bed: Bed, batch_size: int) -> tf.data.Dataset:
    (x, y), _ = bed.pictures()
    x = x / np.float32(255)
    dataset = tf.data.Dataset.from_tensor_slices((x, y.astype(np.int64)))
    return dataset.shuffle(60000).repeat().batch(batch_size)


def compiled_model() -> keras.Model:
    model = keras.Sequential(
        [
            keras.layers.InputLayer(input_shape=(28, 28)),
            keras.layers.Reshape(target_shape=(28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(learning_rate=0.001),
        metrics=["accuracy"],
    )
    return model


def is_chief(task_type: str | None, task_id: int | None) -> bool:
    return (task_type == "worker" and task_id == 0) or task_type is None


def write_path(path: str, task_type: str | None, task_id: int | None) -> str:
    """The path on the first worker, and one in a folder of its own on the others."""
    folder, name = os.path.split(path)
    if not is_chief(task_type, task_id):
        folder = os.path.join(folder, f"workertemp_{task_id}")
        tf.io.gfile.makedirs(folder)
    return os.path.join(folder, name)


def main(bed: Bed) -> dict:
    strategy = bed.strategy()
    with strategy.scope():
        model = compiled_model()
    # The first part of the page: `main.py`.
    batch_size = bed.per_replica(64, strategy) * strategy.num_replicas_in_sync
    dataset = endless_dataset(bed, batch_size)
    histories = {"main": model.fit(dataset, epochs=3, steps_per_epoch=STEPS).history}

    options = tf.data.Options()
    off = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_distribute.auto_shard_policy = off
    dataset = endless_dataset(bed, batch_size=64)
    # The page trains on the dataset without the option: with it, each worker has rows
    # of its own.
    dataset.with_options(options)

    # Differs: one device, and two of a process, have no cluster.
    resolver = strategy.cluster_resolver
    task = (resolver.task_type, resolver.task_id) if resolver else (None, None)
    # Differs: Keras 3 saves into files with an ending.
    target = str(bed.folder / "keras-model.keras")
    own = write_path(target, *task)
    model.save(own)
    if not is_chief(*task):
        tf.io.gfile.rmtree(os.path.dirname(own))
    bed.wait_for_all("saved")  # Differs: the page does not wait for the first worker.
    loaded = keras.models.load_model(target)
    single = endless_dataset(bed, batch_size=64)
    histories["loaded"] = loaded.fit(single, epochs=2, steps_per_epoch=2).history

    folder = str(bed.folder / "ckpt")
    checkpoint = tf.train.Checkpoint(model=model)
    own = write_path(folder, *task)
    manager = tf.train.CheckpointManager(checkpoint, directory=own, max_to_keep=1)
    manager.save()
    if not is_chief(*task):
        tf.io.gfile.rmtree(own)
    bed.wait_for_all("written")  # Differs: as above.
    before = model.get_weights()
    checkpoint.restore(tf.train.latest_checkpoint(folder))
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(new, old)
    further = {"epochs": 2, "steps_per_epoch": FURTHER_STEPS}
    histories["restored"] = model.fit(dataset, **further).history

    for name, every in {"first": {}, "again": {}, "steps": BACKUP_STEPS}.items():
        save_freq = {"save_freq": every} if every else {}
        backups = keras.callbacks.BackupAndRestore(
            backup_dir=str(bed.folder / "backup"), **save_freq
        )
        with strategy.scope():
            model = compiled_model()
        histories[name] = model.fit(
            dataset, epochs=3, steps_per_epoch=STEPS, callbacks=[backups]
        ).history
    return {
        "histories": histories,
        "weights": dict(enumerate(model.get_weights())),
        "loaded": dict(enumerate(loaded.get_weights())),
    }
