"""Trains a small model, and prints its weights on the first worker.

python tests/cli/train_on_hosts.py alone     on one device, without tfdp
tfdp run ... tests/cli/train_on_hosts.py     on all workers
"""

from __future__ import annotations

import contextlib
import json
import sys

import keras
import numpy as np

import tfdp

keras.utils.set_random_seed(1)
strategy = None if "alone" in sys.argv else tfdp.auto_strategy()
with contextlib.nullcontext() if strategy is None else strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.AdamW(0.01), "mse")
x = np.random.default_rng(0).normal(size=(48, 8)).astype("float32")
y = x.sum(axis=1, keepdims=True)
model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
weights = [weight.tolist() for weight in model.get_weights()]
num_replicas = 1 if strategy is None else strategy.num_replicas_in_sync
if strategy is None or strategy.extended.should_checkpoint:
    print("WEIGHTS", num_replicas, json.dumps(weights), flush=True)
