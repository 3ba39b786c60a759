"""Trains a small model as a script for one process does that logs to both trackers.

tracked.py FIRST LAST: what makes runs before the strategy, and after it, of `autolog`,
`callback`, `resume`, `by hand` (a store for each rank) and `wandb`; first of all `each`
"""

from __future__ import annotations

import json
import os
import sys

import keras
import mlflow
import numpy as np
import wandb
from wandb.integration.keras import WandbMetricsLogger

import tfdp

RANK = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index", 0)
callbacks: list[keras.callbacks.Callback] = []


def track(ways: str) -> None:
    """Begin to log, as the documentation of the trackers says."""
    for way in ways.split(","):
        if way == "each":
            tfdp.track_each_worker()
        elif way == "autolog":
            mlflow.set_tracking_uri("sqlite:///mlflow.db")
            mlflow.set_experiment("tfdp")
            mlflow.autolog()
        elif way == "by hand":
            mlflow.set_tracking_uri(f"sqlite:///{RANK}.db")
            mlflow.log_param("rank", RANK)
        elif way == "callback":
            mlflow.set_tracking_uri("sqlite:///mlflow.db")
            mlflow.start_run(run_name="mine")
            callbacks.append(mlflow.keras.MlflowCallback())
        elif way == "resume":
            run = mlflow.active_run().info.run_id
            mlflow.end_run()
            mlflow.start_run(run_id=run)
            mlflow.log_param("resumed", True)
        elif way == "wandb":
            # What stands in the script comes before WANDB_MODE.
            wandb.init(project="tfdp", mode="offline")
            callbacks.append(WandbMetricsLogger())


track(sys.argv[1])
strategy = tfdp.auto_strategy()
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(1, kernel_initializer="ones")]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
track(sys.argv[2])
if "sharded" in sys.argv:
    callbacks.append(tfdp.callbacks.ShardedOptimizer())
x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
y = x[:, :1]
model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
wandb.finish()
