"""The guide's two examples: `fit`, and a loop of a loss that is averaged by hand."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.docs.published.bed import Bed

RATES = {5: 0.1, 10: 0.15, 20: 0.175}


def regression_model() -> keras.Model:
    penalty = keras.regularizers.L2(1e-4)
    return keras.Sequential(
        [keras.layers.Dense(1, input_shape=(1,), kernel_regularizer=penalty)]
    )


def ones(rows: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(rows)


def main(bed: Bed) -> dict:
    strategy = bed.strategy()
    with strategy.scope():
        variable = tf.Variable(1.0)
        model = regression_model()
        model.compile(loss="mse", optimizer="sgd")
    default = tf.distribute.get_strategy()
    dataset = ones(100).batch(10)
    histories = [model.fit(dataset, epochs=2).history]
    evaluated = model.evaluate(dataset)
    x, y = np.ones((100, 1)), np.ones((100, 1))
    histories.append(model.fit(x, y, epochs=2, batch_size=10).history)

    batch_size = bed.per_replica(5, strategy) * strategy.num_replicas_in_sync
    with strategy.scope():
        looped = regression_model()
        # Differs: the page looks the rate up and does not use it.
        optimizer = keras.optimizers.SGD(RATES[batch_size])
    distributed = strategy.experimental_distribute_dataset(ones(100).batch(batch_size))
    loss_of_rows = keras.losses.BinaryCrossentropy(
        from_logits=True,
        reduction=None,  # Differs: `Reduction.NONE` of Keras 2 on the page.
    )

    def train_step(inputs):
        features, labels = inputs
        with tf.GradientTape() as tape:
            predictions = looped(features, training=True)
            loss = tf.nn.compute_average_loss(loss_of_rows(labels, predictions))
            if looped.losses:
                loss += tf.nn.scale_regularization_loss(tf.add_n(looped.losses))
        variables = looped.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    @tf.function
    def distributed_train_step(inputs):
        losses = strategy.run(train_step, args=(inputs,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    losses = [float(distributed_train_step(inputs)) for inputs in distributed]
    iterator = iter(distributed)
    losses += [float(distributed_train_step(next(iterator))) for _ in range(10)]
    return {
        "histories": dict(enumerate(histories)),
        "evaluated": evaluated,
        "losses": losses,
        "variable": float(variable),
        "reduced": float(default.reduce("SUM", 1.0, axis=None)),
        "weights": dict(enumerate(model.get_weights() + looped.get_weights())),
    }
