"""A head on a frozen base with BatchNormalization, then fine-tuning of all."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.docs.published.bed import Bed

SIZE = (36, 36)  # Differs: 150 x 150 pixels on the page, of photos.
BATCH_SIZE = 32


def pretrained_base() -> keras.Model:
    """Differs: some layers as Xception has them, for its weights are a download.

    Its BatchNormalization is synchronized: Keras 3 trains it where the whole model
    trains, in spite of `training=False`.
    """
    inputs = keras.Input((*SIZE, 3))
    x = inputs
    for filters in (8, 16):
        x = keras.layers.SeparableConv2D(filters, 3, strides=2, use_bias=False)(x)
        x = keras.layers.BatchNormalization(synchronized=True)(x)
        x = keras.layers.Activation("relu")(x)
    base = keras.Model(inputs, x)
    random = np.random.default_rng(5)
    base.set_weights([w + random.uniform(0, 0.2, w.shape) for w in base.get_weights()])
    return base


def main(bed: Bed) -> dict:
    strategy = bed.strategy()

    def dataset(x, y):
        x = np.repeat(x[..., None], 3, axis=3)
        pairs = tf.data.Dataset.from_tensor_slices((x, (y % 2).astype("int64")))
        pairs = pairs.map(lambda image, label: (tf.image.resize(image, SIZE), label))
        return pairs.cache().batch(BATCH_SIZE).prefetch(buffer_size=10)

    training, validation = (dataset(*rows) for rows in bed.pictures())
    with strategy.scope():
        base = pretrained_base()
        base.trainable = False
        inputs = keras.Input(shape=(*SIZE, 3))
        # Differs: without flips, rotations and Dropout, which draw on each replica.
        x = keras.layers.Rescaling(scale=1 / 127.5, offset=-1)(inputs)
        x = base(x, training=False)
        x = keras.layers.GlobalAveragePooling2D()(x)
        model = keras.Model(inputs, keras.layers.Dense(1)(x))

    frozen = base.get_weights()

    def fit(optimizer) -> dict:
        with strategy.scope():
            model.compile(
                optimizer=optimizer(),
                loss=keras.losses.BinaryCrossentropy(from_logits=True),
                metrics=[keras.metrics.BinaryAccuracy()],
            )
        return model.fit(training, epochs=2, validation_data=validation).history

    histories = {"head": fit(keras.optimizers.Adam)}
    for before, after in zip(frozen, base.get_weights(), strict=True):
        np.testing.assert_array_equal(after, before)
    base.trainable = True
    histories["all"] = fit(lambda: keras.optimizers.Adam(1e-5))
    return {"histories": histories, "weights": dict(enumerate(model.get_weights()))}
