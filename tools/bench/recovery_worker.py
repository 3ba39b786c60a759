"""Script of the benchmark `recovery`: `fit`, restarted or with `--elastic`."""

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tools.bench.recovery_record import BATCH_SIZE, EPOCHS, RATE, UNITS, Record, data

strategy = tfdp.MultiWorkerMirroredStrategy()
record = Record(strategy.cluster_resolver.task_id)
used: list[int] = []


class Samples(keras.layers.Layer):
    """Notes the samples of a step, from their index in the last column."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        noted = tf.py_function(self._note, [x[:, -1]], [])
        with tf.control_dependencies([noted]):
            return tf.identity(x[:, :-1])

    @staticmethod
    def _note(samples: tf.Tensor) -> None:
        used[:] = samples.numpy().astype(int)


class Steps(keras.callbacks.Callback):
    """Records each step by its number in the whole training."""

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._first = epoch * self.params["steps"]

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        record.before(self._first + batch)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        record.after(self._first + batch, used)


x, y = data()
rows = np.concatenate([x, np.arange(len(x), dtype="float32")[:, None]], axis=1)
keras.utils.set_random_seed(0)
with strategy.scope():
    layers = [Samples(), keras.layers.Dense(UNITS, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((rows.shape[1],)), *layers])
    model.compile(keras.optimizers.Adam(RATE), "mse")
backup = tfdp.callbacks.BackupAndRestore(
    record.folder / "backups", memory_every=1, delete_at_end=False
)
callbacks = [Steps(), backup]
model.fit(rows, y, BATCH_SIZE, EPOCHS, verbose=0, callbacks=callbacks, shuffle=False)
record.end(model.evaluate(rows, y, verbose=0))
