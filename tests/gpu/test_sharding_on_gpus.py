"""Sharded optimizer state on GPUs; one GPU is split in two, which NCCL cannot join."""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp

NUM_GPUS = len(tf.config.list_physical_devices("GPU"))
NUM_BATCHES, BATCH_SIZE = 12, 24  # for 1, 2, 3, 4 and 8 replicas alike
LOGICAL_MB = 2048

Make = Callable[[], keras.optimizers.Optimizer]


@functools.cache
def devices_of_this_machine() -> list[str]:
    """All GPUs, or the two halves of the only one, for the rest of this process."""
    if NUM_GPUS != 1:
        return [f"GPU:{index}" for index in range(NUM_GPUS)]
    gpu = tf.config.list_physical_devices("GPU")[0]
    half = tf.config.LogicalDeviceConfiguration(memory_limit=LOGICAL_MB)
    # Too late where other tests have used the GPU already.
    with contextlib.suppress(RuntimeError):
        tf.config.set_logical_device_configuration(gpu, [half, half])
    return [device.name[-5:] for device in tf.config.list_logical_devices("GPU")]


pytestmark = pytest.mark.skipif(not NUM_GPUS, reason="there is no GPU on this machine")


@pytest.fixture(autouse=True)
def _two_devices() -> None:
    # Not at the import of this file: the only GPU would be split for all other tests.
    if len(devices_of_this_machine()) < 2:
        pytest.skip("sharding needs two GPUs, or one that no test has used before")


def adamw() -> keras.optimizers.Optimizer:
    return keras.optimizers.AdamW(0.01, global_clipnorm=0.5, use_ema=True)


def lamb() -> keras.optimizers.Optimizer:
    return keras.optimizers.Lamb(0.01)


def new_strategy(node_size: int | None = None) -> tfdp.MirroredStrategy:
    options = tfdp.CommunicationOptions(node_size=node_size, bucket_mb=0.01)
    return tfdp.MirroredStrategy(devices_of_this_machine(), communication=options)


def build(
    strategy: tf.distribute.Strategy | None, make: Make = adamw, **settings: object
) -> keras.Model:
    """A small model with accumulation and loss scaling; one device has no strategy."""
    keras.utils.set_random_seed(0)
    if strategy is None:
        settings = {}
    with strategy.scope() if strategy else tf.device(devices_of_this_machine()[0]):
        widths = (32, 17, 4)
        layers = [keras.layers.Dense(width, activation="tanh") for width in widths]
        model = keras.Sequential([keras.Input((16,)), *layers])
        optimizer = tfdp.DistributedOptimizer(
            make(), accumulation_steps=2, loss_scale=128.0, **settings
        )
        model.compile(optimizer, "mse", jit_compile=False)
        optimizer.build(model.trainable_variables)
    return model


def train(
    model: keras.Model, first: int = 0, last: int = NUM_BATCHES
) -> list[np.ndarray]:
    """Trains on some of the batches; returns the weights."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(NUM_BATCHES * BATCH_SIZE, 16)).astype("float32")
    y = np.tanh(x[:, :4])
    rows = slice(first * BATCH_SIZE, last * BATCH_SIZE)
    model.fit(x[rows], y[rows], batch_size=BATCH_SIZE, shuffle=False, verbose=0)
    return model.get_weights()


def check_alike(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for a, b in zip(found, expected, strict=True):
        error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-3)
        assert error <= 1e-4


def slot_devices(model: keras.Model) -> set[str]:
    """On what kinds of devices the slots lie."""
    parts = model.optimizer.shards.parts.values()
    states = [state for part in parts for state in part.replicas]
    slots = [slot for s in states for items in s.slots.values() for slot in items]
    return {tf.DeviceSpec.from_string(s.value.device).device_type for s in slots}


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("make", [adamw, lamb])
@pytest.mark.parametrize("sharding", ["optimizer", "gradients"])
def test_sharded_gpus_match_one_gpu(sharding, make, offload):
    model = build(new_strategy(), make, sharding=sharding, offload=offload)
    check_alike(train(model), train(build(None, make)))
    kind = (
        "CPU"
        if offload
        else tf.DeviceSpec.from_string(devices_of_this_machine()[0]).device_type
    )
    assert slot_devices(model) == {kind}


@pytest.mark.skipif(NUM_GPUS < 4 or NUM_GPUS % 2 == 1, reason="needs two nodes")
@pytest.mark.parametrize("scope", ["all", "node"])
@pytest.mark.parametrize("sharding", ["optimizer", "gradients"])
def test_sharded_gpus_of_two_nodes_match_one_gpu(sharding, scope):
    strategy = new_strategy(node_size=NUM_GPUS // 2)
    model = build(strategy, sharding=sharding, shard_scope=scope)
    check_alike(train(model), train(build(None)))


def collectives_of(model: keras.Model, strategy: tfdp.MirroredStrategy) -> set[str]:
    """What kinds of collectives a step launches, by its graph."""

    def on_replica() -> None:
        variables = model.trainable_variables
        gradients = [tf.ones(v.shape) * (1.0 + v.value) for v in variables]
        model.optimizer.apply(gradients, variables)

    step = tf.function(lambda: strategy.run(on_replica), autograph=False)
    graph = step.get_concrete_function().graph.as_graph_def()
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    return {node.op for node in nodes if node.op.startswith("Collective")}


@pytest.mark.skipif(NUM_GPUS < 2, reason="NCCL joins no two halves of one GPU")
@pytest.mark.parametrize("sharding", ["optimizer", "gradients"])
def test_slices_travel_by_nccl(sharding):
    strategy = new_strategy()
    assert strategy.extended.group.backend == "nccl"
    found = collectives_of(build(strategy, sharding=sharding), strategy)
    assert {"CollectiveReduceScatterV2", "CollectiveGatherV2"} <= found
    # What it is made of where there is no reduce-scatter.
    assert "CollectiveAllToAllV2" not in found


@pytest.mark.parametrize("sharding", ["optimizer", "gradients"])
def test_a_checkpoint_of_sharded_gpus_goes_on_there_and_on_one_gpu(
    tmp_path: pathlib.Path, sharding: str
):
    half = NUM_BATCHES // 2 - 1  # a micro-batch waits for the next update
    saved = build(new_strategy(), sharding=sharding)
    train(saved, 0, half)
    assert saved.optimizer.accumulated_steps == 1
    tfdp.checkpoint.save(saved, tmp_path / "directory")
    saved.save_weights(tmp_path / "file.weights.h5")
    expected = train(saved, half)
    for strategy in (new_strategy(), None):
        restored = build(strategy, sharding=sharding)
        tfdp.checkpoint.restore(restored, tmp_path / "directory")
        check_alike(train(restored, half), expected)
        loaded = build(strategy, sharding=sharding)
        loaded.load_weights(tmp_path / "file.weights.h5")
        check_alike(train(loaded, half), expected)
