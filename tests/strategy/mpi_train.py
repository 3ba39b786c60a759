"""Training of a small model by workers, or on one device with the argument `alone`.

Prints one line of JSON: the number of replicas and the weights. With the argument
`tells` it also logs by what the workers communicate.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys

import keras
import numpy as np

import tfdp


def make_model() -> keras.Model:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    random = np.random.default_rng(1)
    model.set_weights([random.normal(size=w.shape) for w in model.get_weights()])
    return model


class Dies(keras.callbacks.Callback):
    """Kills the last rank in the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1 and tfdp.coordination.join.num_joined_workers() == 2:
            rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
            if rank == "1":
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    name = sys.argv[1]
    if "tells" in sys.argv:
        logger = logging.getLogger("tfdp.transport")
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)
    if name == "alone":
        num_replicas, model = 1, make_model()
    else:
        strategy = getattr(tfdp, name)()
        num_replicas = strategy.num_replicas_in_sync
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
    weights = [weight.tolist() for weight in model.get_weights()]
    line = json.dumps({"num_replicas": num_replicas, "weights": weights})
    os.write(1, f"\n{line}\n".encode())


if __name__ == "__main__":
    main()
