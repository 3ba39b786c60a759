"""ResNet-18 on CIFAR-10: what a step costs, how much of it is communication.

    tfdp run -n 2 examples/cifar_resnet.py

Without `--data`, the folder of CIFAR-10's binary version, the images are made up. After
each epoch come the time of a step, s (the communication fraction) and the accuracy on
images that were not trained with; the output folder has them as `statistics.csv`, and a
model for each epoch that plain Keras opens (`serve_latency.py`). `python -m tools.bench
buckets` runs this script once for each bucket size.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from cifar_data import (  # type: ignore[import-not-found]  # beside this script
    NUM_CLASSES,
    SIZE,
    Images,
    make_images,
    read_cifar,
)

import tfdp

SEED = 7
PADDING = 4  # pixels by which a training image may be shifted
MOMENTUM = 0.9  # of the moving statistics: Keras's 0.99 lags behind in short epochs
LAST_STEPS = 20  # of an epoch, over which its statistics go


def convolution(x: Any, filters: int, size: int, stride: int, sync: bool) -> Any:
    """A convolution without bias, then normalization by the batch's statistics."""
    x = keras.layers.Conv2D(
        filters,
        size,
        stride,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
    )(x)
    return keras.layers.BatchNormalization(momentum=MOMENTUM, synchronized=sync)(x)


def basic_block(x: Any, filters: int, stride: int, sync: bool) -> Any:
    y = keras.layers.ReLU()(convolution(x, filters, 3, stride, sync))
    y = convolution(y, filters, 3, 1, sync)
    if stride != 1 or x.shape[-1] != filters:
        x = convolution(x, filters, 1, stride, sync)
    return keras.layers.ReLU()(keras.layers.Add()([x, y]))


def build_model(width: int, train: Images, sync: bool) -> keras.Model:
    """ResNet-18 of He et al. 2015, with their CIFAR stem: 3x3, and no pooling."""
    pixels = train.images[:10_000].astype("float32")  # enough to know the colours
    inputs = keras.Input((SIZE, SIZE, 3))
    x = keras.layers.Normalization(
        mean=pixels.mean((0, 1, 2)), variance=pixels.var((0, 1, 2))
    )(inputs)
    x = keras.layers.ReLU()(convolution(x, width, 3, 1, sync))
    for stage in range(4):
        filters = width * 2**stage
        x = basic_block(x, filters, 1 if stage == 0 else 2, sync)
        x = basic_block(x, filters, 1, sync)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(NUM_CLASSES)(x), name="resnet18")


def shift_and_flip(images: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    """Each image shifted at random, and half of them mirrored: alike in every run."""
    count = tf.shape(images)[0]
    shape = tf.stack([count, 3])
    draws = tf.random.stateless_uniform(shape, [SEED, step])  # [batch, 3], 0 to 1
    shifts = tf.cast(draws[:, :2] * (2 * PADDING + 1), tf.int32)
    rows = shifts[:, :1] + tf.range(SIZE)  # [batch, 32]
    columns = shifts[:, 1:] + tf.range(SIZE)
    columns = tf.where(draws[:, 2:] < 0.5, columns[:, ::-1], columns)
    border = [PADDING, PADDING]
    padded = tf.pad(images, [[0, 0], border, border, [0, 0]])
    return tf.gather(
        tf.gather(padded, rows, axis=1, batch_dims=1), columns, axis=2, batch_dims=1
    )


def training_data(train: Images, batch_size: int) -> tf.data.Dataset:
    """Global batches without end; every replica gets its share of each."""
    dataset = tf.data.Dataset.from_tensor_slices((train.images, train.labels))
    dataset = dataset.shuffle(len(train.labels), seed=SEED).repeat()
    dataset = dataset.batch(batch_size, drop_remainder=True).enumerate()
    return dataset.map(
        lambda step, batch: (shift_and_flip(batch[0], step), batch[1])
    ).prefetch(2)


class Statistics(keras.callbacks.Callback):
    """After each epoch a row in `statistics.csv`, and a line on the screen."""

    def __init__(
        self,
        monitor: Any,
        strategy: tf.distribute.Strategy,
        path: Path,
        batch_size: int,
    ) -> None:
        super().__init__()
        self.monitor = monitor
        self.strategy = strategy
        self.path = path
        self.batch_size = batch_size

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        last = self.monitor.recent(LAST_STEPS)
        row = {
            "epoch": epoch + 1,
            "step_seconds": last.step_seconds,
            "samples_per_second": self.batch_size / last.step_seconds,
            "compute_seconds": last.compute_seconds,
            "communication_seconds": last.communication_seconds,
            "exposed_seconds": last.exposed_seconds,
            "communication_fraction": last.communication_fraction,
            "num_buckets": self.num_buckets(),
            **(logs or {}),
        }
        if not self.strategy.extended.should_checkpoint:
            return  # the chief tells, and writes
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, row)
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)
        print(
            f"\nepoch {row['epoch']}: {row['step_seconds']:.3f} s per step, "
            f"s = {100 * row['communication_fraction']:.1f} %, "
            f"validation accuracy {100 * row['val_accuracy']:.2f} %",
            flush=True,
        )

    def num_buckets(self) -> int:
        if self.strategy.num_replicas_in_sync == 1:
            return 0
        return len(self.strategy.communication_plan(self.model).buckets)


def load(args: argparse.Namespace) -> tuple[Images, Images]:
    """The images to train and to test with; says which they are."""
    if args.data is None:
        print(f"data: {args.images:,} made-up images of {NUM_CLASSES} textures")
        return make_images(args.images, SEED)
    train, test = read_cifar(args.data)
    print(f"data: CIFAR-10, {len(train.labels):,} images, from {args.data}")
    return train, test


def count(text: str) -> int:
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"it must be at least 1. Received: {text}")
    return int(text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="of CIFAR-10, the binary version")
    add("--images", type=count, default=10_000, help="to make up, without --data")
    add("--epochs", type=count, default=10)
    add("--steps-per-epoch", type=count, help="default: as many as there are images")
    add("--width", type=count, default=64, help="64 is ResNet-18; fewer for a CPU")
    add("--batch-per-worker", type=count, default=32, help="images of each replica")
    add("--accumulation", type=count, default=2, help="steps of an update")
    add(
        "--batch-norm",
        choices=("synchronized", "local"),
        default="synchronized",
        help="statistics of the global batch, or of each replica's own part",
    )
    add("--bucket-mb", type=float, default=25.0)
    add("--output", type=Path, metavar="DIR", default=Path("cifar-output"))
    add("--short", action="store_true", help="a few steps, for CI")
    args = parser.parse_args()
    if args.steps_per_epoch == 1:
        parser.error("--steps-per-epoch must be at least 2: the first one is traced")
    if args.short:
        args.images, args.epochs = min(args.images, 1000), min(args.epochs, 2)
        args.steps_per_epoch = min(args.steps_per_epoch or 12, 12)
    return args


def callbacks(
    args: argparse.Namespace, strategy: tf.distribute.Strategy, batch_size: int
) -> list[keras.callbacks.Callback]:
    checkpoints = args.output / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    monitor = tfdp.callbacks.CommunicationMonitor(args.output)
    return [
        tfdp.callbacks.GradientAccumulation(steps=args.accumulation),
        monitor,
        Statistics(monitor, strategy, args.output / "statistics.csv", batch_size),
        # All workers call it; the files come out as one.
        keras.callbacks.ModelCheckpoint(str(checkpoints / "epoch-{epoch:02d}.keras")),
    ]


def main() -> None:
    args = parse()
    try:  # before the cluster starts: nobody waits for a worker without data
        train, test = load(args)
        options = tfdp.CommunicationOptions(bucket_mb=args.bucket_mb)
    except ValueError as error:
        sys.exit(f"cifar_resnet.py: error: {error}")

    strategy = tfdp.auto_strategy(communication=options)
    keras.utils.set_random_seed(SEED)  # the same on every worker
    with strategy.scope():
        model = build_model(args.width, train, args.batch_norm == "synchronized")
        model.compile(
            optimizer=keras.optimizers.AdamW(5e-4, weight_decay=1e-4),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    batch_size = args.batch_per_worker * strategy.num_replicas_in_sync
    tested = tf.data.Dataset.from_tensor_slices((test.images, test.labels))
    model.fit(
        training_data(train, batch_size),
        epochs=args.epochs,
        steps_per_epoch=args.steps_per_epoch or max(2, len(train.labels) // batch_size),
        validation_data=tested.batch(batch_size),
        callbacks=callbacks(args, strategy, batch_size),
    )


if __name__ == "__main__":
    main()
