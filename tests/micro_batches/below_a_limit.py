"""Trains below a limit of the address space, then without; prints what it found."""

import json
import resource

import keras
import numpy as np
import psutil
import tensorflow as tf

import tfdp

ROWS, UNITS = 1024, 100_000  # 200 MB of activations for each of two replicas
SPARE_BYTES = 900 * 2**20

cpu = tf.config.list_physical_devices("CPU")[0]
halves = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, halves)
strategy = tfdp.MirroredStrategy()
x = np.random.default_rng(0).normal(size=(ROWS, 8)).astype("float32")
results = []
for limit in (SPARE_BYTES, None):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        inner = keras.layers.Dense(UNITS, activation="tanh")
        model = keras.Sequential([keras.Input((8,)), inner, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    auto = tfdp.callbacks.GradientAccumulation("auto")
    options = {"verbose": 0, "shuffle": False, "callbacks": [auto] if limit else []}
    # Threads start, and the step is traced, before the limit.
    first = model.fit(x[:4], x[:4, :1], batch_size=4, **options)
    if limit is not None:
        limit += psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (limit or resource.RLIM_INFINITY, -1))
    history = model.fit(x, x[:, :1], batch_size=ROWS, epochs=10, **options).history
    results.append(history)
print(json.dumps(results))
