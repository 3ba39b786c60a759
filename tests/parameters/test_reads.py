"""A sharded parameter that only some workers read."""

from __future__ import annotations

from typing import Any

import keras
import pytest

import tfdp
from tests.harness import common
from tests.harness.interrupted import Layout, run

TIMEOUT_SECONDS = 8.0


class Reading(keras.callbacks.Callback):
    """Reads a kernel after the second batch, on one worker."""

    def __init__(self, is_here: bool) -> None:
        super().__init__()
        self.is_here = is_here

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.is_here and batch == 1:
            self.model.layers[0].kernel.numpy()


def read_on_the_first(layout: Layout, rank: int) -> dict:
    """Trains on all workers, and reads a parameter on one."""
    options = tfdp.CommunicationOptions(timeout_seconds=TIMEOUT_SECONDS)
    strategy = tfdp.MultiWorkerMirroredStrategy(communication=options)
    with strategy.scope():
        model = common.mlp()
        sgd = keras.optimizers.SGD(0.01)
        optimizer = tfdp.DistributedOptimizer(sgd, sharding="parameters")
        model.compile(optimizer, loss="mse")
    data = common.regression_data()
    common.fit(model, *data, callbacks=[Reading(is_here=rank == 0)])
    return {}


@pytest.mark.full
@pytest.mark.processes
def test_a_worker_that_reads_a_parameter_alone_is_told_what_it_waits_for(tmp_path):
    result = run(Layout(2, 1), read_on_the_first, tmp_path, {})
    texts = [answer["text"] for answer in result.answers]
    reading = "reading 'sequential/dense/kernel:0', which is sharded"
    assert any(reading in text for text in texts), (texts, result.output[-3000:])
