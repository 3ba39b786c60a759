"""Replicas that step alone: their losses, their sums, and what they begin with."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env
from tests.harness.launches import launches
from tests.local_steps.cases_diloco import EVERYTHING, Nodes, expected_model
from tests.local_steps.cases_local_sgd import (
    EPOCHS,
    NUM_ROWS,
    Make,
    Replicas,
    momentum,
    trained_alone,
)
from tests.reduction import cases_plans as plans
from tests.step.cases_loss_scale import with_an_overflow
from tfdp.ground._compat import tf_distribute

case = registry.case
layers, optimizers = keras.layers, keras.optimizers
SYNC_EVERY = 4
NUM_STEPS = 5


def sgd() -> optimizers.Optimizer:
    return optimizers.SGD(0.05)


def masked(make: Make) -> keras.Model:
    """A model whose loss is a mean over the tokens that are there."""
    model = keras.Sequential(
        [
            keras.Input((NUM_STEPS,), dtype="int32"),
            layers.Embedding(common.NUM_TOKENS, 4, mask_zero=True),
            layers.Dense(1),
        ]
    )
    return common.compiled(model, make())


def root_mean_square(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """No mean over rows."""
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y_true - y_pred)))


def of_a_root(make: Make) -> keras.Model:
    """A model with a loss of all rows, and moments of all rows."""
    model = keras.Sequential(
        [
            keras.Input((NUM_STEPS,), dtype="float32"),
            layers.Dense(6, activation="tanh"),
            layers.BatchNormalization(synchronized=True),
            layers.Dense(1),
        ]
    )
    return common.compiled(model, make(), loss=root_mean_square)


def token_batches() -> tuple[np.ndarray, np.ndarray, list[slice]]:
    """Tokens, of which another part is missing in each row, and targets."""
    rng = np.random.default_rng(3)
    x = rng.integers(1, common.NUM_TOKENS, size=(NUM_ROWS, NUM_STEPS))
    kept = rng.integers(1, NUM_STEPS + 1, size=NUM_ROWS)
    x[np.arange(NUM_STEPS) >= kept[:, np.newaxis]] = 0
    y = rng.normal(size=(NUM_ROWS, NUM_STEPS, 1)).astype("float32")
    starts = range(0, NUM_ROWS, common.BATCH_SIZE)
    return x.astype("int32"), y, [slice(i, i + common.BATCH_SIZE) for i in starts]


def contrast(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """A loss that compares each row with all others, and has no rule for that."""
    logits = tf.matmul(y_pred, y_pred, transpose_b=True)
    return keras.ops.logsumexp(logits) + keras.ops.mean(tf.sort(y_pred - y_true, 0))


def of_pairs(make: Make) -> keras.Model:
    """A model whose loss compares rows, with a penalty that has none."""
    hidden = layers.Dense(6, activation="tanh", kernel_regularizer="l2")
    model = keras.Sequential(
        [keras.Input((NUM_STEPS,), dtype="float32"), hidden, layers.Dense(1)]
    )
    return common.compiled(model, make(), loss=contrast)


def data_of(build: object) -> tuple[np.ndarray, np.ndarray, list[slice]]:
    x, y, batches = token_batches()
    return (x, y, batches) if build is masked else (x / 10, y[:, 0], batches)


def check_trained(env: Env, model: keras.Model, expected: keras.Model) -> None:
    """The trained weights of all replicas are those of a model on one device."""
    pairs = zip(model.trainable_variables, expected.trainable_variables, strict=True)
    for variable, wanted in pairs:
        (found,) = env.read([variable]).values()
        # Moments of one or two rows make more of the rounding of sums.
        np.testing.assert_allclose(
            found, wanted.numpy(), atol=1e-4, err_msg=variable.path
        )


def check_losses_of_replicas(env: Env, build: Callable[[Make], keras.Model]) -> None:
    """A model trained by replicas alone is that of replicas on one device."""
    x, y, batches = data_of(build)
    with env.scope():
        model = build(momentum)
    expected = Replicas(env.num_replicas, momentum, model.get_weights(), build)
    steps: list = []

    def keep(batch: int, logs: dict | None) -> None:
        steps.append(plans.step_of(model.train_function))

    callbacks = [
        tfdp.callbacks.LocalSGD(SYNC_EVERY),
        keras.callbacks.LambdaCallback(on_train_batch_end=keep),
    ]
    history = common.fit(model, x, y, epochs=1, callbacks=callbacks)
    for number, rows in enumerate(batches, start=1):
        expected.step(x[rows], y[rows])
        if number % SYNC_EVERY == 0:
            expected.average()
    check_trained(env, model, expected.models[0])
    np.testing.assert_allclose(history["loss"], [expected.loss], rtol=1e-4)
    assert {launch.branch for launch in launches(steps[0])} == {"then_branch"}


@case("A loss of all rows is that of the replica's own", compare=False)
@registry.same_as("replicas_alone_draw_other_numbers")
def losses_of_replicas_alone_are_of_their_own_rows(env: Env) -> dict:
    check_losses_of_replicas(env, of_a_root)
    return {}


@case("Losses of masked rows and of pairs are those of the replica's", compare=False)
@registry.same_as("replicas_alone_draw_other_numbers")
def masked_and_paired_losses_of_replicas_alone(env: Env) -> dict:
    for build in masked, of_pairs:
        check_losses_of_replicas(env, build)
    return {}


@case(
    "A loss of all rows is that of the node's own",
    compare=False,
    setups=("two_by_two",),
)
@registry.same_as("replicas_alone_draw_other_numbers")
def losses_of_nodes_are_of_their_own_rows(env: Env) -> dict:
    options = tfdp.CommunicationOptions(node_size=env.setup.devices_per_worker)
    for build in masked, of_a_root, of_pairs, of_gathers:
        strategy = tfdp.MultiWorkerMirroredStrategy(communication=options)
        x, y, batches = data_of(build)
        with strategy.scope():
            model = build(momentum)
        outer = optimizers.SGD(0.7)
        nodes = Nodes(2, model.get_weights(), outer, build, momentum)
        diloco = tfdp.callbacks.DiLoCo(SYNC_EVERY, optimizers.SGD(0.7))
        # The last batch is smaller, and not divided evenly.
        history = common.fit(model, x, y, epochs=1, callbacks=[diloco])
        every = list(range(len(model.trainable_variables)))
        for number, rows in enumerate(batches, start=1):
            nodes.step(x[rows], y[rows])
            if number % SYNC_EVERY == 0 or rows.stop >= NUM_ROWS:
                nodes.meet(every)
        check_trained(env, model, nodes.models[0])
        np.testing.assert_allclose(history["loss"], [nodes.loss], rtol=1e-4)
    return {}


def trained_twice(env: Env, callbacks: list, change: float) -> keras.Model:
    """Trains, multiplies the weights by a number, and trains on."""
    with env.scope():
        model = common.compiled(common.mlp(), sgd())
    data = common.regression_data(NUM_ROWS)
    for factor in 1.0, change:
        model.set_weights([factor * value for value in model.get_weights()])
        common.fit(model, *data, epochs=1, callbacks=callbacks)
    return model


@case("A second `fit` begins with the weights that there are")
@registry.same_as("diloco_is_resumed_exactly")
def diloco_goes_on_from_weights_that_were_set(env: Env) -> dict:
    diloco = tfdp.callbacks.DiLoCo(1, optimizers.SGD(1.0), scope="replica")
    callbacks = [] if env.is_reference else [diloco]
    return {"weights": env.weights(trained_twice(env, callbacks, change=0.5))}


@case("Batches that are left over count as before")
@registry.same_as("left_over_batches_have_the_scale_that_replicas_agree_on")
def left_over_batches_of_local_steps_are_those_of_one_device(env: Env) -> dict:
    with env.scope():
        model = common.compiled(common.mlp(), sgd())
    data = common.regression_data(3 * common.BATCH_SIZE)
    for alone in True, False, True:
        # Three batches: with the next one an update is due.
        callbacks: list = [tfdp.callbacks.GradientAccumulation(2)]
        callbacks += [tfdp.callbacks.LocalSGD(1)] if alone else []
        if env.is_reference:
            callbacks = callbacks[:1]
        common.fit(model, *data, epochs=1, callbacks=callbacks)
    return {"weights": env.weights(model)}


@case(
    "Sums of another loss scale on each replica keep their meaning",
    compare=False,
    setups=("mirrored",),  # workers share out what is left over
)
def left_over_batches_have_the_scale_that_replicas_agree_on(env: Env) -> dict:
    callbacks = [
        tfdp.callbacks.LossScaling(64.0),
        tfdp.callbacks.GradientAccumulation(2),
        tfdp.callbacks.LocalSGD(100),
    ]

    class Halve(keras.callbacks.Callback):
        """Has the last replica halve its scale, as an overflow would."""

        def __init__(self) -> None:
            super().__init__()
            self.before: list[np.ndarray] = []

        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            # Before callbacks of the end of the epoch, all have met.
            if batch != 2:
                return
            optimizer = self.model.optimizer
            last = env.num_replicas - 1
            tf_distribute.local_value(optimizer.features.scale.value, last).assign(32.0)
            self.before = sums_of(self.model, env)

    halve = Halve()
    with env.scope():
        model = common.compiled(common.mlp(), sgd())
    data = common.regression_data(3 * common.BATCH_SIZE)
    common.fit(model, *data, epochs=1, callbacks=[*callbacks, halve])
    assert model.optimizer.loss_scale == 32.0
    for before, after in zip(halve.before, sums_of(model, env), strict=True):
        np.testing.assert_allclose(after, before / 2, rtol=1e-6)
    return {}


@case("A replica that skipped its update adds nothing to an average", compare=False)
@registry.same_as("left_over_batches_have_the_scale_that_replicas_agree_on")
def micro_batches_of_a_skipped_update_do_not_count(env: Env) -> dict:
    # The last replica overflows in the second of two micro-batches.
    x, y = common.regression_data(2 * common.BATCH_SIZE)
    x, y = with_an_overflow(x, y, row=2 * common.BATCH_SIZE - 1)
    with env.scope():
        model = common.compiled(common.mlp(), sgd())

    def accumulating() -> optimizers.Optimizer:
        return optimizers.SGD(0.05, gradient_accumulation_steps=2)

    expected = Replicas(env.num_replicas, accumulating, model.get_weights())
    callbacks = [
        tfdp.callbacks.LossScaling(64.0),
        tfdp.callbacks.GradientAccumulation(2),
        tfdp.callbacks.LocalSGD(1),
    ]
    common.fit(model, x, y, epochs=1, callbacks=callbacks)
    for rows in np.split(np.arange(len(x)), 2):
        expected.step(x[rows], y[rows])
    others = [m.get_weights() for m in expected.models[:-1]]
    means = [np.mean(values, axis=0) for values in zip(*others, strict=True)]
    for found, wanted in zip(env.weights(model).values(), means, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    return {}


def sums_of(model: keras.Model, env: Env) -> list[np.ndarray]:
    """What the first local replica has accumulated."""
    sums = model.optimizer.features.accumulation.sums
    return [tf_distribute.local_value(variable, 0).numpy() for variable in sums]


@case("The outer optimizer clips", compare=False)
@registry.same_as("diloco_is_resumed_exactly")
def diloco_clips_outer_gradients(env: Env) -> dict:
    outer = optimizers.SGD(1.0, clipvalue=1e-3)
    callback = tfdp.callbacks.DiLoCo(SYNC_EVERY, outer, scope="replica")
    model, first = trained_alone(env, sgd, callback)
    # Three outer steps in each of two epochs.
    for value, before in zip(env.weights(model).values(), first, strict=True):
        assert 0 < np.abs(value - before).max() <= 6.1e-3
    return {}


def of_gathered_rows(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """A loss that compares each row with the mean of all that train together."""
    mean = tf.reduce_mean(tfdp.all_gather(y_pred), axis=0)
    return tf.reduce_mean(tf.square(y_true - y_pred) + tf.square(y_pred - mean))


def of_gathers(make: Make) -> keras.Model:
    model = keras.Sequential([keras.Input((NUM_STEPS,)), layers.Dense(1)])
    return common.compiled(model, make(), loss=of_gathered_rows)


@case("Gathered rows are those of the replica alone", compare=False)
@registry.same_as("replicas_alone_draw_other_numbers")
def replicas_alone_gather_their_own_rows(env: Env) -> dict:
    def build(make: Make) -> keras.Model:
        return common.compiled(common.mlp(), make(), loss=of_gathered_rows)

    with env.scope():
        model = build(sgd)
    expected = Replicas(env.num_replicas, sgd, model.get_weights(), build)
    x, y = common.regression_data(2 * common.BATCH_SIZE)
    common.fit(model, x, y, epochs=1, callbacks=[tfdp.callbacks.LocalSGD(9)])
    for rows in np.split(np.arange(len(x)), 2):
        expected.step(x[rows], y[rows])
    expected.average()
    check_trained(env, model, expected.models[0])
    return {}


class Noisy(keras.Model):
    """Returns a loss of its own, and drops out inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = layers.Dropout(0.5, seed=1)
        self.dense = layers.Dense(1)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        return self.dense(self.dropout(x, training=training))

    def train_step(self, data: tuple) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"own_loss": tf.reduce_mean(tf.square(y)), "updates": 3}


@case(
    "Replicas alone draw other numbers, and their logs are means over rows",
    compare=False,
    setups=("mirrored",),
)
def replicas_alone_draw_other_numbers(env: Env) -> dict:
    with env.scope():
        model = Noisy()
        model.compile("sgd")
    found: list = []

    def keep(batch: int, logs: dict | None) -> None:
        kernel = model.dense.kernel
        values = [tf_distribute.local_value(kernel, r).numpy() for r in range(2)]
        found.append((values, dict(logs or {})))

    callbacks = [
        tfdp.callbacks.LocalSGD(9),
        keras.callbacks.LambdaCallback(on_train_batch_end=keep),
    ]
    y = np.arange(3.0, dtype="float32")[:, np.newaxis]
    # Rows alike, so that nothing but numbers that were drawn tells replicas apart.
    x = np.ones((3, 8), "float32")
    common.fit(model, x, y, epochs=1, callbacks=callbacks)
    ((first, second), logs), *_ = found
    assert (first != second).any()
    assert logs["own_loss"] == pytest.approx(5 / 3)
    assert logs["updates"] == 3
    return {}


class TwoOptimizers(keras.Model):
    """Trains each of two layers by an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [layers.Dense(3), layers.Dense(1)]
        self.first_optimizer, self.second_optimizer = sgd(), sgd()

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.parts[1](self.parts[0](x))

    def train_step(self, data: tuple) -> dict:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        own = self.first_optimizer, self.second_optimizer
        for part, optimizer in zip(self.parts, own, strict=True):
            variables = part.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@case("Local steps of another optimizer say so", compare=False)
def local_steps_of_several_optimizers_say_so(env: Env) -> dict:
    for callback in (
        tfdp.callbacks.LocalSGD(3),
        tfdp.callbacks.DiLoCo(3, scope="replica"),
    ):
        with env.scope():
            model = TwoOptimizers()
            model.compile("sgd", "mse")
        with (
            pytest.warns(match="`model.first_optimizer` and `model.second_optimizer`"),
            pytest.raises(ValueError, match="support one optimizer, the one that"),
        ):
            common.fit(model, *common.regression_data(), callbacks=[callback])
    return {}


@case(
    "One device makes outer steps, too",
    compare=False,
    setups=("mirrored",),
)
@registry.same_as("diloco_is_resumed_exactly")
def diloco_of_one_device_makes_outer_steps(env: Env) -> dict:
    first = common.compiled(common.mlp(), momentum())
    begun = first.get_weights()
    # A single worker makes all of its steps.
    callback = tfdp.callbacks.DiLoCo(SYNC_EVERY, scope="replica", dynamic_steps=True)
    data = common.regression_data(NUM_ROWS)
    common.fit(first, *data, epochs=EPOCHS, callbacks=[callback])
    wanted = expected_model(1, begun, EVERYTHING, momentum).get_weights()
    for found, value in zip(first.get_weights(), wanted, strict=True):
        np.testing.assert_allclose(found, value, atol=1e-5)
    other = common.compiled(common.mlp(), sgd())
    with pytest.raises(ValueError, match="All replicas are on one node"):
        common.fit(other, *data, callbacks=[tfdp.callbacks.DiLoCo(SYNC_EVERY)])
    return {}
