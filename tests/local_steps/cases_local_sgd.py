"""Local SGD against models on one device that are averaged by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env
from tests.harness.launches import launches
from tests.reduction import cases_plans as plans
from tests.step.cases_loss_scale import with_an_overflow

case = registry.case
optimizers = keras.optimizers
Make = Callable[[], optimizers.Optimizer]
# The last batch has 5 rows: replicas of one, of two and of three.
NUM_ROWS = 11 * common.BATCH_SIZE + 5
EPOCHS = 2


def adam() -> optimizers.Optimizer:
    return optimizers.Adam(0.05)


def momentum() -> optimizers.Optimizer:
    return optimizers.SGD(0.05, momentum=0.9)


def scaled() -> optimizers.Optimizer:
    """What Keras has for `LossScaling(16.0, growth_steps=4)`."""
    return optimizers.LossScaleOptimizer(
        momentum(), initial_scale=16.0, dynamic_growth_steps=4
    )


def scale_of(model: keras.Model) -> float:
    return float(getattr(model.optimizer, "dynamic_scale", 1.0))


def inner_variables(model: keras.Model) -> list:
    optimizer = model.optimizer
    return getattr(optimizer, "inner_optimizer", optimizer).variables


def state_of(model: keras.Model) -> list:
    """What a step reads and changes: weights and the state of the optimizer."""
    return [*model.weights, *model.optimizer.variables]


def data_with_overflows() -> tuple:
    """The last replica overflows in the second batch, the first one in the sixth."""
    x, y = common.regression_data(9 * common.BATCH_SIZE)
    x, y = with_an_overflow(x, y, row=2 * common.BATCH_SIZE - 1)
    return with_an_overflow(x, y, row=5 * common.BATCH_SIZE)


def first_model(make: Make) -> keras.Model:
    return common.compiled(common.mlp(), make())


class Replicas:
    """A model for each replica, on one device: the definition of local SGD.

    Args:
        count: Number of replicas.
        make: Makes an optimizer.
        weights: What all begin with.
        build: Makes a model with an optimizer.
    """

    def __init__(
        self,
        count: int,
        make: Make,
        weights: list[np.ndarray],
        build: Callable[[Make], keras.Model] = first_model,
    ) -> None:
        self.models = [build(make) for _ in range(count)]
        self.samples = np.zeros(count)
        self.losses: list[float] = []
        self.num_rows: list[int] = []
        for model in self.models:
            model.set_weights(weights)
            model.optimizer.build(model.trainable_variables)

    def step(self, x: np.ndarray, y: np.ndarray, left_out: Iterable[int] = ()) -> None:
        """Each trains alone on its rows of a global batch, the first have more."""
        parts = np.array_split(np.arange(len(x)), len(self.models))
        for index, (model, rows) in enumerate(zip(self.models, parts, strict=True)):
            if index in left_out:
                model.optimizer.iterations.assign_add(1)
                continue
            scale = scale_of(model)
            self.losses.append(self._train(index, x[rows], y[rows]))
            self.num_rows.append(len(rows))
            # Of a step that was skipped nothing was learned.
            self.samples[index] += len(rows) * (scale_of(model) >= scale)

    def _train(self, index: int, x: np.ndarray, y: np.ndarray) -> float:
        """A step of one model, by the function of the first: tracing costs most."""
        traced = self.models[0]
        self._swap(index)
        traced.reset_metrics()
        loss = float(traced.train_on_batch(x, y))
        self._swap(index)
        return loss

    def _swap(self, index: int) -> None:
        """Exchanges the state of a model with that of the first."""
        if index == 0:
            return
        first, other = map(state_of, (self.models[0], self.models[index]))
        for variable, own in zip(first, other, strict=True):
            value = variable.numpy()
            variable.assign(own)
            own.assign(value)

    @property
    def loss(self) -> float:
        """The mean over all rows that it has seen."""
        return float(np.average(self.losses, weights=self.num_rows))

    def average(self) -> None:
        """Weights and slots become means, by samples."""
        states = [
            [*m.trainable_variables, *(v for v in inner_variables(m) if v.shape)]
            for m in self.models
        ]
        for variables in zip(*states, strict=True):
            values = [variable.numpy() for variable in variables]
            mean = np.average(values, axis=0, weights=self.samples)
            for variable in variables:
                variable.assign(mean)
        self.samples[:] = 0


def trained_alone(env: Env, make: Make, *callbacks: keras.callbacks.Callback) -> tuple:
    """Trains with callbacks; returns the model and what it began with."""
    with env.scope():
        model = first_model(make)
    first = model.get_weights()
    data = common.regression_data(NUM_ROWS)
    common.fit(model, *data, epochs=EPOCHS, callbacks=list(callbacks))
    return model, first


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    x, y = common.regression_data(NUM_ROWS)
    starts = range(0, NUM_ROWS, common.BATCH_SIZE)
    return [
        (x[i : i + common.BATCH_SIZE], y[i : i + common.BATCH_SIZE]) for i in starts
    ]


def check_weights(env: Env, model: keras.Model, expected: keras.Model) -> None:
    for (path, found), wanted in zip(
        env.weights(model).items(), expected.get_weights(), strict=True
    ):
        np.testing.assert_allclose(found, wanted, atol=1e-5, err_msg=path)


@case("Replicas train alone and are averaged", compare=False, quick_setup="two_by_two")
def local_sgd_averages_what_models_have_learned_alone(env: Env) -> dict:
    model, first = trained_alone(env, momentum, tfdp.callbacks.LocalSGD(sync_every=5))
    expected = Replicas(env.num_replicas, momentum, first)
    for _ in range(EPOCHS):
        for number, batch in enumerate(batches(), start=1):
            expected.step(*batch)
            if number % 5 == 0:
                expected.average()
        expected.average()
    check_weights(env, model, expected.models[0])
    env.read(model.optimizer.variables)  # slots are alike on the replicas
    return {}


@case("Post-local SGD: synchronous at first", compare=False)
@registry.same_as("local_sgd_averages_what_models_have_learned_alone")
def local_sgd_begins_after_synchronous_steps(env: Env) -> dict:
    callback = tfdp.callbacks.LocalSGD(sync_every=4, start_step=15)
    model, first = trained_alone(env, adam, callback)
    together = Replicas(1, adam, first)
    every = [*batches(), *batches()]
    for batch in every[:15]:
        together.step(*batch)
    expected = Replicas(env.num_replicas, adam, together.models[0].get_weights())
    state = together.models[0].optimizer.variables
    for alone in expected.models:
        for own, theirs in zip(alone.optimizer.variables, state, strict=True):
            own.assign(theirs)
    for number, batch in enumerate(every[15:], start=16):
        expected.step(*batch)
        # The last epoch ends with an average, too.
        if number in (19, 23, 24):
            expected.average()
    check_weights(env, model, expected.models[0])
    return {}


@case("`sync_every=1` with plain SGD is synchronous training")
@registry.same_as("diloco_is_resumed_exactly")
def local_sgd_of_single_steps_is_synchronous(env: Env) -> dict:
    with env.scope():
        model = common.compiled(common.mlp(), optimizers.SGD(0.05))
    callbacks = [] if env.is_reference else [tfdp.callbacks.LocalSGD(sync_every=1)]
    data = common.regression_data(NUM_ROWS)
    history = common.fit(
        model, *data, epochs=EPOCHS, validation_data=data, callbacks=callbacks
    )
    return {"history": history, "weights": env.weights(model)}


@case("Micro-batches are accumulated alone", compare=False)
@registry.same_as("local_sgd_averages_what_models_have_learned_alone")
def local_sgd_accumulates_micro_batches(env: Env) -> dict:
    accumulation = tfdp.callbacks.GradientAccumulation(3)
    callback = tfdp.callbacks.LocalSGD(sync_every=2)
    model, first = trained_alone(env, adam, accumulation, callback)

    def accumulating() -> optimizers.Optimizer:
        return optimizers.Adam(0.05, gradient_accumulation_steps=3)

    expected = Replicas(env.num_replicas, accumulating, first)
    for _ in range(EPOCHS):
        for number, batch in enumerate(batches(), start=1):
            expected.step(*batch)
            if number % 6 == 0:
                expected.average()
    check_weights(env, model, expected.models[0])
    return {}


@case("Of several steps one communicates gradients", compare=False)
@registry.same_as("replicas_alone_draw_other_numbers")
def local_steps_launch_collectives_when_an_average_is_due(env: Env) -> dict:
    with env.scope():
        model = common.compiled(plans.perceptron(), optimizers.SGD(0.05))
    x, y = common.regression_data()
    steps: list[tf.types.experimental.ConcreteFunction] = []

    def keep(batch: int, logs: dict | None) -> None:
        steps.append(plans.step_of(model.train_function))

    callbacks = [
        tfdp.callbacks.LocalSGD(sync_every=4),
        keras.callbacks.LambdaCallback(on_train_batch_end=keep),
    ]
    common.fit(model, x[:8], y[:8], callbacks=callbacks)
    key = env.strategy.extended.group.key
    over_replicas = [launch for launch in launches(steps[0]) if launch.group_key == key]
    assert over_replicas
    assert {launch.branch for launch in over_replicas} == {"then_branch"}
    return {}


@case("What is flushed at the end of an epoch is averaged, too", compare=False)
@registry.same_as("local_sgd_averages_what_models_have_learned_alone")
def local_sgd_averages_what_is_flushed(env: Env) -> dict:
    # 12 batches: two are left over.
    accumulation = tfdp.callbacks.GradientAccumulation(5, flush="epoch")
    callback = tfdp.callbacks.LocalSGD(sync_every=50)
    model, _ = trained_alone(env, momentum, accumulation, callback)
    env.weights(model)  # the same on all replicas
    return {}


class Fail(keras.callbacks.Callback):
    """Ends the run between two averages."""

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if batch == 1:
            raise KeyboardInterrupt


@case("A `fit` after one that has failed is synchronous", compare=False)
@registry.same_as("local_sgd_averages_what_models_have_learned_alone")
def a_failed_fit_leaves_no_local_steps_behind(env: Env) -> dict:
    with env.scope():
        model = common.compiled(common.mlp(), optimizers.SGD(0.05))
    first = model.get_weights()
    data = common.regression_data()
    callbacks = [tfdp.callbacks.LocalSGD(sync_every=50), Fail()]
    with pytest.raises(KeyboardInterrupt):
        common.fit(model, *data, callbacks=callbacks)
    common.fit(model, *data)
    expected = Replicas(env.num_replicas, lambda: optimizers.SGD(0.05), first)
    x, y = data
    for rows in (slice(0, 8), slice(8, 16)):
        expected.step(x[rows], y[rows])
    expected.average()
    common.fit(expected.models[0], *data)
    check_weights(env, model, expected.models[0])
    return {}


@case("An overflow is skipped where it is", compare=False)
@registry.same_as("left_over_batches_have_the_scale_that_replicas_agree_on")
def local_sgd_skips_an_overflow_where_it_is(env: Env) -> dict:
    scaling = tfdp.callbacks.LossScaling(initial_scale=16.0, growth_steps=4)
    with env.scope():
        model = first_model(momentum)
    expected = Replicas(env.num_replicas, scaled, model.get_weights())
    x, y = data_with_overflows()
    callbacks = [tfdp.callbacks.LocalSGD(sync_every=5), scaling]
    history = common.fit(model, x, y, callbacks=callbacks)
    for number in range(9):
        rows = slice(number * common.BATCH_SIZE, (number + 1) * common.BATCH_SIZE)
        expected.step(x[rows], y[rows])
        if number in (4, 8):
            expected.average()
    check_weights(env, model, expected.models[0])
    assert history["loss_scale"] == [min(map(scale_of, expected.models))]
    assert history["skipped_steps"] == [1 if env.num_replicas > 1 else 2]
    assert int(model.optimizer.iterations.numpy()) == 9
    env.read(model.optimizer.variables)  # alike on the replicas
    return {}


@case("What cannot be combined says so", compare=False)
def local_sgd_refuses_what_needs_all_replicas(env: Env) -> dict:
    data = common.regression_data()
    with env.scope():
        model = first_model(adam)
    for others, text in (
        ([tfdp.callbacks.ShardedOptimizer()], "sharded state"),
        ([tfdp.callbacks.GradientNoiseScale()], "the gradient noise scale"),
        ([tfdp.callbacks.ConsistencyCheck()], "ConsistencyCheck"),
        ([tfdp.callbacks.DiLoCo(scope="replica")], "only one `LocalSGD` or `DiLoCo`"),
    ):
        callbacks = [tfdp.callbacks.LocalSGD(), *others]
        with pytest.raises(ValueError, match=text):
            common.fit(model, *data, callbacks=callbacks)
    return {}


@case("What local steps refuse is allowed without them", compare=False)
@registry.same_as("local_sgd_refuses_what_needs_all_replicas")
def a_fit_after_refused_local_steps_may_check_consistency(env: Env) -> dict:
    data = common.regression_data()
    with env.scope():
        model = first_model(adam)
    check = tfdp.callbacks.ConsistencyCheck()
    with pytest.raises(ValueError, match="ConsistencyCheck"):
        common.fit(model, *data, callbacks=[tfdp.callbacks.LocalSGD(), check])
    common.fit(model, *data, callbacks=[tfdp.callbacks.ConsistencyCheck()])
    return {}
