"""A training script of the tests whose data source hangs, or is slow, at a batch."""

import dataclasses
import json
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tfdp.training.data import distribute

ROWS = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
NUM_BATCHES = 8


@dataclasses.dataclass
class Source:
    """Where a data source waits, or computes for a while, before it gives a batch."""

    at: int
    busy_seconds: float

    def wait(self, index: int) -> None:
        if index != self.at:
            return
        end = time.monotonic() + self.busy_seconds
        while time.monotonic() < end:
            np.ones((400, 400)) @ np.ones((400, 400))
        if not self.busy_seconds:
            time.sleep(1000)

    def generator(self) -> object:
        def batches():
            for index in range(NUM_BATCHES):
                self.wait(index)
                yield ROWS

        return batches()

    def dataset(self) -> tf.data.Dataset:
        def rows(index):
            self.wait(int(index))
            return ROWS[0]

        numbers = tf.data.Dataset.range(NUM_BATCHES)
        x = numbers.map(lambda i: tf.py_function(rows, [i], tf.float32))
        return x.map(lambda x: (tf.ensure_shape(x, (8, 4)), ROWS[1]))

    def py_dataset(self) -> keras.utils.PyDataset:
        return Batches(self)


class Batches(keras.utils.PyDataset):
    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source

    def __len__(self) -> int:
        return NUM_BATCHES

    def __getitem__(self, index: int) -> tuple:
        self._source.wait(index)
        return ROWS


def main(
    kind: str,
    at: int,
    timeout_seconds: float | None,
    ranks: list[int],
    busy_seconds: float = 0.0,
    as_on_gpus: bool = False,
    evaluates: bool = False,
    in_custom_loop: bool = False,
    backend: str = "auto",
    **fit: object,
) -> None:
    options = tfdp.CommunicationOptions(
        timeout_seconds=timeout_seconds, backend=backend
    )
    strategy = tfdp.auto_strategy(communication=options)
    if as_on_gpus:
        distribute.is_read_on_cpus = lambda strategy, options: False
    waits = strategy.extended.worker_group.rank in ranks
    source = Source(at if waits else NUM_BATCHES, busy_seconds)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = getattr(source, kind)()
    if in_custom_loop:
        for x, _ in strategy.experimental_distribute_dataset(data):
            outputs = strategy.run(tf.function(model), args=(x,))
            strategy.reduce("SUM", outputs, axis=0)
    elif evaluates:
        model.evaluate(data, verbose=0)
    else:
        model.fit(data, verbose=0, shuffle=False, **fit)
    print("is through", flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
