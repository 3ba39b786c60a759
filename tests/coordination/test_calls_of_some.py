"""A call that only some workers make."""

from __future__ import annotations

import keras
import pytest

import tfdp
from tests.harness import common
from tests.harness.interrupted import Layout, run


def evaluate_on_the_first(layout: Layout, rank: int) -> dict:
    """Trains on all workers and evaluates on one."""
    with tfdp.MultiWorkerMirroredStrategy().scope():
        model = common.compiled(keras.Sequential([keras.layers.Dense(1)]))
    x, y = common.regression_data(16)
    common.fit(model, x, y)
    if rank == 0:
        model.evaluate(x, y, verbose=0)
    return {}


@pytest.mark.processes
def test_who_evaluates_alone_is_told_so(tmp_path):
    result = run(Layout(2, 1), evaluate_on_the_first, tmp_path, {})
    assert result.answers[0]["error"] == "WorkerLost", result.output[-3000:]
    text = result.answers[0]["text"]
    assert text.startswith("Worker 1 ("), text
    assert "has come to the end of its script, and this one waits for it" in text
    assert "at 'the settings of evaluate'" in text
