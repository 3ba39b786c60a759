"""A transformer of which no worker can hold the parameters and the optimizer's slots.

    tfdp run -n 2 examples/large_model.py

Each worker watches its resident memory and ends with an error above a limit
(`--limit-mb`, beside what TensorFlow takes for a small model of as many layers). The
parameters, with the two numbers that Adam keeps beside each, are more than the limit:
`--sharding none` fails, `--sharding parameters`, the default, trains. Without a
limit (`--limit-mb 0`) both end with the same loss.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import threading
import time
from pathlib import Path

# oneDNN keeps for later what the model has freed, and it would count.
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"

import char_transformer as characters  # beside this script
import keras
import tensorflow as tf

import tfdp

SHARDINGS = ("none", "optimizer", "gradients", "parameters")
MB = 1_000_000
FLOAT_BYTES = 4
POLL_SECONDS = 0.002
# A model of as many layers, and hardly any parameters.
SMALL_WIDTH = 16
_M_MMAP_THRESHOLD = -3  # of mallopt(3)
_THRESHOLD_BYTES = 100_000


def resident_bytes(name: str) -> int:
    """A line of `/proc/self/status`: `VmRSS`, memory now, or `VmHWM`, its peak."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


class MemoryLimit:
    """Ends the process when it has more memory than it may.

    Limits of the operating system do not do here: one of the address space counts what
    TensorFlow reserves and never uses, and under one of data (`RLIMIT_DATA`) a failed
    allocation in one of its threads aborts the process without a sentence.

    Args:
        limit_mb: Int, beside what the process has already, or 0 for no limit.
    """

    def __init__(self, limit_mb: int) -> None:
        self._limit_mb = limit_mb
        self._base = resident_bytes("VmHWM")
        if limit_mb:
            threading.Thread(target=self._watch, daemon=True).start()

    @property
    def peak_mb(self) -> float:
        """The most that was used so far."""
        return (resident_bytes("VmHWM") - self._base) / MB

    def _watch(self) -> None:
        while self.peak_mb <= self._limit_mb:
            time.sleep(POLL_SECONDS)
        print(
            f"out of memory limit: {self.peak_mb:.0f} MB used, "
            f"{self._limit_mb} MB allowed on each worker",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def give_back_freed_memory() -> None:
    """Let glibc return large tensors to the system as soon as they are freed."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)


def make_dataset(batch_size: int) -> tf.data.Dataset:
    text, _ = characters.load_text(400_000)
    windows = characters.windows(characters.to_ids(text))
    dataset = tf.data.Dataset.from_tensor_slices(windows).repeat()
    return dataset.batch(batch_size, drop_remainder=True)


def make_model(
    strategy: tf.distribute.Strategy, sharding: str, width: int, blocks: int
) -> keras.Model:
    # Deferred: no worker ever holds a whole model, also not while it is built.
    init = "deferred" if sharding == "parameters" else None
    with strategy.scope(init=init):
        model = characters.build_model(width, blocks)
        optimizer = tfdp.DistributedOptimizer(
            keras.optimizers.Adam(3e-4), sharding=sharding
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss=loss)
    return model


def train_small_model(
    strategy: tf.distribute.Strategy,
    sharding: str,
    blocks: int,
    dataset: tf.data.Dataset,
) -> None:
    """Let TensorFlow take what it takes for any model: threads, buffers, a graph."""
    model = make_model(strategy, sharding, SMALL_WIDTH, blocks)
    model.fit(dataset, steps_per_epoch=1, shuffle=False, verbose=0)
    del model
    gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sharding", choices=SHARDINGS, default="parameters")
    parser.add_argument("--limit-mb", type=int, default=740, help="0: none")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=4, help="global")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--short", action="store_true", help="a few steps, for CI")
    parser.add_argument(
        "--logs",
        type=Path,
        metavar="FOLDER",
        help="a monitor and a timeline, which take 60 MB more: use --limit-mb 0",
    )
    args = parser.parse_args()
    if args.short:
        args.steps, args.batch_size = min(args.steps, 4), 2

    give_back_freed_memory()
    # A layer or two are gathered at a time: less memory than by default.
    options = tfdp.CommunicationOptions(bucket_mb=17)
    strategy = tfdp.auto_strategy(communication=options)
    keras.utils.set_random_seed(characters.SEED)  # the same on every worker
    dataset = make_dataset(args.batch_size)
    train_small_model(strategy, args.sharding, args.blocks, dataset)
    limit = MemoryLimit(args.limit_mb)

    model = make_model(strategy, args.sharding, args.width, args.blocks)
    is_chief = strategy.extended.should_checkpoint
    size = FLOAT_BYTES * model.count_params() / MB
    if is_chief:
        print(f"parameters: {size:.0f} MB; with Adam's slots: {3 * size:.0f} MB")
    steps = args.steps // 2
    callbacks: list[keras.callbacks.Callback] = []
    if args.logs:
        callbacks = [
            tfdp.callbacks.CommunicationMonitor(args.logs),
            tfdp.callbacks.Timeline(args.logs / "timeline.json"),
        ]
    fitted = model.fit(
        dataset,
        epochs=2,
        steps_per_epoch=steps,
        shuffle=False,
        callbacks=callbacks,
    )
    if is_chief:
        first, last = fitted.history["loss"]
        print(f"training loss: from {first:.4f} to {last:.4f} nats")
        allowed = f"limit: {args.limit_mb} MB" if args.limit_mb else "no limit"
        print(f"peak of memory: {limit.peak_mb:.0f} MB beside TensorFlow's ({allowed})")


if __name__ == "__main__":
    main()
