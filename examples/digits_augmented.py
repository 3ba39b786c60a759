"""Handwritten digits with random augmentation, alike on any number of workers.

    tfdp run -n 2 examples/digits_augmented.py

Each image is shifted, given more or less contrast, and covered with noise at random, by
numbers that follow from its index and the epoch alone. So a worker prepares its own
rows of each batch only, and all together train on the images of one device
(`python examples/digits_augmented.py`): the digest at the end is the same.
"""

from __future__ import annotations

import argparse
import hashlib

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import tfdp

SEED = 7
TRAIN_IMAGES = 1408  # 22 batches of 64; the other 389 images are the test set
MOST_SHIFT = 1  # pixels


def load_data() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """The digits, shuffled once and for all: the split is the same in every run."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images = images[order].reshape(-1, 8, 8, 1).astype("float32") / 16.0
    labels = labels[order].astype("int32")
    split = TRAIN_IMAGES
    return (images[:split], labels[:split]), (images[split:], labels[split:])


def augment(index: tf.Tensor, epoch: tf.Tensor, image: tf.Tensor) -> tf.Tensor:
    """Change an image at random, in each epoch otherwise.

    Args:
        index: Scalar int64 tensor, which image it is.
        epoch: Scalar int64 tensor.
        image: Tensor of shape `(8, 8, 1)`.
    """
    # Two numbers make a seed; others follow from it, one for each use.
    seed = tf.stack([index, epoch])
    for_shift, for_light, for_noise = tf.unstack(tf.random.split(seed, 3))
    padded = tf.pad(image, [[MOST_SHIFT, MOST_SHIFT], [MOST_SHIFT, MOST_SHIFT], [0, 0]])
    image = tf.image.stateless_random_crop(padded, (8, 8, 1), for_shift)
    image = tf.image.stateless_random_contrast(image, 0.8, 1.2, for_light)
    image = tf.clip_by_value(image, 0.0, 1.0)
    return image + tf.random.stateless_normal((8, 8, 1), for_noise, stddev=0.05)


def augmented(
    images: np.ndarray, labels: np.ndarray, epochs: int, batch_size: int
) -> tf.data.Dataset:
    """All epochs, one after the other: each has its number in the seeds."""
    rows = tf.data.Dataset.from_tensor_slices((images, labels))
    # The index is that of the image, whichever place shuffling gives it.
    rows = rows.enumerate().shuffle(len(images), seed=SEED).repeat(epochs)
    rows = rows.enumerate()

    def prepare(place: tf.Tensor, row: tuple) -> tuple[tf.Tensor, tf.Tensor]:
        index, (image, label) = row
        return augment(index, place // len(images), image), label

    rows = rows.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
    return rows.batch(batch_size).prefetch(tf.data.AUTOTUNE)


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def digest_of(dataset: tf.data.Dataset, strategy: tf.distribute.Strategy) -> str:
    """A hash of the images of all epochs, put together from all workers' rows."""
    with strategy.scope():
        inputs = keras.Input((8, 8, 1))
        unchanged = keras.Model(inputs, keras.layers.Identity()(inputs))
        unchanged.compile()
    images = unchanged.predict(dataset, verbose=0)
    return hashlib.sha256(np.ascontiguousarray(images).tobytes()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="global")
    parser.add_argument("--short", action="store_true", help="a few epochs, for CI")
    args = parser.parse_args()
    epochs = min(args.epochs, 4) if args.short else args.epochs
    batch_size = args.batch_size

    strategy = tfdp.auto_strategy()
    keras.utils.set_random_seed(SEED)  # the same on every worker
    (images, labels), test = load_data()
    with strategy.scope():
        model = build_model()
        model.compile(
            keras.optimizers.AdamW(2e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    dataset = augmented(images, labels, epochs, batch_size)
    steps = len(images) // batch_size
    history = model.fit(dataset, epochs=epochs, steps_per_epoch=steps).history
    results = model.evaluate(*test, batch_size=batch_size, verbose=0, return_dict=True)
    digest = digest_of(dataset, strategy)
    if strategy.extended.should_checkpoint:
        print(f"images of all epochs: {digest}")
        print(f"last training loss: {history['loss'][-1]:.4f}")
        print(f"test accuracy: {100 * results['accuracy']:.2f} %")


if __name__ == "__main__":
    main()
