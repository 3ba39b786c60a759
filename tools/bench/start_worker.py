"""Script of the benchmark `start`: a few steps of `fit`."""

import time

import keras

import tfdp


class FirstStep(keras.callbacks.Callback):
    """Tells when the first step was taken."""

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if batch == 0:
            print(f"first step at {time.time():.3f}", flush=True)


strategy = tfdp.MultiWorkerMirroredStrategy()
with strategy.scope():
    layers = [keras.layers.Dense(256, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    model.compile("adam", "mse")
x = keras.random.normal((64, 64), seed=0).numpy()
model.fit(x, x[:, :10], batch_size=16, verbose=0, callbacks=[FirstStep()])
