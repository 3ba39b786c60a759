"""What a checkpoint holds of an optimizer: counters, loss scale, waiting gradients."""

from __future__ import annotations

import pathlib

import keras
import numpy as np
import pytest

import tfdp
from tests.harness import common

pytestmark = pytest.mark.slow

X, Y = common.regression_data(40)


def trained(
    num_steps: int,
    *,
    accumulation_steps: int = 1,
    loss_scale: str | None = None,
    run_eagerly: bool = True,
) -> keras.Model:
    """A model after some micro-batches of eight rows: too few to trace them for."""
    keras.utils.set_random_seed(1)
    optimizer = tfdp.DistributedOptimizer(
        keras.optimizers.Adam(0.01),
        accumulation_steps=accumulation_steps,
        loss_scale=loss_scale,
    )
    model = compiled(optimizer, run_eagerly)
    go_on(model, 0, num_steps)
    return model


def compiled(optimizer: keras.Optimizer, run_eagerly: bool = True) -> keras.Model:
    model = common.mlp()
    model.compile(optimizer, "mse", run_eagerly=run_eagerly, jit_compile=False)
    optimizer.build(model.trainable_variables)
    return model


def go_on(model: keras.Model, first: int, count: int) -> None:
    rows = slice(8 * first, 8 * (first + count))
    if count:
        common.fit(model, X[rows], Y[rows], batch_size=8, epochs=1)


def test_gradients_that_wait_for_an_update_are_saved(tmp_path):
    options = {"accumulation_steps": 2, "loss_scale": "dynamic", "run_eagerly": False}
    model = trained(3, **options)
    assert model.optimizer.accumulated_steps == 1
    tfdp.checkpoint.save(model, tmp_path)
    go_on(model, 3, 2)
    again = trained(0, **options)
    tfdp.checkpoint.restore(again, tmp_path)
    assert again.optimizer.accumulated_steps == 1
    go_on(again, 3, 2)
    for found, wanted in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert again.optimizer.loss_scale == model.optimizer.loss_scale


@pytest.mark.full
def test_nothing_waits_after_a_checkpoint_in_which_nothing_did(tmp_path):
    tfdp.checkpoint.save(trained(2, accumulation_steps=2), tmp_path)
    again = trained(1, accumulation_steps=2)
    tfdp.checkpoint.restore(again, tmp_path)
    assert again.optimizer.accumulated_steps == 0
    sums = again.optimizer.features.accumulation.sums
    assert not any(total.numpy().any() for total in sums)


def test_an_optimizer_that_accumulates_no_gradients_cannot_take_waiting_ones(tmp_path):
    tfdp.checkpoint.save(trained(1, accumulation_steps=2), tmp_path)
    model = trained(1)
    before = model.get_weights()
    with pytest.raises(ValueError, match="give it `accumulation_steps` before"):
        tfdp.checkpoint.restore(model, tmp_path)
    for found, wanted in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(found, wanted)


def check_left_out(saved: keras.Model, warning: str, folder: pathlib.Path) -> None:
    """Restores a checkpoint into a model that lacks a part of it, which is said."""
    tfdp.checkpoint.save(saved, folder)
    model = trained(0)
    with pytest.warns(UserWarning, match=warning):
        tfdp.checkpoint.restore(model, folder)
    for found, wanted in zip(model.get_weights(), saved.get_weights(), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_loss_scale_that_nobody_takes_is_left_out_with_a_warning(tmp_path):
    saved = trained(2, loss_scale="dynamic")
    check_left_out(saved, "the optimizer has none", tmp_path)


def test_an_outer_optimizer_that_nobody_takes_is_left_out_with_a_warning(tmp_path):
    saved = trained(0)
    diloco = tfdp.callbacks.DiLoCo(sync_every=2, scope="replica")
    common.fit(saved, X[:16], Y[:16], batch_size=8, epochs=1, callbacks=[diloco])
    check_left_out(saved, "the model does not use `DiLoCo`", tmp_path)


def plain() -> keras.Model:
    """A model that Keras accumulates gradients for."""
    return compiled(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2))


def test_gradients_that_wait_in_plain_keras_are_saved_too(tmp_path):
    saved, model = plain(), trained(0, accumulation_steps=2)
    go_on(saved, 0, 3)
    tfdp.checkpoint.save(saved, tmp_path)
    tfdp.checkpoint.restore(model, tmp_path)
    assert model.optimizer.accumulated_steps == 1
    go_on(saved, 3, 2)
    go_on(model, 3, 2)
    for found, wanted in zip(model.get_weights(), saved.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)


def test_counters_are_saved_as_keras_counts(tmp_path):
    model = trained(0)
    model.optimizer.iterations.assign(2**40)
    tfdp.checkpoint.save(model, tmp_path)
    again = trained(1)
    tfdp.checkpoint.restore(again, tmp_path)
    assert int(again.optimizer.iterations) == 2**40


def test_plain_keras_takes_what_tfdp_saved(tmp_path):
    saved, model = trained(3, accumulation_steps=2), plain()
    tfdp.checkpoint.save(saved, tmp_path)
    tfdp.checkpoint.restore(model, tmp_path)
    assert int(model.optimizer.iterations) == 1
    go_on(saved, 3, 2)
    go_on(model, 3, 2)
    for found, wanted in zip(model.get_weights(), saved.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)


def test_a_model_that_is_not_compiled_is_saved_under_a_strategy(tmp_path):
    with tfdp.MirroredStrategy(["CPU:0"]).scope():
        model = common.mlp()
    tfdp.checkpoint.save(model, tmp_path)
    again = common.mlp()
    tfdp.checkpoint.restore(again, tmp_path)
    for found, wanted in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(found, wanted)
