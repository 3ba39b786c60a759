"""`ElasticState` refuses what it cannot save, in one sentence."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp


def compiled(**settings: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    if settings:
        model.compile(**settings)
    return model


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"commit": 1}, ValueError, "needs another name. Received: 'commit'"),
        ({"_step": 1}, ValueError, "needs another name. Received: '_step'"),
        ({"disk_every": 0}, ValueError, "`disk_every` must be"),
        ({"kinds": {1, 2}}, TypeError, "must be numbers, strings, arrays, lists"),
    ],
)
def test_values_that_cannot_be_saved_are_refused(tmp_path, values, error, words):
    with pytest.raises(error, match=re.escape(words)):
        tfdp.ElasticState(compiled(optimizer="sgd"), tmp_path, **values)


def test_a_model_without_an_optimizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"call `model\.compile\(optimizer=\.\.\.\)`"):
        tfdp.ElasticState(compiled(), tmp_path, step=0)


def test_a_value_that_was_not_declared_is_refused(tmp_path):
    state = tfdp.ElasticState(compiled(optimizer="sgd"), tmp_path, step=0)
    with pytest.raises(AttributeError, match=r"Add `epoch=\.\.\.` to its arguments"):
        state.epoch = 1
    with pytest.raises(AttributeError, match="no value 'epoch'"):
        state.epoch  # noqa: B018
    state.delete()


def test_the_state_of_another_loop_or_of_fit_is_refused(tmp_path):
    model = compiled(optimizer="sgd", loss="mse")
    state = tfdp.ElasticState(model, tmp_path / "loop", disk_every=1, step=0)
    state.commit()
    with pytest.raises(ValueError, match=r"its values are \['step'\]. Received"):
        tfdp.ElasticState(model, tmp_path / "loop", epoch=0)
    x, y = np.ones((4, 2)), np.ones((4, 1))
    backup = tfdp.callbacks.BackupAndRestore(tmp_path / "fit", delete_at_end=False)
    model.fit(x, y, callbacks=[backup], verbose=0)
    with pytest.raises(ValueError, match="was not saved by `ElasticState`"):
        tfdp.ElasticState(model, tmp_path / "fit", step=0)
    backup = tfdp.callbacks.BackupAndRestore(tmp_path / "loop", memory_every=1)
    with pytest.raises(
        ValueError, match="it is the state of a loop, of `ElasticState`"
    ):
        model.fit(x, y, callbacks=[backup], verbose=0)
    state.delete()


def test_values_and_weights_are_those_of_the_last_commit_when_a_script_starts_again(
    tmp_path,
):
    model = compiled(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    state = tfdp.ElasticState(model, tmp_path, step=0, best=np.zeros(2))
    with state:
        model.train_on_batch(np.ones((4, 2)), np.ones(4))
        state.step, state.best = 1, np.ones(2)
        state.commit()
        committed = model.get_weights()
        model.train_on_batch(np.ones((4, 2)), np.ones(4))
        state.step = 2
    again = compiled(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    state = tfdp.ElasticState(again, tmp_path, step=0, best=np.zeros(2))
    assert state.step == 1
    np.testing.assert_array_equal(state.best, np.ones(2))
    for own, other in zip(again.get_weights(), committed, strict=True):
        np.testing.assert_array_equal(own, other)
    state.delete()


def test_a_loop_that_stops_with_its_workers_has_no_assertion_in_its_graph():
    strategy = tfdp.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = compiled(optimizer="sgd")
        model.optimizer.build(model.trainable_variables)

    def update():
        variables = model.trainable_variables
        model.optimizer.apply([tf.ones_like(v) for v in variables], variables)

    step = tf.function(lambda: strategy.run(update))
    operations = step.get_concrete_function().graph.get_operations()
    kinds = {operation.type for operation in operations}
    assert "AssignSubVariableOp" in kinds
    assert "Assert" not in kinds


def test_a_step_that_assigns_what_is_not_saved_is_refused(tmp_path):
    strategy = tfdp.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = compiled(optimizer="sgd")
        model.seen, other = keras.metrics.Sum(), keras.metrics.Sum(name="other")
    state = tfdp.ElasticState(model, tmp_path, step=0)
    count = tf.function(lambda metric: strategy.run(metric.update_state, args=(1.0,)))
    with state:
        count(model.seen)
    with pytest.raises(ValueError, match="Received: 'other/total:0'"), state:
        count(other)
    assert (float(model.seen.result()), float(other.result())) == (1.0, 0.0)
    count(other)  # outside of the block, nothing is repeated
    state.delete()


def test_a_loop_whose_state_is_lost_does_not_continue(tmp_path):
    state = tfdp.ElasticState(compiled(optimizer="sgd"), tmp_path, step=0)
    state.delete()
    with pytest.raises(RuntimeError, match="have found no state from which"):
        state._begin()
