"""A training script of the tests whose worker gets into trouble in a callback."""

import os
import pathlib
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdp

TIMEOUT_SECONDS = 12.0
STEP = 5
# A step of the worker that is slow; the signal comes before the last epoch.
SLOW_SECONDS, SLOW_EPOCHS = 0.08, 4


class Trouble(keras.callbacks.Callback):
    def __init__(self, kind: str, is_own: bool) -> None:
        super().__init__()
        self._kind, self._is_own = kind, is_own

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if self._kind == "slow" and self._is_own:
            time.sleep(SLOW_SECONDS)
        if batch != STEP or not self._is_own:
            return
        if self._kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self._kind == "drift":
            own = self.model.trainable_variables[0].value
            for replica in own.values:
                replica.assign_add(tf.ones_like(replica))
        if self._kind == "raise":
            raise ValueError("bad data")
        if self._kind == "sleep":
            pathlib.Path("sleeps").write_text(str(os.getpid()), "utf-8")
            time.sleep(1000)

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        if self._kind == "slow" and self._is_own and epoch == SLOW_EPOCHS - 1:
            os.kill(os.getpid(), signal.SIGUSR2)


def reduce_in_own_order(strategy: tf.distribute.Strategy, rank: int) -> None:
    """Sums two tensors, of which the second worker begins with the other one."""

    def step() -> tf.Tensor:
        tensors = [tf.ones([4]), tf.ones([9])]
        first, second = reversed(tensors) if rank else tensors
        context = tf.distribute.get_replica_context()
        total = context.all_reduce("SUM", first)
        with tf.control_dependencies([total]):
            return total[0] + context.all_reduce("SUM", second)[0]

    tf.function(lambda: strategy.run(step))()


def main(kind: str, timeout_seconds: float | None = None) -> None:
    backend = "ring" if kind == "order by TensorFlow" else "auto"
    options = tfdp.CommunicationOptions(
        timeout_seconds=timeout_seconds, backend=backend
    )
    strategy = tfdp.auto_strategy(communication=options)
    group = strategy.extended.worker_group
    if kind.startswith("order"):
        reduce_in_own_order(strategy, group.rank)
        return
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    rows = np.ones((4 * group.num_workers * 12, 4), "float32")
    trouble = Trouble(kind, group.rank == group.num_workers - 1)
    checks = [tfdp.callbacks.ConsistencyCheck(4)] if kind == "drift" else []
    model.fit(
        rows,
        rows[:, :1],
        batch_size=4 * group.num_workers,
        epochs=SLOW_EPOCHS if kind == "slow" else 1,
        callbacks=[trouble, *checks],
        verbose=0,
    )
    print("is through", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:]))
