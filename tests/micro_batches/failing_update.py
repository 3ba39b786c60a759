"""One worker runs out of memory in an update, in the last step of an epoch."""

from __future__ import annotations

import time
from typing import Any


def train(rank: int, folder: str) -> dict[str, Any]:
    """Trains until the update of the second worker fails; returns the message."""
    import keras
    import tensorflow as tf

    import tfdp
    from tests.harness import common

    class Failing(keras.optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, rate: Any) -> None:
            def allocate(count: int) -> float:
                if rank == 1 and count == 11:
                    time.sleep(2)  # the other worker ends its step, and waits
                    raise MemoryError
                return 0.0

            zero = tf.numpy_function(allocate, [self.iterations], tf.float64)
            rate += tf.cast(tf.reshape(zero, []), rate.dtype)
            super().update_step(gradient, variable, rate)

    options = tfdp.CommunicationOptions(timeout_seconds=40.0)
    strategy = tfdp.MultiWorkerMirroredStrategy(communication=options)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = common.compiled(common.mlp(), Failing(0.01))
    x, y = common.regression_data(12 * common.BATCH_SIZE)
    auto = tfdp.callbacks.GradientAccumulation("auto")
    try:
        common.fit(model, x, y, validation_data=(x, y), callbacks=[auto])
    except (ValueError, RuntimeError, tf.errors.OpError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}
