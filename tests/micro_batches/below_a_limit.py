"""Trains below a limit of memory, then without; prints what it found.

The limit is that of the address space, or of a cgroup whose folder is an argument.
"""

import json
import os
import resource
import sys
from pathlib import Path

import keras
import numpy as np
import psutil
import tensorflow as tf

import tfdp

ROWS, UNITS = 1024, 100_000  # 200 MB of activations for each of two replicas
# The whole batch does not fit in what is left of the cgroup, nor in this address space.
SPARE_BYTES = (450 if len(sys.argv) > 1 else 900) * 2**20


def set_limit(spare: int | None) -> None:
    """Leaves so many bytes, or all."""
    if len(sys.argv) == 1:
        used = psutil.Process().memory_info().vms
        limit = resource.RLIM_INFINITY if spare is None else used + spare
        resource.setrlimit(resource.RLIMIT_AS, (limit, -1))
        return
    folder = Path(sys.argv[1])
    # What the process has already is counted where it was before.
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    is_first_version = (folder / "memory.limit_in_bytes").exists()
    name, unlimited = (
        ("memory.limit_in_bytes", "-1") if is_first_version else ("memory.max", "max")
    )
    (folder / name).write_text(unlimited if spare is None else str(spare))


cpu = tf.config.list_physical_devices("CPU")[0]
halves = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, halves)
strategy = tfdp.MirroredStrategy()
x = np.random.default_rng(0).normal(size=(ROWS, 8)).astype("float32")
results = []
for spare in (SPARE_BYTES, None):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        inner = keras.layers.Dense(UNITS, activation="tanh")
        model = keras.Sequential([keras.Input((8,)), inner, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    auto = tfdp.callbacks.GradientAccumulation("auto")
    options = {"verbose": 0, "shuffle": False, "callbacks": [auto] if spare else []}
    # Threads start, and the step is traced, before the limit.
    first = model.fit(x[:4], x[:4, :1], batch_size=4, **options)
    set_limit(spare)
    history = model.fit(x, x[:, :1], batch_size=ROWS, epochs=7, **options).history
    results.append(history)
print(json.dumps(results))
