"""A training script of the tests, in whose midst somebody sets the machine's clock."""

import struct
import sys
import time

import keras
import numpy as np

import tfdp

SHIFT_FILE, BACKEND, SECONDS = sys.argv[1], sys.argv[2], int(sys.argv[3])


class Clock(keras.callbacks.Callback):
    """Shifts the clock of all processes after some steps, and slows steps down."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.2)
        if batch == 10 and rank == 0:
            with open(SHIFT_FILE, "r+b") as file:
                file.write(struct.pack("l", SECONDS))


options = tfdp.CommunicationOptions(timeout_seconds=8, backend=BACKEND)
strategy = tfdp.auto_strategy(communication=options)
rank = strategy.extended.worker_group.rank
x = np.random.default_rng(0).normal(size=(480, 4)).astype("float32")
y = x.sum(1, keepdims=True)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "tanh")])
    model.compile("sgd", "mse")
callbacks = [
    Clock(),
    tfdp.callbacks.BackupAndRestore("backups", save_freq=7),
    tfdp.callbacks.CommunicationMonitor("monitor"),
]
before = time.time() - time.monotonic()
model.fit(x, y, batch_size=8, verbose=0, callbacks=callbacks)
model.evaluate(x, y, verbose=0)
print("shifted by", round(time.time() - time.monotonic() - before), flush=True)
