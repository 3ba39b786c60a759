"""XLA on GPUs: what is compiled equals what is not, and is Keras's default."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfdp
from tests.gpu.test_nccl import GPUS

pytestmark = pytest.mark.skipif(not GPUS, reason="there is no GPU on this machine")


def trained(count: int, jit_compile: bool | str) -> tuple[keras.Model, list]:
    """Twelve steps of a small model on seeded data, the last batch of another size."""
    keras.utils.set_random_seed(0)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(184, 16)).astype("float32")
    y = generator.integers(0, 4, 184)
    with tfdp.MirroredStrategy(GPUS[:count]).scope():
        model = keras.Sequential([keras.Input((16,))])
        model.add(keras.layers.Dense(1024, activation="relu"))
        model.add(keras.layers.Dense(4))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile(optimizer, loss, jit_compile=jit_compile)
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    return model, model.get_weights()


@pytest.mark.parametrize("count", range(1, len(GPUS) + 1) or [1])
def test_compiled_steps_equal_others(count):
    _, expected = trained(count, jit_compile=False)
    model, found = trained(count, jit_compile=True)
    assert model.distribute_strategy.communication_plan(model).is_compiled == (
        count > 1
    )
    for a, b in zip(found, expected, strict=True):
        assert np.abs(a - b).max() / max(np.abs(b).max(), 1e-3) <= 1e-4


def test_auto_compiles_as_plain_keras_does():
    model, _ = trained(len(GPUS), jit_compile="auto")
    assert model.jit_compile
