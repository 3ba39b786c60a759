"""Data and model of the multi-worker tutorial, with digits in place of MNIST."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits


def mnist_dataset(batch_size: int) -> tf.data.Dataset:
    """Digits in MNIST's shapes: [28, 28] images in 0 to 1, int64 labels, endless."""
    images, labels = load_digits(return_X_y=True)
    # scikit-learn carries 8x8 images with values up to 16: no download is needed.
    images = images.reshape(-1, 8, 8, 1).astype("float32") * (255.0 / 16.0)
    images = tf.image.resize(images, (28, 28)).numpy().squeeze(-1).astype("uint8")
    x_train = images / np.float32(255)
    y_train = labels.astype("int64")
    dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train))
    return dataset.shuffle(len(x_train)).repeat().batch(batch_size)


def build_and_compile_cnn_model() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((28, 28)),
            keras.layers.Reshape((28, 28, 1)),
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
