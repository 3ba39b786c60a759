"""Keras `fit` of one model, with the kernels that this process was started with."""

from __future__ import annotations

import functools
from typing import Any

from tfdp.launch.bench.channel import Arm, Arms, OnDemand, work
from tools.bench import xla_worker
from tools.bench.kernels import OTHERS, UNITS


def build(name: str) -> Any:
    """Make a model of ten classes."""
    import keras

    layers = keras.layers
    if name.startswith("mlp"):
        _, size, _ = name.split("-")
        hidden = [layers.Dense(UNITS[size], activation="relu") for _ in range(2)]
        parts = [keras.Input((UNITS[size] // 4,)), *hidden]
    elif name == "lstm":
        parts = [keras.Input((64, 32)), layers.LSTM(128)]
    elif name == "embedding":
        inputs = keras.Input((16,), dtype="int32")
        parts = [inputs, layers.Embedding(50_000, 64), layers.GlobalAveragePooling1D()]
    else:
        return xla_worker.build(name)
    return keras.Sequential([*parts, layers.Dense(10)])


def make_arms(setup: dict[str, Any]) -> Arms:
    import tfdp
    from tfdp.launch.bench.training import make_strategy

    if len(setup["addresses"]) > 1:
        strategies = {"workers": make_strategy(setup)}
    else:
        devices = tfdp.testing.logical_cpus(2)
        strategies = {"plain": None, "two": tfdp.MirroredStrategy(devices)}

    def make(arm: str) -> Arm:
        name, who = arm.split("/")
        rows = OTHERS.get(name) or int(name.rpartition("-")[2])
        make_model = functools.partial(build, name)
        return xla_worker.fit_arm(strategies[who], make_model, rows, "no jit")

    return OnDemand(make, lambda arm: arm)


if __name__ == "__main__":
    work(make_arms)
