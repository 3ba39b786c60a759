"""Handwritten digits with a small CNN, on any number of devices or workers.

    tfdp run -n 2 examples/digits_cnn.py

The data are the 1,797 real 8x8 images that scikit-learn carries. The same script
runs on one device (`python examples/digits_cnn.py`), on all GPUs of a machine, or
on several machines; what communication takes is written to `--logs`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import tfdp

SEED = 7
TRAIN_IMAGES = 1408  # 22 batches of 64; the other 389 images are the test set


def load_data() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """The digits, shuffled once and for all: the split is the same in every run."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images = images[order].reshape(-1, 8, 8, 1).astype("float32") / 16.0
    labels = labels[order].astype("int32")
    split = TRAIN_IMAGES
    return (images[:split], labels[:split]), (images[split:], labels[split:])


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(128, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.4),
            keras.layers.Dense(10),
        ]
    )


def compile_model(model: keras.Model, num_steps: int) -> None:
    """The learning rate rises for a tenth of the steps, then falls to nothing."""
    warmup_steps = max(1, num_steps // 10)
    schedule = keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=0.0,
        warmup_target=3e-3,
        warmup_steps=warmup_steps,
        decay_steps=max(1, num_steps - warmup_steps),
    )
    model.compile(
        optimizer=keras.optimizers.AdamW(schedule, weight_decay=1e-2),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def print_communication(
    strategy: tf.distribute.Strategy,
    model: keras.Model,
    monitor: tfdp.callbacks.CommunicationMonitor,
) -> None:
    """What the replicas have sent each other, as a table and in all."""
    if strategy.num_replicas_in_sync == 1:
        print("one replica: nothing was communicated")
        return
    plan = strategy.communication_plan(model)
    num_steps = int(model.optimizer.iterations.numpy())
    last = monitor.recent(200)
    print(plan)
    print(
        f"communicated: {num_steps * plan.wire_bytes / 1e6:.1f} MB sent by each replica"
        f" ({num_steps} steps of {plan.wire_bytes:,} bytes); collectives were under way"
        f" in {100 * last.communication_seconds / last.step_seconds:.0f} % of the step"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="global")
    parser.add_argument("--short", action="store_true", help="a few epochs, for CI")
    parser.add_argument(
        "--logs",
        default="tfdp-logs/digits",
        help="where to write what communication takes, default %(default)s",
    )
    args = parser.parse_args()
    epochs = min(args.epochs, 4) if args.short else args.epochs

    strategy = tfdp.auto_strategy()
    keras.utils.set_random_seed(SEED)  # the same on every worker
    train, test = load_data()
    with strategy.scope():
        model = build_model()
        compile_model(model, num_steps=epochs * (TRAIN_IMAGES // args.batch_size))

    # Each batch is global: every replica gets its share of it.
    monitor = tfdp.callbacks.CommunicationMonitor(args.logs)
    timeline = tfdp.callbacks.Timeline(Path(args.logs) / "timeline.json")
    callbacks = [monitor, timeline] if strategy.num_replicas_in_sync > 1 else []
    model.fit(*train, batch_size=args.batch_size, epochs=epochs, callbacks=callbacks)
    # All workers evaluate, and all get the accuracy on the whole test set ...
    results = model.evaluate(
        *test, batch_size=args.batch_size, verbose=0, return_dict=True
    )
    # ... and the chief tells.
    if strategy.extended.should_checkpoint:
        print_communication(strategy, model, monitor)
        print(f"test accuracy: {100 * results['accuracy']:.2f} %")


if __name__ == "__main__":
    main()
