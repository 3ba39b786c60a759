"""Nodes of different sizes: one of two workers, and one of a single worker."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.harness.commands import run_python

DEADLINE_SECONDS = 120.0
SCRIPT = """
import sys
import keras, numpy as np, tensorflow as tf, tfdp

class OwnStep(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"own": loss}

keras.utils.set_random_seed(0)
options = tfdp.CommunicationOptions(nodes=["a", "a", "b"])
strategy = tfdp.MultiWorkerMirroredStrategy(communication=options)
with strategy.scope():
    model = OwnStep([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", run_eagerly="eager" in sys.argv)
x = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
y = x.sum(1, keepdims=True)
fitted = model.fit(
    x, y, batch_size=6, epochs=2, verbose=0, callbacks=[tfdp.callbacks.DiLoCo(4)]
)
print("own logs", fitted.history["own"])
print("weights", repr([v.numpy().tolist() for v in model.weights]))
"""


@pytest.mark.full
def test_a_node_of_one_worker_trains_beside_one_of_two(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, "utf-8")
    launcher = ("-m", "tfdp", "run", "-n", "3", "--log-dir", str(tmp_path))
    logs = []
    for how in ("traced", "eager"):
        done = run_python(
            *launcher, str(script), how, deadline_seconds=DEADLINE_SECONDS
        )
        assert done.code == 0, done.output[-3000:]
        found = re.findall(r"\[worker \d\] weights (.*)", done.output)
        assert len(found) == 3
        assert len(set(found)) == 1
        logs.append(re.findall(r"own logs \[(.*), (.*)\]", done.output))
    traced, eager = np.array(logs, "float64")
    np.testing.assert_allclose(eager, traced, rtol=1e-5)
