"""What needs GPUs: run it where there are some; elsewhere it says why not."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp

GPUS = [f"GPU:{i}" for i in range(len(tf.config.list_physical_devices("GPU")))]

pytestmark = pytest.mark.skipif(not GPUS, reason="there is no GPU on this machine")


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def everything() -> keras.optimizers.Optimizer:
    """Accumulation, loss scaling, clipping and averages at once."""
    adam = keras.optimizers.AdamW(0.01, global_clipnorm=0.1, use_ema=True)
    return tfdp.DistributedOptimizer(adam, accumulation_steps=3, loss_scale=128.0)


def train(
    strategy: tf.distribute.Strategy | None, optimizer: Callable = sgd
) -> list[np.ndarray]:
    """Twelve steps of a small model on seeded data."""
    keras.utils.set_random_seed(0)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(192, 16)).astype("float32")
    y = generator.integers(0, 4, 192)
    with strategy.scope() if strategy else tf.device("GPU:0"):
        model = keras.Sequential(
            [
                keras.Input((16,)),
                keras.layers.Dense(32, activation="relu"),
                keras.layers.Dense(4),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, jit_compile=False)
    model.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize("layer", [keras.layers.LSTM, keras.layers.GRU])
def test_recurrent_layers_of_cudnn_match_one_gpu(layer):
    x = np.random.default_rng(0).normal(size=(45, 7, 5)).astype("float32")
    weights = []
    for strategy in (None, tfdp.MirroredStrategy(GPUS)):
        keras.utils.set_random_seed(0)
        with strategy.scope() if strategy else tf.device("GPU:0"):
            both = keras.layers.Bidirectional(layer(4, return_sequences=True))
            layers = [keras.Input((7, 5)), both, layer(3), keras.layers.Dense(2)]
            model = keras.Sequential(layers)
            model.compile(sgd(), "mse", jit_compile=False)
        model.fit(x, x[:, 0, :2], batch_size=8, shuffle=False, verbose=0)
        if strategy:
            assert not strategy.communication_plan(model).gathers["fit"].gathers
        weights.append(model.get_weights())
    for a, b in zip(*weights, strict=True):
        assert np.abs(a - b).max() / max(np.abs(b).max(), 1e-3) <= 1e-4


@pytest.mark.parametrize("optimizer", [sgd, everything])
@pytest.mark.parametrize("count", range(1, len(GPUS) + 1) or [1])
def test_gpus_match_one_gpu(count, optimizer):
    expected = train(None, optimizer)
    found = train(tfdp.MirroredStrategy(GPUS[:count]), optimizer)
    for a, b in zip(found, expected, strict=True):
        error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-3)
        assert error <= 1e-4


def test_gpus_use_nccl():
    strategy = tfdp.MirroredStrategy(GPUS)
    assert strategy.extended.group.backend == "nccl"
    assert strategy.extended.group.launch_order.num_channels == 1


@pytest.mark.skipif(len(GPUS) < 2, reason="one GPU cannot all-reduce")
@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.int32])
@pytest.mark.parametrize("size", [1, 7, 1024])
def test_all_reduce_adds_over_gpus(dtype, size):
    strategy = tfdp.MirroredStrategy(GPUS)

    @tf.function
    def reduced():
        def of_replica():
            context = tf.distribute.get_replica_context()
            own = tf.fill([size], tf.cast(context.replica_id_in_sync_group + 1, dtype))
            return context.all_reduce(tf.distribute.ReduceOp.SUM, own)

        return strategy.run(of_replica)

    total = sum(range(1, len(GPUS) + 1))
    for value in strategy.experimental_local_results(reduced()):
        np.testing.assert_array_equal(value.numpy(), np.full(size, total))
