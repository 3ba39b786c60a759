"""Python's work per step, which must not grow with the number of variables."""

from __future__ import annotations

import cProfile
import pathlib

import keras
import numpy as np
import pytest

import tfdp

HOME = str(pathlib.Path(tfdp.__file__).parent)
WARM_UP, STEPS = 3, 10


class Profile(keras.callbacks.Callback):
    """Profiles the steps that follow the first few."""

    def __init__(self) -> None:
        super().__init__()
        self.profile = cProfile.Profile()

    def on_train_batch_end(self, batch, logs=None):
        if batch == WARM_UP:
            self.profile.enable()
        if batch == WARM_UP + STEPS:
            self.profile.disable()


def calls_per_step(num_variables: int) -> tuple[float, float]:
    """All Python calls of a step of `fit`, and those of functions of tfdp."""
    strategy = tfdp.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        layers = [keras.layers.Dense(2) for _ in range(num_variables // 2)]
        model = keras.Sequential([keras.Input((2,)), *layers])
        model.compile("sgd", "mse")
    callback = Profile()
    x = np.zeros((4 * (WARM_UP + STEPS + 2), 2), "float32")
    model.fit(x, x, batch_size=4, verbose=0, callbacks=[callback])
    total = own = 0
    for entry in callback.profile.getstats():
        total += entry.callcount
        if getattr(entry.code, "co_filename", "").startswith(HOME):
            own += entry.callcount
    return total / STEPS, own / STEPS


@pytest.mark.core
def test_python_work_per_step_does_not_grow_with_the_number_of_variables():
    few, few_own = calls_per_step(4)
    many, many_own = calls_per_step(44)
    assert many_own == few_own
    # TensorFlow asks of each thing that a function captures whether it is
    # callable; the hash that it computes besides, of six calls, is kept.
    assert many - few <= 1.5 * 40
