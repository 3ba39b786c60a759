"""A call that only some workers make."""

from __future__ import annotations

import sys

import keras
import pytest
import tensorflow as tf

import tfdp
from tests.harness import common
from tests.harness.interrupted import Layout, run
from tests.harness.tiers import full
from tests.harness.timing import within


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
    assert "has ended its script while this worker waits for it" in text
    assert "at 'the settings of evaluate'" in text


def raise_inside_the_scope(layout: Layout, rank: int) -> dict:
    """Raises on the second worker, in a scope that the first one leaves."""
    try:
        with tfdp.MultiWorkerMirroredStrategy().scope():
            model = common.compiled(keras.Sequential([keras.layers.Dense(1)]))
            common.fit(model, *common.regression_data(16))
            if rank == 1:
                raise KeyError("no such layer")
            common.mlp()
    except KeyError:
        # As Python does at the end of a script, which this process is none of.
        sys.excepthook(*sys.exc_info())
        raise
    return {}


@pytest.mark.processes
@pytest.mark.full
def test_an_error_of_one_worker_inside_the_scope_is_named_by_the_other(tmp_path):
    with within(60):
        result = run(Layout(2, 1), raise_inside_the_scope, tmp_path, {})
    own, other = result.answers
    assert (other["error"], other["text"]) == ("KeyError", "'no such layer'")
    assert own["error"] == "WorkerLost", result.output[-3000:]
    assert own["text"].startswith("Worker 1 ("), own["text"]
    assert "its script has ended, after KeyError: 'no such layer'" in own["text"]


def create_inside_the_scope(layout: Layout, rank: int, creator: int) -> dict:
    """Creates variables on one worker, in a scope that all leave, before a step."""
    try:
        strategy = tfdp.MultiWorkerMirroredStrategy()
        with strategy.scope():
            own = common.mlp() if rank == creator else None
        assert own is None

        def step() -> tf.Tensor:
            replica = tf.distribute.get_replica_context()
            return replica.all_reduce("SUM", tf.ones(()))

        strategy.run(tf.function(step))
    except Exception:
        sys.excepthook(*sys.exc_info())
        raise
    return {}


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("creator", [1, full(0)])
def test_who_creates_variables_alone_is_told_so_and_named_by_the_other(
    tmp_path, creator
):
    with within(60):
        arguments = {"creator": creator}
        result = run(Layout(2, 1), create_inside_the_scope, tmp_path, arguments)
    own = result.answers[creator]
    assert own["error"] == "ValueError", result.output[-3000:]
    assert own["text"].startswith(f"Worker {1 - creator} has left the scope of "), own
    named = f"Worker {creator} ("
    assert named in result.output
    after = "its script has ended, after ValueError: Worker"
    assert after in result.output, result.output[-3000:]
