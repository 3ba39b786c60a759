"""Keras `fit` of one model, with the kernels that this process was started with."""

from __future__ import annotations

import contextlib
from typing import Any

from tfdp.bench.channel import Arm, Arms, OnDemand, work
from tools.bench import xla_worker
from tools.bench.kernels import OTHERS, UNITS


def build(name: str) -> tuple[Any, int]:
    """Make a model, and say how many rows a replica has."""
    import keras

    layers = keras.layers
    if name.startswith("mlp"):
        _, size, rows = name.split("-")
        hidden = [layers.Dense(UNITS[size], activation="relu") for _ in range(2)]
        parts = [keras.Input((UNITS[size] // 4,)), *hidden]
        return keras.Sequential([*parts, layers.Dense(10)]), int(rows)
    if name == "lstm":
        parts = [keras.Input((64, 32)), layers.LSTM(128)]
    elif name == "embedding":
        inputs = keras.Input((16,), dtype="int32")
        parts = [inputs, layers.Embedding(50_000, 64), layers.GlobalAveragePooling1D()]
    else:
        return xla_worker.build(name), OTHERS[name]
    return keras.Sequential([*parts, layers.Dense(10)]), OTHERS[name]


def fit_arm(strategy: Any, name: str) -> Arm:
    """Seconds per step of `fit`, from the end of the first step on."""
    import keras
    import numpy as np

    from tools.bench.fit_blocks import Clock

    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model, rows = build(name)
        model.compile(
            keras.optimizers.Adam(1e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
    size = rows * (strategy.num_replicas_in_sync if strategy else 1)
    x, y = xla_worker.make_batch(model, size)

    def run(steps: int) -> float:
        clock = Clock(skipped=0)
        data = [np.concatenate([part] * (steps + 1)) for part in (x, y)]
        model.fit(*data, batch_size=size, shuffle=False, verbose=0, callbacks=[clock])
        return clock.seconds

    return run


def make_arms(setup: dict[str, Any]) -> Arms:
    import tfdp
    from tfdp.bench.training import make_strategy

    if len(setup["addresses"]) > 1:
        strategies = {"workers": make_strategy(setup)}
    else:
        devices = tfdp.testing.logical_cpus(2)
        strategies = {"plain": None, "two": tfdp.MirroredStrategy(devices)}

    def make(arm: str) -> Arm:
        name, who = arm.split("/")
        return fit_arm(strategies[who], name)

    return OnDemand(make, lambda arm: arm)


if __name__ == "__main__":
    work(make_arms)
