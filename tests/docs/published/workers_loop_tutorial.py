"""A loop with datasets of each worker's own, and a checkpoint of its position."""

from __future__ import annotations

import os
from multiprocessing import util

import keras
import numpy as np
import tensorflow as tf

from tests.docs.published.bed import Bed
from tests.docs.published.workers_fit_tutorial import is_chief, write_path

EPOCHS = 3
STEPS = 2  # Differs: 70 on the page, whose data has more.
GLOBAL_BATCH_SIZE = 128  # 64 a worker.


def shuffled_rows(bed: Bed) -> tf.data.Dataset:
    (x, y), _ = bed.pictures()
    x = x / np.float32(255)
    dataset = tf.data.Dataset.from_tensor_slices((x, y.astype(np.int64)))
    return dataset.shuffle(60000)


def regularized_model() -> keras.Model:
    penalty = keras.regularizers.L2(1e-5)
    options = {"activation": "relu", "kernel_regularizer": penalty}
    return keras.Sequential(
        [
            keras.Input(shape=(28, 28)),
            keras.layers.Reshape(target_shape=(28, 28, 1)),
            keras.layers.Conv2D(32, 3, **options),
            keras.layers.Flatten(),
            keras.layers.Dense(128, **options),
            keras.layers.Dense(10, kernel_regularizer=penalty),
        ]
    )


def main(bed: Bed) -> dict:
    strategy = bed.strategy()

    def dataset_fn(context):
        rows = context.get_per_replica_batch_size(GLOBAL_BATCH_SIZE)
        shard = (context.num_input_pipelines, context.input_pipeline_id)
        return shuffled_rows(bed).shard(*shard).batch(rows)

    with strategy.scope():
        model = regularized_model()
        dataset = strategy.distribute_datasets_from_function(dataset_fn)
        optimizer = keras.optimizers.RMSprop(learning_rate=0.001)
        accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")

    @tf.function
    def train_step(iterator):
        def step(inputs):
            x, y = inputs
            with tf.GradientTape() as tape:
                predictions = model(x, training=True)
                # Differs: `Reduction.NONE` of Keras 2 on the page.
                loss_of_rows = keras.losses.SparseCategoricalCrossentropy(
                    from_logits=True, reduction=None
                )
                loss = tf.nn.compute_average_loss(loss_of_rows(y, predictions))
                if model.losses:
                    loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))
            variables = model.trainable_variables
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            accuracy.update_state(y, predictions)
            return loss

        losses = strategy.run(step, args=(next(iterator),))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    epoch = tf.Variable(tf.constant(0, dtype=tf.int64), name="epoch")
    step_in_epoch = tf.Variable(tf.constant(0, dtype=tf.int64), name="step_in_epoch")
    # Differs: one device, and two of a process, have no cluster.
    resolver = strategy.cluster_resolver
    task = (resolver.task_type, resolver.task_id) if resolver else (None, None)
    if resolver:
        assert "chief" not in resolver.cluster_spec().as_dict()
    checkpoint = tf.train.Checkpoint(
        model=model, epoch=epoch, step_in_epoch=step_in_epoch
    )
    folder = os.path.join(util.get_temp_dir(), "ckpt")
    own = write_path(folder, *task)
    manager = tf.train.CheckpointManager(checkpoint, directory=own, max_to_keep=1)
    latest = tf.train.latest_checkpoint(folder)
    if latest:
        checkpoint.restore(latest)

    epochs = []
    while epoch.numpy() < EPOCHS:
        iterator = iter(dataset)
        losses = []
        while step_in_epoch.numpy() < STEPS:
            losses.append(float(train_step(iterator)))
            step_in_epoch.assign_add(1)
        epochs.append([sum(losses) / len(losses), float(accuracy.result())])
        accuracy.reset_state()  # Differs: `reset_states` on the page.
        manager.save()
        if not is_chief(*task):
            tf.io.gfile.rmtree(own)
        epoch.assign_add(1)
        step_in_epoch.assign(0)
    return {"epochs": epochs, "weights": dict(enumerate(model.get_weights()))}
