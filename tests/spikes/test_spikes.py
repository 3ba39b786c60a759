"""Spikes that are left out, against one device that has no such batches."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness import common
from tests.harness.pool import ClusterPool
from tests.harness.registry import Case
from tests.harness.tiers import full
from tests.spikes import cases_spikes as spikes

CASE_MODULES = ("spikes.cases_spikes",)


def test_spike_is_left_out(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"threshold": 0.5}, "threshold=0.5"),
        ({"window": 1}, "window=1"),
        ({"on": "norm"}, "on='norm'"),
        ({"action": "retry"}, "action='retry'"),
        ({"patience": 0}, "patience=0"),
    ],
)
def test_a_setting_out_of_range_is_refused(arguments, text):
    with pytest.raises(ValueError, match="Received: ") as caught:
        tfdp.callbacks.SpikeGuard(**arguments)
    assert text in str(caught.value)


def test_a_window_longer_than_the_run_is_refused():
    model = common.compiled(common.mlp())
    guard = tfdp.callbacks.SpikeGuard(window=30)
    with pytest.raises(ValueError, match="window=30, and 24 steps of `fit`"):
        common.fit(model, *common.regression_data(), epochs=2, callbacks=[guard])
    common.fit(model, *common.regression_data(), epochs=3, callbacks=[guard])


def test_one_device_without_a_strategy_leaves_a_step_out_as_replicas_do():
    results = []
    for rows, guards in (
        (spikes.data(spikes.BAD), [tfdp.callbacks.SpikeGuard(**spikes.GUARD)]),
        (spikes.without(spikes.BAD), []),
    ):
        keras.utils.set_random_seed(2)
        model = common.compiled(spikes.with_state(), spikes.averaging())
        history = common.fit(model, *rows, callbacks=guards)
        history.pop("skipped_spikes", None)
        results.append((history, model.get_weights()))
    (found, weights), (expected, wanted) = results
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    for own, other in zip(weights, wanted, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-7)


def test_a_spike_in_the_first_step_can_stop_training(capfd):
    model = common.compiled(common.mlp())
    before = model.get_weights()
    guard = tfdp.callbacks.SpikeGuard(action="stop", patience=1)
    history = common.fit(model, *spikes.data(0, value=np.inf), callbacks=[guard])
    assert history["skipped_spikes"] == [1]
    printed = capfd.readouterr().err
    assert "left out 1 update, and stopped training" in printed
    assert printed.split()[-1] == "none"  # the median before
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_the_table_has_what_was_left_out_and_an_end(capfd):
    x, y = common.regression_data(600)
    y[20:580:2] = np.nan
    model = common.compiled(common.mlp())
    guard = tfdp.callbacks.SpikeGuard(threshold=1e6)
    options = {"batch_size": 1, "epochs": 2, "callbacks": [guard]}
    assert common.fit(model, x, y, **options)["skipped_spikes"] == [280, 560]
    printed = capfd.readouterr().err.splitlines()
    assert printed[0] == "tfdp: `SpikeGuard` left out 560 updates:"
    assert printed[2].split()[:4] == ["21", "1", "21", "nan"]
    assert (len(printed), printed[-1]) == (53, "and 510 more")


class StepInFunction(spikes.OwnStep):
    """Its gradients are taken in a graph of their own, in which the loss stays."""

    @tf.function
    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        return tape.gradient(loss, self.trainable_variables)

    def train_step(self, batch):
        gradients = self.gradients(*batch)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {}


def test_a_loss_that_the_step_does_not_give_is_asked_for():
    model = common.compiled(StepInFunction(common.mlp().layers))
    guard = tfdp.callbacks.SpikeGuard()
    with pytest.raises(ValueError, match="The loss of the step is not known, since"):
        common.fit(model, *common.regression_data(), callbacks=[guard])


def test_the_loss_of_an_own_step_is_known_on_one_device_too():
    x, y = common.regression_data()
    y[3] = np.nan
    model = common.compiled(spikes.OwnStep(common.mlp().layers))
    history = common.fit(model, x, y, callbacks=[tfdp.callbacks.SpikeGuard()])
    assert history["skipped_spikes"] == [1]


@pytest.mark.full
def test_a_model_trains_with_another_optimizer_after_a_guard():
    model = common.compiled(common.mlp())
    common.fit(model, *spikes.data(), callbacks=[tfdp.callbacks.SpikeGuard()])
    common.compiled(model)
    common.fit(model, *spikes.data())


def test_a_gradient_that_is_nan_is_left_out_though_the_loss_is_finite():
    x, y = common.regression_data()
    x[20] = 0.0
    root = keras.layers.Lambda(lambda x: keras.ops.sqrt(keras.ops.abs(x)))
    layers = [keras.Input((6,)), keras.layers.Dense(1, use_bias=False), root]
    model = common.compiled(keras.Sequential(layers))
    history = common.fit(model, x, y, callbacks=[tfdp.callbacks.SpikeGuard()])
    assert history["skipped_spikes"] == [1]
    assert np.isfinite(history["loss"]).all()


def test_a_new_fit_counts_updates_in_a_row_anew():
    model = common.compiled(common.mlp())
    guard = tfdp.callbacks.SpikeGuard(patience=10)
    with pytest.raises(RuntimeError, match="left out 10 updates"):
        common.fit(model, *spikes.data(*range(20), value=np.nan), callbacks=[guard])
    more = tfdp.callbacks.GradientAccumulation(16)
    common.fit(model, *spikes.data(), callbacks=[more, guard])


def test_patience_is_checked_every_ten_steps_of_several_per_execution():
    x, y = common.regression_data(320)
    y[:] = np.nan
    model = common.compiled(common.mlp(), steps_per_execution=4)
    guard = tfdp.callbacks.SpikeGuard(patience=10)
    with pytest.raises(RuntimeError, match="left out 12 updates"):
        common.fit(model, x, y, callbacks=[guard])


@pytest.mark.parametrize("action", ["stop", full("rollback")])
def test_a_spike_of_leftover_batches_is_acted_on(action, tmp_path, capfd):
    model = common.compiled(common.mlp())
    callbacks = [
        tfdp.callbacks.GradientAccumulation(3, flush="epoch"),
        tfdp.callbacks.SpikeGuard(action=action, **spikes.GUARD | {"window": 5}),
        tfdp.callbacks.BackupAndRestore(tmp_path, 3),
    ]
    history = common.fit(model, *spikes.data(19), epochs=2, callbacks=callbacks)
    text = capfd.readouterr().err
    if action == "stop":
        assert len(history["loss"]) == 1
    else:
        assert text.count("going back") == 2
        assert "stopped" not in text
        assert max(history["loss"]) < 10
    assert text.splitlines()[-1].split()[1:3] == [str(len(history["loss"])), "20"]


@pytest.mark.full
def test_training_that_stops_counts_no_micro_batch_after_the_spike():
    found = []
    for rows, steps, guards in (
        (20, 4, [tfdp.callbacks.SpikeGuard(action="stop")]),
        (9, 1, []),
    ):
        keras.utils.set_random_seed(2)
        x, y = spikes.data(9, value=np.nan)
        model = common.compiled(spikes.with_state(), steps_per_execution=steps)
        more = [tfdp.callbacks.GradientAccumulation(2), *guards]
        common.fit(model, x[: rows * 8], y[: rows * 8], callbacks=more)
        found.append(model.get_weights())
    for own, other in zip(*found, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-7)
