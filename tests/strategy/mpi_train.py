"""Training of a small model by workers, or on one device with the argument `alone`.

Prints one line of JSON: the number of replicas, the backend and the weights. With the
argument `tells` it also logs by what the workers communicate, with `heavy` they also
add up a large array.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.strategy.trained import HEAVY_BYTES
from tfdp.communication.coordination.join import num_joined_workers


def make_model() -> keras.Model:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    random = np.random.default_rng(1)
    model.set_weights([random.normal(size=w.shape) for w in model.get_weights()])
    return model


class Dies(keras.callbacks.Callback):
    """Kills the last rank in the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1 and num_joined_workers() == 2:
            rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
            if rank == "1":
                os.kill(os.getpid(), signal.SIGKILL)


def add_up(strategy: tf.distribute.Strategy) -> None:
    """Adds up `HEAVY_BYTES` of all replicas, which a link that carries them counts."""

    @tf.function
    def total() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return context.all_reduce("SUM", tf.ones([HEAVY_BYTES // 4]))

    assert strategy.run(total)[0] == strategy.num_replicas_in_sync


def main() -> None:
    name = sys.argv[1]
    if "tells" in sys.argv:
        logger = logging.getLogger("tfdp.transport")
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)
    if name == "alone":
        num_replicas, model, backend = 1, make_model(), ""
    else:
        strategy = getattr(tfdp, name)()
        num_replicas = strategy.num_replicas_in_sync
        backend = strategy.extended.group.transport.name
        with strategy.scope():
            model = make_model()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    random = np.random.default_rng(0)
    x = random.normal(size=(96, 8)).astype("float32")
    y = random.normal(size=(96, 3)).astype("float32")
    callbacks = [Dies()] if "dies" in sys.argv else []
    model.fit(
        x, y, batch_size=32, epochs=4, verbose=0, shuffle=False, callbacks=callbacks
    )
    if "heavy" in sys.argv:
        add_up(strategy)
    weights = [weight.tolist() for weight in model.get_weights()]
    answer = {"num_replicas": num_replicas, "backend": backend, "weights": weights}
    line = json.dumps(answer)
    os.write(1, f"\n{line}\n".encode())


if __name__ == "__main__":
    main()
