"""Loops of the user's own: over batches, by an iterator, and within a `tf.function`."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.docs.published.bed import Bed

EPOCHS = 3
SUM = tf.distribute.ReduceOp.SUM


def regularized_model() -> keras.Model:
    """It is built by its first step."""
    penalty = keras.regularizers.L2(1e-5)
    layers = keras.layers

    def convolution(filters: int) -> keras.layers.Layer:
        return layers.Conv2D(filters, 3, activation="relu", kernel_regularizer=penalty)

    return keras.Sequential(
        [
            convolution(32),
            layers.MaxPooling2D(),
            convolution(64),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu", kernel_regularizer=penalty),
            layers.Dense(10, kernel_regularizer=penalty),
        ]
    )


def main(bed: Bed) -> dict:  # noqa: C901 one program, in the order of the page
    strategy = bed.strategy()
    # The scale is float32 on the page, too.
    (x, y), (x_test, y_test) = (
        (x[..., None] / np.float32(255), y) for x, y in bed.pictures()
    )
    batch_size = bed.per_replica(64, strategy) * strategy.num_replicas_in_sync
    training = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x))
    training = strategy.experimental_distribute_dataset(training.batch(batch_size))
    test = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(batch_size)
    distributed_test = strategy.experimental_distribute_dataset(test)
    with strategy.scope():
        loss_of_rows = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True,
            reduction=None,  # Differs: an enumeration of Keras 2.
        )
        test_loss = keras.metrics.Mean(name="test_loss")
        train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
        test_accuracy = keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")
        model = regularized_model()
        optimizer = keras.optimizers.Adam(learning_rate=0.001)
        checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)

    def train_step(inputs):
        images, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = tf.nn.compute_average_loss(loss_of_rows(labels, predictions))
            if model.losses:
                loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        train_accuracy.update_state(labels, predictions)
        return loss

    def test_step(inputs):
        images, labels = inputs
        predictions = model(images, training=False)
        test_loss.update_state(loss_of_rows(labels, predictions))
        test_accuracy.update_state(labels, predictions)

    @tf.function
    def distributed_train_step(batch):
        return strategy.reduce(SUM, strategy.run(train_step, args=(batch,)), axis=None)

    @tf.function
    def distributed_test_step(batch):
        return strategy.run(test_step, args=(batch,))

    def read(*metrics) -> list[float]:
        values = [float(metric.result()) for metric in metrics]
        for metric in metrics:
            metric.reset_state()  # Differs: `reset_states` on the page.
        return values

    epochs = []
    for epoch in range(EPOCHS):
        losses = [distributed_train_step(batch) for batch in training]
        for batch in distributed_test:
            distributed_test_step(batch)
        if epoch % 2 == 0:
            checkpoint.save("training_checkpoints/ckpt")
        mean = float(sum(losses) / len(losses))
        epochs.append([mean, *read(train_accuracy, test_loss, test_accuracy)])

    eval_accuracy = keras.metrics.SparseCategoricalAccuracy(name="eval_accuracy")
    plain = regularized_model()
    restored = tf.train.Checkpoint(optimizer=keras.optimizers.Adam(), model=plain)
    restored.restore(tf.train.latest_checkpoint("training_checkpoints"))

    @tf.function
    def eval_step(images, labels):
        eval_accuracy.update_state(labels, plain(images, training=False))

    for images, labels in test:
        eval_step(images, labels)

    by_iterator = []
    for _ in range(EPOCHS):
        iterator = iter(training)
        # Differs: fewer steps than an epoch has, as there, of less data.
        losses = [distributed_train_step(next(iterator)) for _ in range(2)]
        by_iterator.append([float(sum(losses) / len(losses)), *read(train_accuracy)])

    @tf.function
    def distributed_train_epoch(dataset):
        # Differs: a constant of the losses' type, which is float32 on the page.
        total = tf.constant(0.0, keras.config.floatx())
        num_batches = 0
        for batch in dataset:
            losses = strategy.run(train_step, args=(batch,))
            total += strategy.reduce(SUM, losses, axis=None)
            num_batches += 1
        return total / tf.cast(num_batches, total.dtype)

    in_function = [
        [float(distributed_train_epoch(training)), *read(train_accuracy)]
        for _ in range(EPOCHS)
    ]
    return {
        "epochs": epochs,
        "restored": float(eval_accuracy.result()),
        "by_iterator": by_iterator,
        "in_function": in_function,
        "weights": dict(enumerate(model.get_weights())),
        "iterations": int(optimizer.iterations.numpy()),
    }
