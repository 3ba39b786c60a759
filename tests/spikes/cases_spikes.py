"""A batch that is bad on one replica only is left out by all, as if there was none."""

from __future__ import annotations

import hashlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env
from tests.harness.launches import launches
from tests.local_steps.cases_local_sgd import Replicas
from tests.reduction import cases_plans as plans
from tests.reduction.cases_selection import routed
from tests.step.cases_loss_scale import with_an_overflow
from tfdp.features.spikes.step_guard import StepGuard

case, same_as = registry.case, registry.same_as
layers, optimizers = keras.layers, keras.optimizers
NUM_BATCHES, BAD, SIZE = 20, 14, common.BATCH_SIZE
GUARD = {"threshold": 30.0, "window": 6}


def data(*bad: int, value: float = 1e4) -> tuple[np.ndarray, np.ndarray]:
    """Batches, of which some have a bad target in the last replica's last row."""
    x, y = common.regression_data(NUM_BATCHES * SIZE)
    for batch in bad:
        y[batch * SIZE + SIZE - 1] = value
    return x, y


def without(*batches: int, size: int = SIZE) -> tuple[np.ndarray, np.ndarray]:
    """The same without some batches of a size."""
    x, y = data()
    numbers = np.arange(len(x)) // size
    kept = ~np.isin(numbers, batches)
    return x[kept], y[kept]


def with_state() -> keras.Model:
    """A model with statistics and random numbers, which no step left out may move."""
    return keras.Sequential(
        [
            keras.Input((common.NUM_FEATURES,)),
            layers.Dense(6, use_bias=False),
            layers.BatchNormalization(synchronized=True),
            layers.Dropout(0.2),
            layers.Dense(1),
        ]
    )


def averaging() -> optimizers.Optimizer:
    """All that an update has besides: momentum, averages, decay, a norm to clip by."""
    return optimizers.SGD(
        0.05,
        0.9,
        use_ema=True,
        ema_momentum=0.8,
        weight_decay=0.01,
        global_clipnorm=1.0,
    )


def guarded(
    env: Env, rows: tuple, build: Any, make: Any, *more: Any, on: str, **options: Any
) -> tuple[keras.Model, dict]:
    """Trains with a guard, but on one device; returns the model and its history."""
    with env.scope():
        model = common.compiled(build(), make(), metrics=["mae"])
    callbacks = [*more, tfdp.callbacks.SpikeGuard(on=on, **GUARD)]
    given = [] if env.is_reference else callbacks
    return model, common.fit(model, *rows, callbacks=given, **options)


def trained(env: Env, model: keras.Model, history: dict) -> dict:
    """What is compared: all state, and the history, without what the guard adds."""
    if not env.is_reference:
        assert history.pop("skipped_spikes") == [1]
        guard = model.optimizer.features.installed[StepGuard]
        # Equal on all local replicas, bit for bit, and on all workers.
        state = list(env.read([*guard.variables, *model.weights]).values())
        digest = hashlib.sha256(b"".join(map(np.ndarray.tobytes, state))).hexdigest()
        group = env.strategy.extended.worker_group
        assert len(set(group.all_gather("digests", digest))) == 1
    return {
        "weights": env.weights(model),
        "iterations": int(model.optimizer.iterations.numpy()),
        "history": history,
    }


@case(
    "A bad batch on one replica: weights, averages, metrics and statistics stand",
    quick_setup="two_by_two",
)
def a_bad_batch_is_left_out_as_if_it_were_not_there(env: Env) -> dict:
    rows = without(BAD) if env.is_reference else data(BAD)
    return trained(env, *guarded(env, rows, with_state, averaging, on="loss"))


@case("The norm of the gradient is judged, and `steps_per_execution`")
@same_as("a_bad_batch_is_left_out_as_if_it_were_not_there")
def a_bad_gradient_is_left_out_in_the_middle_of_an_execution(env: Env) -> dict:
    rows = without(BAD) if env.is_reference else data(BAD)
    with env.scope():
        model = common.compiled(
            with_state(), averaging(), steps_per_execution=1 if env.is_reference else 5
        )
    guard = tfdp.callbacks.SpikeGuard(on="gradient_norm", **GUARD)
    history = common.fit(model, *rows, callbacks=[] if env.is_reference else [guard])
    return trained(env, model, history)


class OwnStep(keras.Sequential):
    """A `train_step` of the user's, which does not scale the loss."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return self.compute_metrics(x, y, self(x), None)


@case("A custom `train_step`, and XLA", setups=("mirrored", "two_workers"))
@same_as("a_bad_batch_is_left_out_as_if_it_were_not_there")
def a_bad_batch_of_an_own_step_is_left_out(env: Env) -> dict:
    rows = without(BAD) if env.is_reference else data(BAD)
    results = {}
    for name, kind in ("own", OwnStep), ("xla", keras.Sequential):
        keras.utils.set_random_seed(3)
        with env.scope():
            model = kind(common.mlp().layers)
            common.compiled(model, averaging(), jit_compile=name == "xla")
        guard = tfdp.callbacks.SpikeGuard(**GUARD)
        given = [] if env.is_reference else [guard]
        results[name] = trained(env, model, common.fit(model, *rows, callbacks=given))
    return results


@case("NaN in the first batch, without a loss scale")
@same_as("a_bad_batch_is_left_out_as_if_it_were_not_there")
def nan_in_the_first_batch_is_left_out(env: Env) -> dict:
    rows = without(0) if env.is_reference else data(0, value=np.nan)
    return trained(env, *guarded(env, rows, with_state, averaging, on="loss"))


def _sharded(stage: str, **options: Any) -> Any:
    return lambda: tfdp.DistributedOptimizer(averaging(), sharding=stage, **options)


STAGES = ("optimizer", "gradients", "parameters")


@case("Sharding 1 to 3, with the loss, the norm, and a loss scale", tol=2e-5)
@same_as("a_bad_batch_is_left_out_as_if_it_were_not_there")
def sharded_state_does_not_move_in_a_step_left_out(env: Env) -> dict:
    rows = without(BAD) if env.is_reference else data(BAD)
    results = {}
    for number, stage in enumerate(STAGES):
        scale = None if number == 0 else 64.0 if number == 1 else "dynamic"
        make = averaging if env.is_reference else _sharded(stage, loss_scale=scale)
        keras.utils.set_random_seed(3)
        on = "loss" if number != 2 else "gradient_norm"
        model, history = guarded(env, rows, common.mlp, make, on=on)
        history.pop("loss_scale", None)
        results[stage] = trained(env, model, history)
        results[stage]["weights"] = {
            str(i): w for i, w in enumerate(model.get_weights())
        }
    return results


@case(
    "A bad micro-batch: the update is left out with all its micro-batches",
    quick_setup="two_by_two",
)
@same_as("a_bad_batch_is_left_out_as_if_it_were_not_there")
def the_update_of_a_bad_micro_batch_is_left_out(env: Env) -> dict:
    def momentum() -> optimizers.Optimizer:
        return optimizers.SGD(0.05, 0.9, weight_decay=0.01, clipnorm=1.0)

    def sharded() -> tfdp.DistributedOptimizer:
        options = {"sharding": "gradients", "accumulation_steps": 2}
        return tfdp.DistributedOptimizer(momentum(), **options)

    results = {}
    for name, make in {"whole": momentum, "sharded": sharded}.items():
        keras.utils.set_random_seed(3)
        on = "loss" if name == "whole" else "gradient_norm"
        if env.is_reference:
            model = common.compiled(common.mlp(), momentum())
            common.fit(model, *without(BAD // 2, size=2 * SIZE), batch_size=2 * SIZE)
        else:
            # The first of the two; so the sum has it, and the last batch has not.
            more = [tfdp.callbacks.GradientAccumulation(2)]
            model, history = guarded(env, data(BAD), common.mlp, make, *more, on=on)
            assert history["skipped_spikes"] == [1]
            assert model.optimizer.accumulated_steps == 0
        results[name] = {str(i): w for i, w in enumerate(model.get_weights())}
        results[name]["iterations"] = int(model.optimizer.iterations.numpy())
    return results


@case(
    "Residuals of micro-batches cannot be undone", setups=("mirrored",), compare=False
)
@same_as("a_bad_batch_is_left_out_as_if_it_were_not_there")
def residuals_of_micro_batches_cannot_be_undone(env: Env) -> None:
    if env.is_reference:
        return
    guard = tfdp.callbacks.SpikeGuard()
    with routed(env, compression="int8"):
        with env.scope():
            model = common.compiled(common.mlp(), _sharded("gradients")())
        common.fit(model, *data(), callbacks=[guard])
        callbacks = [tfdp.callbacks.GradientAccumulation(2), guard]
        with pytest.raises(ValueError, match="reduced with residuals one by one"):
            common.fit(model, *data(), callbacks=callbacks)


@case("An overflow is the loss scale's to skip; a spike leaves the scale alone")
@same_as("a_bad_batch_is_left_out_as_if_it_were_not_there")
def an_overflow_is_no_spike_and_a_spike_no_overflow(env: Env) -> dict:
    rows = without(BAD, 3) if env.is_reference else data(BAD)
    scaling = tfdp.callbacks.LossScaling(16.0, growth_steps=100)
    if not env.is_reference:
        rows = with_an_overflow(*rows, row=4 * SIZE - 1)
    model, history = guarded(env, rows, common.mlp, averaging, scaling, on="loss")
    if not env.is_reference:
        assert (history["skipped_steps"], history["skipped_spikes"]) == ([1], [1])
        assert history["loss_scale"] == [8.0]
    return {
        "weights": env.weights(model),
        "iterations": int(model.optimizer.iterations.numpy()),
    }


@case("Replicas with local steps decide each by itself", compare=False)
@same_as("a_bad_batch_is_left_out_as_if_it_were_not_there")
def a_replica_with_local_steps_leaves_its_own_step_out(env: Env) -> dict:
    with env.scope():
        model = common.compiled(common.mlp(), optimizers.SGD(0.05))
    expected = Replicas(
        env.num_replicas, lambda: optimizers.SGD(0.05), model.get_weights()
    )
    callbacks = [tfdp.callbacks.SpikeGuard(**GUARD), tfdp.callbacks.LocalSGD(100)]
    x, y = data(BAD)
    common.fit(model, x, y, callbacks=callbacks)
    for number, rows in enumerate(np.split(np.arange(len(x)), NUM_BATCHES)):
        left_out = [env.num_replicas - 1] if number == BAD else []
        expected.step(x[rows], y[rows], left_out)
    # An average is weighted by rows, and the batch that was left out has none.
    weights, samples = [m.get_weights() for m in expected.models], expected.samples
    for found, *own in zip(model.get_weights(), *weights, strict=True):
        wanted = np.average(own, axis=0, weights=samples)
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    return {}


@case(
    "With local steps a worker whose updates are all bad ends all workers",
    setups=("two_workers",),
    compare=False,
)
@same_as("too_many_spikes_in_a_row_stop_every_worker")
def all_updates_of_a_worker_with_local_steps_are_bad(env: Env) -> None:
    x, y = common.regression_data(3 * SIZE)
    y.reshape(3, SIZE)[:, SIZE // 2 :] = np.nan
    text = "another worker left out all" if env.is_chief else "3 updates in a row"
    for order in 1, -1:
        with env.scope():
            model = common.compiled(common.mlp())
        callbacks = [tfdp.callbacks.LocalSGD(8), tfdp.callbacks.SpikeGuard()][::order]
        with pytest.raises(RuntimeError, match=text):
            common.fit(model, x, y, callbacks=callbacks)


@case("`action='stop'`: the weights are those before the spike")
@same_as("a_bad_batch_is_left_out_as_if_it_were_not_there")
def training_stops_with_the_weights_before_a_spike(env: Env) -> dict:
    if env.is_reference:
        rows = [part[: BAD * SIZE] for part in data()]
        model = common.compiled(with_state(), averaging())
        return trained(env, model, common.fit(model, *rows))
    with env.scope():
        model = common.compiled(with_state(), averaging(), steps_per_execution=5)
    guard = tfdp.callbacks.SpikeGuard(action="stop", **GUARD)
    history = common.fit(model, *data(BAD), epochs=3, callbacks=[guard])
    result = trained(env, model, history)
    # What follows trains.
    model.train_on_batch(*(part[:SIZE] for part in data()))
    assert int(model.optimizer.iterations) == BAD + 1
    return result


class Begun(keras.callbacks.Callback):
    """Counts how often training begins, and how many batches it makes."""

    num_begun = num_batches = 0

    def on_train_begin(self, logs=None):
        self.num_begun += 1

    def on_train_batch_end(self, batch, logs=None):
        self.num_batches += 1


@case(
    "Back to a backup for an update of two micro-batches, without both of them",
    quick_setup="two_workers",
)
@same_as("a_bad_batch_is_left_out_as_if_it_were_not_there")
def a_rollback_leaves_out_all_micro_batches_of_a_bad_update(env: Env) -> dict:
    # 10 updates: the fifth is bad in its first micro-batch, and so is the sixth.
    bad = (12, 14)
    rows = without(12, 13, 14, 15) if env.is_reference else data(*bad)
    accumulation = {"gradient_accumulation_steps": 2} if env.is_reference else {}
    with env.scope():
        optimizer = optimizers.SGD(0.05, 0.9, global_clipnorm=1.0, **accumulation)
        model = common.compiled(with_state(), optimizer, metrics=["mae"])
    if env.is_reference:
        return trained(env, model, common.fit(model, *rows))
    begun = Begun()
    callbacks = [
        tfdp.callbacks.SpikeGuard(action="rollback", patience=3, **GUARD),
        tfdp.callbacks.GradientAccumulation(2),
        begun,
        tfdp.callbacks.BackupAndRestore(env.tmp / "backups", 4),
    ]
    history = common.fit(model, *rows, callbacks=callbacks)
    # Back to 12 from 14, and from 16.
    assert (begun.num_begun, begun.num_batches) == (1, 13 + 3 + 8), begun.num_batches
    assert history["skipped_spikes"] == [2]
    history["skipped_spikes"] = [1]
    return trained(env, model, history)


@case(
    "Sharded state goes back, in the middle of an execution; too many times in a row",
    quick_setup="two_workers",
)
@same_as("a_bad_batch_is_left_out_as_if_it_were_not_there")
def a_rollback_restores_sharded_state(env: Env) -> dict:
    rows = without(BAD) if env.is_reference else data(BAD)
    results = {}
    for stage in STAGES:
        keras.utils.set_random_seed(3)
        steps = 1 if env.is_reference else 4
        make = averaging if env.is_reference else _sharded(stage)
        with env.scope():
            model = common.compiled(common.mlp(), make(), steps_per_execution=steps)
        callbacks = [
            tfdp.callbacks.SpikeGuard(action="rollback", **GUARD),
            tfdp.callbacks.BackupAndRestore(env.tmp / stage, 4, memory_every=4),
        ]
        given = [] if env.is_reference else callbacks
        results[stage] = trained(env, model, common.fit(model, *rows, callbacks=given))
        values = {str(i): w for i, w in enumerate(model.get_weights())}
        results[stage]["weights"] = values
    if not env.is_reference:
        guard = tfdp.callbacks.SpikeGuard(action="rollback", patience=2, **GUARD)
        backup = tfdp.callbacks.BackupAndRestore(env.tmp / "more", 4)
        with env.scope():
            model = common.compiled(common.mlp())
        with pytest.raises(RuntimeError, match="left out 2 updates in a row"):
            common.fit(model, *data(BAD, BAD + 1), callbacks=[guard, backup])
    return results


@case("Everything on: a rollback gives what a skip gives", compare=False)
@same_as("a_bad_batch_is_left_out_as_if_it_were_not_there")
def a_rollback_gives_what_a_skip_gives_with_all_other_callbacks(env: Env) -> dict:
    results = []
    for action in "skip", "rollback":
        keras.utils.set_random_seed(3)
        with env.scope():
            model = common.compiled(with_state(), averaging(), metrics=["mae"])
        callbacks = [
            tfdp.callbacks.SpikeGuard(action=action, **GUARD),
            tfdp.callbacks.LearningRateWarmup(epochs=1),
            tfdp.callbacks.LossScaling(16.0, growth_steps=7),
            tfdp.callbacks.GradientNoiseScale(),
            keras.callbacks.ReduceLROnPlateau(patience=1),
            keras.callbacks.EarlyStopping(patience=5, restore_best_weights=True),
            tfdp.callbacks.BackupAndRestore(env.tmp / action, 5),
        ]
        given = {"epochs": 2, "validation_data": data()}
        history = common.fit(model, *data(BAD, 9), callbacks=callbacks, **given)
        assert history["skipped_spikes"] == [2, 4]
        results.append((history, model.get_weights()))
    (skipped, weights), (gone_back, others) = results
    assert skipped.keys() == gone_back.keys()
    for name, values in skipped.items():
        np.testing.assert_allclose(gone_back[name], values, rtol=1e-5, err_msg=name)
    for own, other in zip(weights, others, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-7)
    return {}


@case(
    "Too many spikes in a row: one error on every worker",
    quick_setup="two_workers",
    compare=False,
)
def too_many_spikes_in_a_row_stop_every_worker(env: Env) -> dict:
    with env.scope():
        model = common.compiled(common.mlp())
    guard = tfdp.callbacks.SpikeGuard(patience=3, **GUARD)
    with pytest.raises(RuntimeError, match="left out 6 updates in a row") as caught:
        common.fit(model, *data(*range(BAD, NUM_BATCHES)), callbacks=[guard])
    assert "batch 20 of epoch 1" in str(caught.value), caught.value
    assert "dense_1/bias" in str(caught.value), caught.value
    assert model.optimizer.iterations.numpy() == BAD
    return {"text": str(caught.value)}


@case("All batches are bad, fewer than `patience`", compare=False)
@same_as("too_many_spikes_in_a_row_stop_every_worker")
def training_in_which_all_batches_are_bad_ends_with_an_error(env: Env) -> dict:
    with env.scope():
        model = common.compiled(common.mlp())
    x, y = (part[: 3 * SIZE] for part in data(0, 1, 2, value=np.inf))
    with pytest.raises(RuntimeError, match="left out 3 updates in a row"):
        common.fit(model, x, y, callbacks=[tfdp.callbacks.SpikeGuard()])
    return {}


@case("A loss that is constant, then one that is not", compare=False)
@same_as("too_many_spikes_in_a_row_stop_every_worker")
def a_constant_loss_is_no_spike_and_no_excuse(env: Env) -> dict:
    x, y = data()
    with env.scope():
        model = common.compiled(common.mlp(), optimizers.SGD(0.0), loss=_target)
    guard = tfdp.callbacks.SpikeGuard(**GUARD)
    y[:] = 2.0
    y[BAD * SIZE : (BAD + 1) * SIZE] = 2.5  # within 30 times 1 % of the median
    y[(BAD + 2) * SIZE : (BAD + 3) * SIZE] = 2.7
    history = common.fit(model, x, y, callbacks=[guard])
    assert history["skipped_spikes"] == [1]
    return {}


def _target(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    return y_true + 0.0 * y_pred


def _launched(env: Env, make: Any, on: str | None) -> int:
    """The number of collectives of a step."""
    with env.scope():
        model = common.compiled(plans.perceptron(), make())
    guards = [] if on is None else [tfdp.callbacks.SpikeGuard(on=on)]
    common.fit(model, *common.regression_data(SIZE), callbacks=guards)
    step = plans.step_of(model.train_function)
    key = env.strategy.extended.group.key
    found = [each for each in launches(step) if each.group_key == key]
    return len(found) // env.setup.devices_per_worker


@case(
    "No collective more: the loss travels with gradients or norms",
    setups=("mirrored", "two_workers"),
    compare=False,
)
def a_guard_adds_no_collective(env: Env) -> dict:
    _check_collectives(env, _plain())
    return {}


def _check_collectives(env: Env, make: Any) -> None:
    off = _launched(env, make, None)
    assert off >= 1
    for on in "loss", "gradient_norm":
        assert _launched(env, make, on) == off


@case(
    "No collective more where the optimizer is sharded, but one without clipping",
    setups=("mirrored", "two_workers"),
    compare=False,
)
@same_as("a_guard_adds_no_collective")
def a_guard_adds_no_collective_to_sharded_state(env: Env) -> dict:
    _check_collectives(env, _sharded("optimizer"))
    # Without clipping, the norms of sharded gradients are summed for the guard.
    make = _plain(sharding="optimizer")
    assert _launched(env, make, "loss") == _launched(env, make, None) + 1
    return {}


@case(
    "No collective more, with a loss scale, accumulation, and sharding 2 and 3",
    setups=("mirrored", "two_workers"),
    compare=False,
)
@same_as("a_guard_adds_no_collective")
def a_guard_adds_no_collective_to_a_step_with_more(env: Env) -> dict:
    for make, on in (
        (_plain(loss_scale="dynamic"), "loss"),
        (_plain(accumulation_steps=2), "loss"),
        (_sharded("gradients", accumulation_steps=2), "loss"),
        (_sharded("parameters"), "gradient_norm"),
    ):
        assert _launched(env, make, on) == _launched(env, make, None)
    return {}


def _plain(**options: Any) -> Any:
    return lambda: tfdp.DistributedOptimizer(optimizers.SGD(0.05), **options)


@case("A guard that a later `fit` does not have is not in its graph", compare=False)
@same_as("too_many_spikes_in_a_row_stop_every_worker")
def a_later_fit_without_the_guard_has_nothing_of_it(env: Env) -> dict:
    rows = [part[: 4 * SIZE] for part in data(value=0.0)]
    operations = []
    for callbacks in [], [tfdp.callbacks.SpikeGuard()]:
        with env.scope():
            optimizer = tfdp.DistributedOptimizer(optimizers.SGD(0.05))
            model = common.compiled(common.mlp(), optimizer)
        common.fit(model, *rows, callbacks=callbacks)
        common.fit(model, *rows)
        step = plans.traced_step(model, rows)
        operations.append([op.type for op in step.graph.get_operations()])
    assert operations[0] == operations[1]
    bad = data(0, value=np.nan)
    assert "skipped_spikes" not in common.fit(model, *bad)
    assert np.isnan(model.get_weights()[0]).all()
    return {}
