"""One worker of one core that trains by Keras `fit` on JPEGs that it prepares."""

from __future__ import annotations

import gc
import time
from typing import Any

from tfdp.launch.bench.channel import Variants, work

SIZE = 224
# Elements of a dataset of which the calls of `map` are counted: the last batch is not
# whole.
NUM_COUNTED = 5000
# The first step of a block is not timed: it may be traced.
SKIPPED = 1
# A process that takes less than this of each of so many moments has nothing to do.
_QUIET_SECONDS, _MOMENT_SECONDS, _NUM_MOMENTS = 0.003, 0.05, 6


def prepare(number: Any, element: tuple) -> tuple:
    """Decode, crop, resize, flip and change colours, by the element's number.

    The operations are those of `tools.bench.input_rows_torch_worker`, alike on any
    number of workers.
    """
    import tensorflow as tf

    name, label = element
    encoded = tf.io.read_file(name)
    seed = tf.stack([tf.cast(number, tf.int32), 7])
    drawn = tf.random.stateless_uniform([8], seed)
    window = _window(tf.io.extract_jpeg_shape(encoded)[:2], drawn[:4])
    # As Pillow decodes: the default of TensorFlow is a faster, coarser transform.
    picture = tf.io.decode_and_crop_jpeg(
        encoded, window, channels=3, dct_method="INTEGER_ACCURATE"
    )
    is_flipped = drawn[4] < 0.5
    picture = tf.cond(is_flipped, lambda: tf.reverse(picture, [1]), lambda: picture)
    picture = tf.image.resize(picture, (SIZE, SIZE), antialias=True)
    pixels = _change_colours(tf.reshape(picture, [-1, 3]), drawn[5:])
    return tf.reshape(pixels, (SIZE, SIZE, 3)), label


def _change_colours(pixels: Any, drawn: Any) -> Any:
    """Change brightness, contrast and colour by up to 40 %: `[num_pixels, 3]`."""
    import tensorflow as tf

    brightness, contrast, colour = tf.unstack(0.6 + 0.8 * drawn)
    luma = tf.constant([[0.299], [0.587], [0.114]])
    pixels = tf.minimum(pixels * (brightness / 255.0), 1.0)
    mean = tf.matmul(tf.reduce_mean(pixels, axis=0, keepdims=True), luma)
    pixels = tf.clip_by_value(contrast * pixels + (1 - contrast) * mean, 0.0, 1.0)
    # Between each pixel and its grey.
    mixed = colour * tf.eye(3) + (1 - colour) * luma
    return tf.clip_by_value(tf.matmul(pixels, mixed), 0.0, 1.0)


def _window(shape: Any, drawn: Any) -> Any:
    """Offset and size of a crop of 8 to 100 % of a picture: `[4]`, int32."""
    import tensorflow as tf

    height, width = tf.unstack(tf.cast(shape, tf.float32))
    area = height * width * (0.08 + 0.92 * drawn[0])
    ratio = tf.exp((2 * drawn[1] - 1) * tf.math.log(4 / 3))
    rows = tf.minimum(tf.floor(tf.sqrt(area / ratio)), height)
    columns = tf.minimum(tf.floor(tf.sqrt(area * ratio)), width)
    top, left = drawn[2] * (height - rows), drawn[3] * (width - columns)
    return tf.cast(tf.stack([top, left, rows, columns]), tf.int32)


def pipeline(paths: list[str], batch: int) -> Any:
    """The global batches, made by one thread."""
    import tensorflow as tf

    labels = [number % 10 for number in range(len(paths))]
    files = tf.data.Dataset.from_tensor_slices((paths, labels))
    files = files.shuffle(len(paths), seed=1).repeat().enumerate()
    return files.map(prepare).batch(batch).prefetch(2)


def build() -> Any:
    """A model that costs little beside its input."""
    import keras

    return keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 3)),
            keras.layers.Conv2D(16, 16, strides=16, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10),
        ]
    )


def num_calls(strategy: Any, batch: int) -> int:
    """Train on a few numbers, and count the calls of `map` on this worker.

    Args:
        strategy: A tfdp strategy.
        batch: Int, rows of a global batch.

    Returns:
        Int, for `NUM_COUNTED` elements on all workers.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    calls = []

    def count(x: np.ndarray) -> np.ndarray:
        calls.append(x)
        return x

    def prepare(x: tf.Tensor) -> tuple:
        counted = tf.numpy_function(count, [x], tf.float32, stateful=False)
        return tf.ensure_shape(counted, x.shape), x

    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    numbers = np.arange(NUM_COUNTED, dtype="float32")[:, None] / NUM_COUNTED
    data = tf.data.Dataset.from_tensor_slices(numbers).shuffle(NUM_COUNTED, seed=1)
    model.fit(data.map(prepare).batch(batch), verbose=0)
    return len(calls)


def wait_until_quiet() -> tuple[float, float]:
    """Wait until this process has read ahead as far as it does.

    Returns:
        Tuple of floats: when it last was busy, and its CPU time.
    """
    busy_at, cpu, num_quiet = time.time(), time.process_time(), 0
    while num_quiet < _NUM_MOMENTS:
        time.sleep(_MOMENT_SECONDS)
        before, cpu = cpu, time.process_time()
        num_quiet = num_quiet + 1 if cpu - before < _QUIET_SECONDS else 0
        if num_quiet == 0:
            busy_at = time.time()
    return busy_at, cpu


def make_variants(setup: dict[str, Any]) -> Variants:
    """Make a model that trains with rows taken early, and one with rows taken late."""
    from tools.bench.meters import pin_to_core

    pin_to_core(setup["rank"])
    from tfdp.launch.bench.training import make_strategy

    strategy = make_strategy({**setup, "strategy": "tfdp"})

    import keras

    from tfdp.training.data import distribute
    from tfdp.training.data.early_rows import Division, divide_early

    class Clock(keras.callbacks.Callback):
        """Clock of a block, from a full pipeline to a full one: of as many batches."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == SKIPPED - 1:
                _, cpu = wait_until_quiet()
                self.begin = time.time(), cpu
            if batch == self.params["steps"] - 1:
                self.end = wait_until_quiet()

    dataset = pipeline(setup["paths"], setup["batch"])
    with strategy.scope():
        model = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(1e-3), loss)

    def block(divide: Any, steps: int) -> dict[str, float]:
        distribute.divide_early = divide
        clock = Clock()
        model.fit(
            dataset, steps_per_epoch=SKIPPED + steps, verbose=0, callbacks=[clock]
        )
        gc.collect()  # an iterator would read ahead in the turn of the others
        (begin, cpu), (end, cpu_at_end) = clock.begin, clock.end
        return {"begin": begin, "end": end, "cpu_seconds": (cpu_at_end - cpu) / steps}

    return {
        "early": lambda steps: block(divide_early, steps),
        "late": lambda steps: block(lambda *_: Division(), steps),
        "calls": lambda _: num_calls(strategy, setup["batch"]),
    }


if __name__ == "__main__":
    work(make_variants)
