"""What happens to an optimizer between fits: files, new rates, other settings."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env

optimizers = keras.optimizers
BATCHES = 4
ACCUMULATES = {"gradient_accumulation_steps": 2}
NUM_ROWS = BATCHES * common.BATCH_SIZE


def case(covers: str) -> Any:
    """A case of one process, in which all of this happens."""
    return registry.case(covers, compare=False, setups=("mirrored",))


def built(env: Env, optimizer: Any, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    with env.scope():
        return common.compiled(common.mlp(), optimizer, **options)


def fit(model: keras.Model, *callbacks: Any, **options: Any) -> dict:
    data = common.regression_data(NUM_ROWS)
    return common.fit(
        model, *data, **{"epochs": 1, "callbacks": list(callbacks), **options}
    )


def difference(one: list, other: list) -> float:
    return max(np.abs(a - b).max() for a, b in zip(one, other, strict=True))


@case("What was evaluated before parameters were sharded is evaluated anew")
@registry.same_as("deferred_parameters_train_like_one_device")
def evaluation_sees_parameters_that_were_sharded_later(env: Env) -> dict:
    x, y = common.regression_data(NUM_ROWS)
    model = built(env, optimizers.Adam(0.05))
    before = model.predict(x, verbose=0)
    model.evaluate(x, y, verbose=0)
    sharded = tfdp.callbacks.ShardedOptimizer(stage=3)
    history = fit(model, sharded, validation_data=(x, y))
    after = model.predict(x, verbose=0)
    assert np.abs(after - before).max() > 0.01
    plain = common.mlp()
    plain.set_weights(model.get_weights())
    wanted = plain(x).numpy()
    np.testing.assert_allclose(after, wanted, atol=1e-5)
    np.testing.assert_allclose(history["val_loss"], np.mean((wanted - y) ** 2), 1e-4)
    return {}


@case("Evaluation of sharded parameters is that of whole ones in each epoch")
@registry.same_as("deferred_parameters_train_like_one_device")
def evaluation_of_sharded_parameters_follows_each_epoch(env: Env) -> dict:
    data = common.regression_data(NUM_ROWS)
    found = []
    for callbacks in [], [tfdp.callbacks.ShardedOptimizer(stage=3)]:
        model = built(env, optimizers.Adam(0.05))
        before = model.predict(data[0], verbose=0)
        model.evaluate(*data, verbose=0)
        history = fit(model, *callbacks, epochs=3, validation_data=data)
        after = model.predict(data[0], verbose=0)
        assert np.abs(after - before).max() > 0.01
        found.append([np.array(history["val_loss"]), after])
    assert difference(*found) < 1e-4
    return {}


@case("A warmup goes on where each epoch is a `fit`, and is made once")
@registry.same_as("warmup_goes_on_where_it_was_saved")
def warmup_goes_on_in_the_next_fit(env: Env) -> dict:
    model = built(env, optimizers.SGD(0.01))
    warmup = tfdp.callbacks.LearningRateWarmup(steps=2 * BATCHES)
    rates = []
    for epoch in range(3):
        fit(model, warmup, initial_epoch=epoch, epochs=epoch + 1)
        rates.append(float(model.optimizer.learning_rate.numpy()))
    wanted = 0.01 * env.num_replicas
    np.testing.assert_allclose(rates, [0.01, 0.01, wanted], rtol=1e-6)
    fit(model, tfdp.callbacks.LearningRateWarmup(steps=2))
    rate = float(model.optimizer.learning_rate.numpy())
    np.testing.assert_allclose(rate, wanted, rtol=1e-6)
    return {}


@case("A warmup that was over before a resume is not made again")
@registry.same_as("warmup_goes_on_where_it_was_saved")
def warmup_is_over_after_a_resume(env: Env) -> dict:
    model = built(env, optimizers.SGD(0.01))
    warmup = tfdp.callbacks.LearningRateWarmup(steps=2)
    fit(model, warmup)
    rates = [float(model.optimizer.learning_rate.numpy())]
    resumed = built(env, optimizers.SGD(rates[-1]))
    again = tfdp.callbacks.LearningRateWarmup(steps=2)
    again.set_model(resumed)
    again.set_state(warmup.get_state())
    fit(resumed, tfdp.callbacks.LearningRateWarmup(steps=2))
    rates.append(float(resumed.optimizer.learning_rate.numpy()))
    np.testing.assert_allclose(rates, [0.01 * env.num_replicas] * 2, rtol=1e-6)
    return {}


@case("LARS leaves out of its adaptation what it was told to, sharded too")
@registry.same_as("sharded_state_heeds_exclusions_and_constraints")
def lars_excludes_the_same_variables_where_it_is_sharded(env: Env) -> dict:
    return _excluding(env, "parameters")


@case("LARS leaves out the same where its state alone is sharded")
@registry.same_as("sharded_state_heeds_exclusions_and_constraints")
def lars_excludes_the_same_variables_where_its_state_is_sharded(env: Env) -> dict:
    return _excluding(env, "optimizer")


def _excluding(env: Env, sharded: str) -> dict:
    found = []
    for sharding in "none", sharded:
        lars = tfdp.optimizers.LARS(0.5, momentum=0.9, weight_decay=1e-4)
        lars.exclude_from_layer_adaptation(var_names=["/kernel"])
        model = built(env, tfdp.DistributedOptimizer(lars, sharding=sharding))
        fit(model)
        found.append(model.get_weights())
    assert difference(*found) < 1e-5
    return {}


@case("Averages of sharded state leave frozen layers alone")
@registry.same_as("averages_of_slices")
def averages_leave_frozen_layers_alone(env: Env) -> dict:
    model = built(env, optimizers.SGD(0.01, use_ema=True))
    sharded = tfdp.callbacks.ShardedOptimizer()
    fit(model, sharded)
    layer = model.layers[0]
    layer.kernel.assign(np.full(layer.kernel.shape, 3.0))
    layer.trainable = False
    with env.scope():
        model.compile(model.optimizer, "mse")
    before = model.layers[-1].kernel.numpy()
    fit(model, sharded)
    np.testing.assert_array_equal(layer.kernel.numpy(), 3.0)
    assert np.abs(model.layers[-1].kernel.numpy() - before).max() > 0
    return {}


@case("An optimizer that a callback has wrapped is compiled again")
def the_users_own_optimizer_is_compiled_again(env: Env) -> dict:
    assert (
        _updates_after_compiling_again(
            env,
            optimizers.Adam(0.01, gradient_accumulation_steps=BATCHES),
            tfdp.callbacks.LearningRateWarmup(steps=2),
        )
        == 1
    )
    return {}


@case("An optimizer whose state a callback has sharded is compiled again")
@registry.same_as("the_users_own_optimizer_is_compiled_again")
def the_users_own_sharded_optimizer_is_compiled_again(env: Env) -> dict:
    own, sharded = optimizers.Adam(0.01), tfdp.callbacks.ShardedOptimizer()
    assert _updates_after_compiling_again(env, own, sharded) == BATCHES
    return {}


def _updates_after_compiling_again(env: Env, own: Any, callback: Any) -> int:
    model = built(env, own)
    fit(model, callback)
    model.layers[0].trainable = False
    with env.scope():
        model.compile(own, "mse")
    before = int(model.optimizer.iterations.numpy())
    fit(model)
    return int(model.optimizer.iterations.numpy()) - before


@case("Values of an optimizer's variables are set, or refused")
def optimizer_variables_are_set(env: Env) -> dict:
    model = built(env, tfdp.DistributedOptimizer(optimizers.Adam(0.01)))
    optimizer = model.optimizer
    with env.scope():
        optimizer.build(model.trainable_variables)
    values = [variable.numpy() + 1 for variable in optimizer.variables]
    optimizer.set_weights(values)
    for variable, value in zip(optimizer.variables, values, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    with pytest.raises(ValueError, match="takes one value for each of its `variables`"):
        optimizer.set_weights(values[1:])
    return {}


if hasattr(optimizers, "MultiOptimizer"):

    @case("Settings of a `MultiOptimizer` made by a function say so")
    def a_multi_optimizer_of_a_function_says_what_it_cannot(env: Env) -> dict:
        def multi(**options: Any) -> Any:
            parts = optimizers.SGD(0.01, **options), optimizers.Adam(0.01, **options)
            return keras.optimizers.MultiOptimizer(lambda v: parts["kernel" in v.path])

        with env.scope():
            optimizer = tfdp.DistributedOptimizer(multi())
            accumulating = tfdp.DistributedOptimizer(
                multi(gradient_accumulation_steps=2)
            )
        with pytest.raises(ValueError, match="has no optimizers before it is built"):
            optimizer.exclude_from_weight_decay(var_names=["bias"])
        model = built(env, accumulating)
        with pytest.raises(ValueError, match="give `accumulation_steps` to"):
            fit(model)
        return {}


class Two(keras.Model):
    """A model whose second layer has an optimizer of its own."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.first = keras.layers.Dense(3)
        self.second = keras.layers.Dense(1)
        self.other = other

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.second(self.first(x))

    def train_step(self, data: tuple) -> dict:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        for part, optimizer in (self.first, self.optimizer), (self.second, self.other):
            variables = part.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def two(env: Env, make: Any = optimizers.Adam, *, is_built: bool = True) -> Two:
    keras.utils.set_random_seed(1)
    with env.scope():
        model = Two(make(0.01))
        model.compile(optimizers.Adam(0.01), "mse")
        model(common.regression_data(2)[0])
        if is_built:
            model.other.build(model.second.trainable_variables)
    return model


class StopAfterTwo(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            raise KeyboardInterrupt


@case("A model's other optimizers are in its checkpoints")
def other_optimizers_are_saved_and_restored(env: Env) -> dict:
    model, folder = two(env), str(env.tmp / "checkpoint")
    fit(model)
    tfdp.checkpoint.save(model, folder)
    again = two(env)
    tfdp.checkpoint.restore(again, folder)
    for own, other in (again, model), (again.other, model.other):
        for value, wanted in zip(own.variables, other.variables, strict=True):
            np.testing.assert_array_equal(value.numpy(), wanted.numpy())
    accumulating = two(env, functools.partial(optimizers.Adam, **ACCUMULATES))
    with pytest.raises(ValueError, match=r"gradients of `model\.optimizer` only"):
        tfdp.checkpoint.save(accumulating, folder)
    with pytest.raises(ValueError, match="state of another optimizer of the model was"):
        tfdp.checkpoint.restore(two(env, is_built=False), folder)
    return {}


@case("A model's other optimizers are saved, too")
@registry.same_as("other_optimizers_are_saved_and_restored")
def other_optimizers_are_backed_up_and_restored(env: Env) -> dict:
    model = two(env)
    fit(model, epochs=4)
    wanted = model.get_weights()
    folder = str(env.tmp / "backup")
    with pytest.raises(KeyboardInterrupt):
        fit(two(env), tfdp.callbacks.BackupAndRestore(folder), StopAfterTwo(), epochs=4)
    resumed = two(env)
    kept = tfdp.callbacks.BackupAndRestore(folder, delete_at_end=False)
    fit(resumed, kept, epochs=4)
    assert difference(wanted, resumed.get_weights()) == 0.0
    unbuilt = two(env, is_built=False)
    with pytest.warns(UserWarning, match="was not restored: the optimizer does not"):
        fit(unbuilt, tfdp.callbacks.BackupAndRestore(folder), epochs=5)
    folder = str(env.tmp / "checkpoint")
    tfdp.checkpoint.save(model, folder)
    again = two(env)
    tfdp.checkpoint.restore(again, folder)
    assert int(again.other.iterations.numpy()) == 4 * BATCHES
    tfdp.checkpoint.save(two(env, is_built=False), folder + " of none")
    with pytest.warns(UserWarning, match="was not saved; it keeps its current values"):
        tfdp.checkpoint.restore(again, folder + " of none")
    return {}


@case("A Keras file does not lose what is sharded")
@registry.same_as("optimizer_with_ambiguous_state_is_refused_before_it_trains")
def files_of_other_sharded_optimizers_say_so(env: Env) -> dict:
    def sharded(rate: float) -> Any:
        return tfdp.DistributedOptimizer(optimizers.Adam(rate), sharding="optimizer")

    model = two(env, sharded)
    fit(model)
    with pytest.raises(ValueError, match="A Keras file cannot hold sharded state"):
        model.save_weights(str(env.tmp / "w.weights.h5"))
    return {}


class StopWithinAnEpoch(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations.numpy()) == BATCHES + 2:
            raise KeyboardInterrupt


@case("Several shuffles go on in their orders")
@registry.same_as("shuffled_data_gives_the_batches_of_one_device")
def several_shuffles_are_resumed_in_their_orders(env: Env) -> dict:
    model = built(env, optimizers.SGD(0.05))
    initial = model.get_weights()

    def train(*callbacks: Any) -> list:
        keras.utils.set_random_seed(1)  # a global seed
        model.set_weights(initial)
        model.optimizer.iterations.assign(0)
        data = tf.data.Dataset.from_tensor_slices(common.regression_data(NUM_ROWS))
        data = data.shuffle(NUM_ROWS, seed=4).batch(common.BATCH_SIZE)
        data = data.shuffle(5, seed=6)
        common.fit(model, data, epochs=3, callbacks=list(callbacks), batch_size=None)
        return model.get_weights()

    wanted = train()
    folder = str(env.tmp / "backup")
    with pytest.raises(KeyboardInterrupt):
        train(tfdp.callbacks.BackupAndRestore(folder, save_freq=1), StopWithinAnEpoch())
    found = train(tfdp.callbacks.BackupAndRestore(folder, save_freq=1))
    assert difference(wanted, found) == 0.0
    return {}
