"""The monitor and the timeline where the profile of the devices has to tell."""

from __future__ import annotations

import json
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp.features.monitor.device_meter import DeviceMeter, meter_for

GPUS = [f"GPU:{i}" for i in range(len(tf.config.list_physical_devices("GPU")))]

pytestmark = pytest.mark.skipif(not GPUS, reason="there is no GPU on this machine")


def train(tmp_path: Path, num_gpus: int) -> tuple[tf.distribute.Strategy, keras.Model]:
    """Twelve steps of a model of a few million parameters, watched by both."""
    strategy = tfdp.MirroredStrategy(GPUS[:num_gpus])
    with strategy.scope():
        hidden = [keras.layers.Dense(1024, activation="relu") for _ in range(4)]
        model = keras.Sequential([keras.Input((1024,)), *hidden])
        model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(12 * 64, 1024)).astype("float32")
    callbacks = [
        tfdp.callbacks.CommunicationMonitor(tmp_path, every=4),
        tfdp.callbacks.Timeline(tmp_path / "timeline.json", steps=(8, 10)),
    ]
    model.fit(x, x, batch_size=64, shuffle=False, verbose=0, callbacks=callbacks)
    return strategy, model


@pytest.mark.parametrize("num_gpus", sorted({1, len(GPUS)}))
def test_monitor_reads_the_devices_and_not_the_host(tmp_path, num_gpus):
    strategy, model = train(tmp_path, num_gpus)
    assert isinstance(meter_for(model, strategy), DeviceMeter)
    told = json.loads((tmp_path / "communication.json").read_text())
    totals = told["totals"]
    assert totals["gradient_norm"] > 0
    if num_gpus > 1:
        assert 0 < totals["communication_seconds"] <= totals["step_seconds"]
        assert totals["exposed_seconds"] <= totals["communication_seconds"]
        plan = strategy.communication_plan(model)
        assert len(told["buckets"]) >= len(plan.buckets)


@pytest.mark.parametrize("num_gpus", sorted({1, len(GPUS)}))
def test_timeline_shows_the_streams_of_each_gpu(tmp_path, num_gpus):
    train(tmp_path, num_gpus)
    trace = json.loads((tmp_path / "timeline.json").read_text())
    names = [e for e in trace["traceEvents"] if e["name"] == "thread_name"]
    lanes = [event["args"]["name"] for event in names]
    for gpu in range(num_gpus):
        assert any(f"GPU:{gpu} Stream" in name for name in lanes)
