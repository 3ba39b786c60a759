"""One worker that trains by Keras `fit` on images that it decodes."""

from __future__ import annotations

import time
from typing import Any

from tfdp.bench.channel import Arms, work

NUM_IMAGES, SIZE, CROP = 256, 224, 96
# Steps at the begin that are not timed: traced, or of a pipeline that is still empty.
SKIPPED = 4


def images() -> tuple[Any, Any]:
    """JPEGs of smooth seeded pictures, and labels."""
    import numpy as np
    import tensorflow as tf

    rng = np.random.default_rng(0)
    encoded = []
    for _ in range(NUM_IMAGES):
        coarse = tf.constant(rng.uniform(0, 255, (14, 14, 3)), tf.float32)
        picture = tf.cast(tf.image.resize(coarse, (SIZE, SIZE)), tf.uint8)
        encoded.append(tf.io.encode_jpeg(picture).numpy())
    return np.array(encoded), rng.integers(0, 10, NUM_IMAGES)


def pipeline(batch: int) -> Any:
    """Decode, crop and flip by the element's index: alike on any number of workers."""
    import tensorflow as tf

    def prepare(index: tf.Tensor, element: tuple) -> tuple:
        encoded, label = element
        seed = tf.stack([tf.cast(index, tf.int32), 7])
        picture = tf.io.decode_jpeg(encoded, channels=3)
        picture = tf.image.stateless_random_crop(picture, (CROP, CROP, 3), seed)
        picture = tf.image.stateless_random_flip_left_right(picture, seed)
        return tf.cast(picture, tf.float32) / 255.0, label

    dataset = tf.data.Dataset.from_tensor_slices(images()).repeat().enumerate()
    return dataset.map(prepare).batch(batch).prefetch(2)


def make_arms(setup: dict[str, Any]) -> Arms:
    from tfdp.bench.training import make_strategy

    strategy = make_strategy({**setup, "strategy": "tfdp"})

    import keras

    from tfdp.data import distribute
    from tfdp.data.early_rows import Division, divide_early
    from tools.bench.input_rows import GLOBAL_BATCH

    class Clock(keras.callbacks.Callback):
        """Clock of the wall and of this process's CPU time."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == SKIPPED - 1:
                self.begin = time.perf_counter(), time.process_time()

    dataset = pipeline(GLOBAL_BATCH)
    with strategy.scope():
        inputs = keras.Input((CROP, CROP, 3))
        pooled = keras.layers.GlobalAveragePooling2D()(inputs)
        model = keras.Model(inputs, keras.layers.Dense(10)(pooled))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)

    def block(divide: Any, steps: int) -> dict[str, float]:
        distribute.divide_early = divide
        clock = Clock()
        model.fit(
            dataset, steps_per_epoch=SKIPPED + steps, verbose=0, callbacks=[clock]
        )
        wall, cpu = time.perf_counter(), time.process_time()
        return {
            "seconds": (wall - clock.begin[0]) / steps,
            "cpu_seconds": (cpu - clock.begin[1]) / steps,
        }

    return {
        "early": lambda steps: block(divide_early, steps),
        "late": lambda steps: block(lambda *_: Division(), steps),
    }


if __name__ == "__main__":
    work(make_arms)
