"""Steps of one's own: what users write in `train_step`, and around the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdp
from tests.harness.env import Env
from tests.harness.registry import case, same_as
from tests.program.programs import (
    BATCH_SIZE,
    FEATURES,
    Perceptron,
    Programs,
    fit,
    fit_model,
    named,
    register,
    sgd,
    targets,
    weights,
)

GRADIENTS = Programs()
UPDATES = Programs()
LOGS = Programs()
REPLICAS = Programs()
PRECISION = Programs()
COMBINED = Programs()


def _loss(model: Any, x: Any, y: Any) -> Any:
    return tf.reduce_mean(tf.square(model(x, training=True) - y))


def _with_step(step: Callable, base: type = Perceptron) -> type:
    """Returns a model whose `train_step` is a function of itself and data."""

    class Model(base):
        def train_step(self, data: tuple) -> dict:
            return step(self, *data[:2])

    return Model


def _step(programs: Programs, **options: Any) -> Callable:
    """Adds a program that fits a perceptron by the decorated step."""

    def add(step: Callable) -> Callable:
        def program(env: Env) -> dict:
            return fit_model(env, _with_step(step), **options)

        program.__name__ = step.__name__
        programs.append(program)
        return step

    return add


# Gradients.


def _gradients(model: Any, x: Any, y: Any) -> tuple[Any, list]:
    with tf.GradientTape() as tape:
        loss = _loss(model, x, y)
    return loss, tape.gradient(loss, model.trainable_variables)


@_step(GRADIENTS)
def clipped_by_the_global_norm(model: Any, x: Any, y: Any) -> dict:
    loss, gradients = _gradients(model, x, y)
    gradients, norm = tf.clip_by_global_norm(gradients, 0.1)
    model.optimizer.apply(gradients, model.trainable_variables)
    return {"loss": loss, "norm": norm}


@_step(GRADIENTS)
def clipped_by_norm_and_value(model: Any, x: Any, y: Any) -> dict:
    loss, gradients = _gradients(model, x, y)
    gradients = [
        tf.clip_by_norm(tf.clip_by_value(g, -0.1, 0.1), 0.1) for g in gradients
    ]
    model.optimizer.apply_gradients(
        zip(gradients, model.trainable_variables, strict=True)
    )
    return {"loss": loss}


@_step(GRADIENTS)
def normalized_by_hand(model: Any, x: Any, y: Any) -> dict:
    loss, gradients = _gradients(model, x, y)
    gradients = [g / (tf.norm(g) + 1e-3) for g in gradients]
    gradients = [
        g - tf.reduce_mean(g, axis=0, keepdims=True) if g.shape.rank > 1 else g
        for g in gradients
    ]
    model.optimizer.apply(gradients, model.trainable_variables)
    return {"loss": loss}


@_step(GRADIENTS)
def signs_of_gradients(model: Any, x: Any, y: Any) -> dict:
    loss, gradients = _gradients(model, x, y)
    signs = [tf.sign(g) * tf.cast(tf.abs(g) > 1e-4, g.dtype) for g in gradients]
    model.optimizer.apply([0.1 * g for g in signs], model.trainable_variables)
    return {"loss": loss}


class ClippingSGD(keras.optimizers.SGD):
    """Clips in `apply`, and halves."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        clipped, _ = tf.clip_by_global_norm(grads, 0.1)
        return super().apply([0.5 * g for g in clipped], trainable_variables)


@GRADIENTS.add
def clipped_in_the_apply_of_an_optimizer(env: Env) -> dict:
    return fit_model(env, Perceptron, optimizer=lambda: ClippingSGD(0.1))


@GRADIENTS.add
def clipped_in_the_apply_of_a_wrapped_optimizer(env: Env) -> dict:
    callbacks = [] if env.is_reference else [tfdp.callbacks.ShardedOptimizer()]
    return fit_model(
        env, Perceptron, optimizer=lambda: ClippingSGD(0.1), callbacks=callbacks
    )


class Langevin(keras.optimizers.SGD):
    """Adds noise to gradients, see Welling and Teh 2011."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self.noise = keras.random.SeedGenerator(3)
        self.generator = tf.random.Generator.from_seed(4)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        noise = keras.random.normal(gradient.shape, seed=self.noise)
        noise += tf.random.normal(gradient.shape, seed=5)
        noise += self.generator.normal(gradient.shape)
        super().update_step(gradient + 0.1 * noise, variable, learning_rate)


@GRADIENTS.add
def drawn_in_the_update_of_an_optimizer(env: Env) -> dict:
    return fit_model(env, Perceptron, optimizer=lambda: Langevin(0.1))


class Denoising(Perceptron):
    """Draws noise; the first step builds its optimizer, which Keras does not know."""

    def compile(self, optimizer: Any, **options: Any) -> None:
        super().compile(**options)
        self.own = optimizer

    def train_step(self, data: tuple) -> dict:
        x, y = data
        noise = tf.random.normal(tf.shape(x), seed=3)
        loss, gradients = _gradients(self, x + noise, y)
        self.own.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@GRADIENTS.add
def drawn_where_the_first_step_builds_the_optimizer(env: Env) -> dict:
    return fit_model(env, Denoising)


@_step(GRADIENTS)
def sharpness_aware(model: Any, x: Any, y: Any) -> dict:
    """See Foret et al. 2021, https://arxiv.org/abs/2010.01412."""
    loss, gradients = _gradients(model, x, y)
    norm = tf.linalg.global_norm(gradients)
    moves = [0.1 * g / (norm + 1e-6) for g in gradients]
    for variable, move in zip(model.trainable_variables, moves, strict=True):
        variable.assign_add(move)
    _, gradients = _gradients(model, x, y)
    for variable, move in zip(model.trainable_variables, moves, strict=True):
        variable.assign_sub(move)
    model.optimizer.apply(gradients, model.trainable_variables)
    return {"loss": loss}


class Accumulating(Perceptron):
    """Adds up gradients and applies them in each second step."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = [
            self.add_weight(shape=shape, initializer="zeros", trainable=False)
            for shape in ((6, 5), (5,), (5, 1), (1,))
        ]
        self.steps = self.add_weight(
            shape=(), initializer="zeros", dtype="int32", trainable=False
        )

    def train_step(self, data: tuple) -> dict:
        loss, gradients = _gradients(self, *data)
        self.steps.assign_add(1)
        for total, gradient in zip(self.sums, gradients, strict=True):
            total.assign_add(gradient / 2.0)
        tf.cond(
            tf.equal(tf.convert_to_tensor(self.steps) % 2, 0),
            self._update,
            lambda: None,
        )
        return {"loss": loss}

    def _update(self) -> None:
        self.optimizer.apply(
            [tf.convert_to_tensor(total) for total in self.sums],
            self.trainable_variables,
        )
        for total in self.sums:
            total.assign(tf.zeros(total.shape))


@GRADIENTS.add
def accumulated_by_hand(env: Env) -> dict:
    return fit_model(env, Accumulating)


@_step(GRADIENTS)
def penalty_on_gradients_of_inputs(model: Any, x: Any, y: Any) -> dict:
    """See Gulrajani et al. 2017, https://arxiv.org/abs/1704.00028."""
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner:
            inner.watch(x)
            scores = model(x, training=True)
        slopes = inner.gradient(scores, x)
        norms = tf.sqrt(tf.reduce_sum(tf.square(slopes), axis=1) + 1e-6)
        penalty = tf.reduce_mean(tf.square(norms - 1.0))
        loss = tf.reduce_mean(scores * y) + 3.0 * penalty
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply(gradients, model.trainable_variables)
    return {"loss": loss, "penalty": penalty}


@_step(GRADIENTS)
def penalty_on_the_gradient_of_the_mean(model: Any, x: Any, y: Any) -> dict:
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = _loss(model, x, y)
        slopes = inner.gradient(loss, x)
        loss += 2.0 * tf.reduce_sum(tf.square(slopes))
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply(gradients, model.trainable_variables)
    return {"loss": loss}


@_step(GRADIENTS)
def adversarial_inputs(model: Any, x: Any, y: Any) -> dict:
    """See Goodfellow et al. 2015, https://arxiv.org/abs/1412.6572."""
    with tf.GradientTape() as inner:
        inner.watch(x)
        loss = _loss(model, x, y)
    x = x + 0.1 * tf.sign(inner.gradient(loss, x))
    loss, gradients = _gradients(model, x, y)
    model.optimizer.apply(gradients, model.trainable_variables)
    return {"loss": loss}


@_step(GRADIENTS)
def learned_to_learn(model: Any, x: Any, y: Any) -> dict:
    """A step through a step, see Finn et al. 2017, https://arxiv.org/abs/1703.03400."""
    count = tf.shape(x)[0]
    half = (count + 1) // 2
    kernel, bias = model.last.kernel, model.last.bias
    with tf.GradientTape() as outer:
        hidden = model.hidden(x)
        with tf.GradientTape() as inner:
            found = hidden[:half] @ tf.convert_to_tensor(kernel) + bias
            loss = tf.reduce_mean(tf.square(found - y[:half]))
        slopes = inner.gradient(loss, [kernel.value, bias.value])
        fast = [
            tf.convert_to_tensor(v) - 0.1 * g
            for v, g in zip((kernel, bias), slopes, strict=True)
        ]
        meta = tf.reduce_mean(tf.square(hidden @ fast[0] + fast[1] - y))
    gradients = outer.gradient(meta, model.trainable_variables)
    model.optimizer.apply(gradients, model.trainable_variables)
    return {"loss": meta, "before": loss}


@_step(GRADIENTS)
def persistent_tape(model: Any, x: Any, y: Any) -> dict:
    with tf.GradientTape(persistent=True) as tape:
        predicted = model(x, training=True)
        squares = tf.reduce_mean(tf.square(predicted - y))
        spread = tf.math.reduce_variance(predicted)
    first = tape.gradient(squares, model.trainable_variables)
    second = tape.gradient(spread, model.trainable_variables)
    product = sum(tf.reduce_sum(a * b) for a, b in zip(first, second, strict=True))
    gradients = [
        a + tf.where(product < 0, 0.0, 0.1) * b
        for a, b in zip(first, second, strict=True)
    ]
    model.optimizer.apply(gradients, model.trainable_variables)
    return {"loss": squares, "product": product}


@_step(GRADIENTS)
def gradients_of_each_row(model: Any, x: Any, y: Any) -> dict:
    """Clips the gradient of each row, see Abadi et al. 2016."""
    with tf.GradientTape() as tape:
        losses = tf.reduce_sum(tf.square(model(x, training=True) - y), axis=1)
    slopes = tape.jacobian(
        losses, [v.value for v in model.trainable_variables], experimental_use_pfor=True
    )
    gradients = [
        tf.reduce_mean(tf.map_fn(lambda row: tf.clip_by_norm(row, 0.3), slope), axis=0)
        for slope in slopes
    ]
    model.optimizer.apply(gradients, model.trainable_variables)
    return {"loss": tf.reduce_mean(losses)}


@_step(GRADIENTS)
def derivative_in_a_direction(model: Any, x: Any, y: Any) -> dict:
    """Forward mode inside of reverse mode, whose calls TensorFlow changes."""
    with tf.GradientTape() as tape:
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as forward:
            predicted = model(x, training=True)
        slopes = forward.jvp(predicted)
        loss = tf.reduce_mean(tf.square(predicted - y) + tf.square(slopes))
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply(gradients, model.trainable_variables)
    return {"loss": loss}


@_step(GRADIENTS)
def perturbed_rows(model: Any, x: Any, y: Any) -> dict:
    """Ascends the loss in a loop that ends by all rows, see Madry et al. 2018."""

    def ascend(offset: Any, _: Any) -> tuple:
        with tf.GradientTape() as tape:
            tape.watch(offset)
            loss = _loss(model, x + offset, y)
        slope = tape.gradient(loss, offset)
        return offset + slope, tf.reduce_max(tf.abs(slope))

    start = tf.zeros_like(x), tf.ones([], x.dtype)
    offset, _ = tf.while_loop(
        lambda _, steepest: steepest > 1e-3, ascend, start, maximum_iterations=3
    )
    loss, gradients = _gradients(model, x + offset, y)
    model.optimizer.apply(gradients, model.trainable_variables)
    return {"loss": loss}


@_step(GRADIENTS)
def assigned_in_a_loop(model: Any, x: Any, y: Any) -> dict:
    """Updates of weights by hand, in a loop that runs whole on each replica."""

    def update(i: Any) -> Any:
        _, gradients = _gradients(model, x, y)
        for variable, gradient in zip(
            model.trainable_variables, gradients, strict=True
        ):
            variable.assign_sub(0.1 * gradient)
        return i + 1

    tf.while_loop(lambda i: i < 3, update, [tf.constant(0)])
    return {"loss": _loss(model, x, y)}


@_step(GRADIENTS)
def rows_without_elements(model: Any, x: Any, y: Any) -> dict:
    """Sorts rows of all replicas of which some have no elements."""
    empty = tf.sort(x[:, :0], axis=0)
    loss, gradients = _gradients(model, tf.concat([empty, tf.sort(x, 0)], axis=1), y)
    model.optimizer.apply(gradients, model.trainable_variables)
    return {"loss": loss, "rows": tf.shape(empty)[0]}


@_step(GRADIENTS)
def mixed_rows(model: Any, x: Any, y: Any) -> dict:
    """Mixup and the rows shuffled, see Zhang et al. 2018."""
    order = tf.argsort(x[:, 0])
    ratio = tf.reshape(tf.linspace(0.2, 0.8, tf.shape(x)[0]), (-1, 1))
    x = ratio * x + (1.0 - ratio) * tf.gather(x, order)
    y = ratio * y + (1.0 - ratio) * tf.gather(y, order)
    loss, gradients = _gradients(model, x, y)
    model.optimizer.apply(gradients, model.trainable_variables)
    return {"loss": loss}


@_step(GRADIENTS)
def randomly_mixed_rows(model: Any, x: Any, y: Any) -> dict:
    seed = tf.stack([tf.cast(model.optimizer.iterations.value, tf.int32), 7])
    order = tf.random.experimental.stateless_shuffle(tf.range(tf.shape(x)[0]), seed)
    ratio = tf.random.stateless_uniform([], seed)
    x = ratio * x + (1.0 - ratio) * tf.gather(x, order)
    # A block of columns of another row, as CutMix has it.
    x = tf.concat([tf.gather(x, order)[:, :2], x[:, 2:]], axis=1)
    y = ratio * y + (1.0 - ratio) * tf.gather(y, order)
    loss, gradients = _gradients(model, x, y)
    model.optimizer.apply(gradients, model.trainable_variables)
    return {"loss": loss}


# Updates.


class Adversaries(keras.Model):
    """A generator and a discriminator with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = keras.Sequential(
            [keras.Input((6,)), layers.Dense(4, activation="tanh"), layers.Dense(6)]
        )
        self.judge = keras.Sequential(
            [keras.Input((6,)), layers.Dense(4, activation="tanh"), layers.Dense(1)]
        )
        self.noise = keras.random.SeedGenerator(3)
        self.maker_loss = keras.metrics.Mean(name="maker")
        self.judge_loss = keras.metrics.Mean(name="judge")

    def compile(self, optimizer: Any, **options: Any) -> None:
        super().compile(**options)
        self.maker_optimizer, self.judge_optimizer = sgd(), sgd()
        self.maker_optimizer.build(self.maker.trainable_variables)
        self.judge_optimizer.build(self.judge.trainable_variables)

    def call(self, x: Any) -> Any:
        return self.judge(self.maker(x))

    def train_step(self, data: tuple) -> dict:
        x, _ = data
        shape = tf.shape(x)
        crossentropy = keras.losses.BinaryCrossentropy(from_logits=True)
        made = self.maker(keras.random.normal(shape, seed=self.noise))
        both = tf.concat([x, made], axis=0)
        labels = tf.concat([tf.ones((shape[0], 1)), tf.zeros((shape[0], 1))], axis=0)
        labels += 0.05 * keras.random.uniform(tf.shape(labels), seed=self.noise)
        with tf.GradientTape() as tape:
            loss = crossentropy(labels, self.judge(both, training=True))
        kept = self.judge.trainable_variables
        self.judge_optimizer.apply(tape.gradient(loss, kept), kept)
        self.judge_loss.update_state(loss)
        noise = keras.random.normal(shape, seed=self.noise)
        with tf.GradientTape() as tape:
            scores = self.judge(self.maker(noise, training=True))
            loss = crossentropy(tf.ones((shape[0], 1)), scores)
        kept = self.maker.trainable_variables
        self.maker_optimizer.apply_gradients(
            zip(tape.gradient(loss, kept), kept, strict=True)
        )
        self.maker_loss.update_state(loss)
        return {
            "judge": self.judge_loss.result(),
            "maker": self.maker_loss.result(),
        }


@UPDATES.add
def adversaries(env: Env) -> dict:
    return fit_model(env, Adversaries)


@_step(UPDATES)
def updates_by_turns(model: Any, x: Any, y: Any) -> dict:
    loss, gradients = _gradients(model, x, y)
    variables = model.trainable_variables
    zeros = [tf.zeros_like(g) for g in gradients]

    def first() -> None:
        model.optimizer.apply(gradients[:2] + zeros[2:], variables)

    def second() -> None:
        model.optimizer.apply(zeros[:2] + gradients[2:], variables)

    tf.cond(tf.equal(model.optimizer.iterations.value % 2, 0), first, second)
    return {"loss": loss}


@_step(UPDATES)
def update_only_where_the_loss_is_large(model: Any, x: Any, y: Any) -> dict:
    loss, gradients = _gradients(model, x, y)
    tf.cond(
        loss > 0.5,
        lambda: model.optimizer.apply(gradients, model.trainable_variables),
        lambda: None,
    )
    return {"loss": loss}


@_step(UPDATES)
def two_updates_of_one_optimizer(model: Any, x: Any, y: Any) -> dict:
    first, gradients = _gradients(model, x, y)
    model.optimizer.apply(gradients, model.trainable_variables)
    second, gradients = _gradients(model, x[:, ::-1], y)
    model.optimizer.apply(gradients, model.trainable_variables)
    return {"first": first, "second": second}


@_step(UPDATES)
def updates_in_a_loop(model: Any, x: Any, y: Any) -> dict:
    for _ in range(3):
        loss, gradients = _gradients(model, x, y)
        model.optimizer.apply(gradients, model.trainable_variables)
    return {"loss": loss}


@_step(UPDATES)
def an_update_by_assign(model: Any, x: Any, y: Any) -> dict:
    loss, gradients = _gradients(model, x, y)
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        variable.assign_sub(0.1 * gradient)
    return {"loss": loss}


class Traced(Perceptron):
    """Has a `tf.function` around its whole step."""

    @tf.function
    def train_step(self, data: tuple) -> dict:
        loss, gradients = _gradients(self, *data)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@UPDATES.add
def traced_step(env: Env) -> dict:
    return fit_model(env, Traced)


class WithTracedHelpers(Perceptron):
    """Has functions for the gradients and for the update."""

    @tf.function
    def gradients(self, x: Any, y: Any) -> Any:
        return _gradients(self, x, y)

    @tf.function
    def update(self, gradients: Any) -> None:
        self.optimizer.apply(
            tf.clip_by_global_norm(gradients, 0.2)[0], self.trainable_variables
        )

    def train_step(self, data: tuple) -> dict:
        loss, gradients = self.gradients(*data)
        self.update(gradients)
        return {"loss": loss}


@UPDATES.add
def traced_helpers(env: Env) -> dict:
    return fit_model(env, WithTracedHelpers)


class TracedUnderTape(Perceptron):
    """Calls a function under its tape."""

    @tf.function
    def loss_of(self, x: Any, y: Any) -> Any:
        predicted = self(x, training=True)
        return tf.reduce_mean(tf.square(predicted - y)) + tf.sqrt(
            tf.math.reduce_variance(predicted) + 0.01
        )

    def train_step(self, data: tuple) -> dict:
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@UPDATES.add
def traced_loss_under_a_tape(env: Env) -> dict:
    return fit_model(env, TracedUnderTape)


# Logs, and the other steps.


@_step(LOGS)
def vectors_and_raw_values_in_logs(model: Any, x: Any, y: Any) -> dict:
    loss, gradients = _gradients(model, x, y)
    model.optimizer.apply(gradients, model.trainable_variables)
    predicted = model(x)
    return {
        "loss": loss,
        "columns": tf.reduce_sum(x, axis=0),
        "means": tf.reduce_mean(x, axis=0),
        "above": tf.math.count_nonzero(y > 0),
        "counts": tf.math.bincount(tf.cast(y[:, 0] > 0, tf.int32), minlength=2),
        "rows": tf.shape(x)[0],
        "largest": tf.reduce_max(predicted),
        "deviation": tf.math.reduce_std(predicted),
        "middle": tf.sort(predicted[:, 0])[tf.shape(x)[0] // 2],
        "norm": tf.linalg.global_norm(gradients),
        "number": 3.0,
        "all": tf.reduce_all(x < 10.0),
    }


class WithMetrics(Perceptron):
    """Computes its own metrics, also by functions of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.total = keras.metrics.Mean(name="total")
        self.batches = keras.metrics.Sum(name="batches")

    def compute_metrics(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
    ) -> dict:
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        self.total.update_state(tf.math.reduce_std(y_pred))
        self.batches.update_state(1.0)
        return {
            **logs,
            "total": self.total.result(),
            "batches": self.batches.result(),
            "spread": ops.max(y_pred) - ops.min(y_pred),
        }


@LOGS.add
def metrics_of_its_own(env: Env) -> dict:
    return fit_model(
        env,
        WithMetrics,
        compiles={"metrics": ["mae"]},
        validation_data=(FEATURES[:7], targets(FEATURES[:7])),
        validation_batch_size=4,
    )


class WithOtherSteps(Perceptron):
    """Has its own `test_step` and `predict_step`."""

    def test_step(self, data: tuple) -> dict:
        x, y = data
        predicted = self(x)
        error = tf.reduce_max(tf.abs(predicted - y))
        residual = tf.reduce_sum(tf.square(predicted - y))
        total = tf.reduce_sum(tf.square(y - tf.reduce_mean(y)))
        return {"error": error, "r2": 1.0 - residual / (total + 1.0)}

    def predict_step(self, data: Any) -> Any:
        predicted = self(data)
        return {
            "centred": predicted - tf.reduce_mean(predicted),
            "ranks": tf.argsort(tf.argsort(predicted[:, 0])),
            "shape": tf.shape(predicted),
            "products": tf.matmul(predicted, predicted, transpose_a=True),
            "columns": tf.transpose(predicted)[:, :1],
        }


@LOGS.add
def test_and_predict_steps(env: Env) -> dict:
    with env.scope():
        model = WithOtherSteps()
        model.build((None, 6))
        model.compile(sgd(), loss="mse")
    results = fit(
        env,
        model,
        FEATURES,
        targets(FEATURES),
        epochs=1,
        validation_data=(FEATURES, targets(FEATURES)),
        validation_batch_size=BATCH_SIZE,
    )
    predicted = model.predict(FEATURES, batch_size=BATCH_SIZE, verbose=0)
    evaluated = model.evaluate(
        FEATURES, targets(FEATURES), BATCH_SIZE, verbose=0, return_dict=True
    )
    return {**results, "predicted": predicted, "evaluated": evaluated}


# What a script says of replicas.


@_step(REPLICAS)
def factor_and_number_of_replicas(model: Any, x: Any, y: Any) -> dict:
    count = tf.distribute.get_strategy().num_replicas_in_sync
    with tf.GradientTape() as tape:
        loss = 0.5 * _loss(model, x, y) / count
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply(gradients, model.trainable_variables)
    return {"loss": loss}


@_step(REPLICAS)
def sums_by_the_replica_context(model: Any, x: Any, y: Any) -> dict:
    context = tf.distribute.get_replica_context()
    count = context.all_reduce(
        tf.distribute.ReduceOp.SUM, tf.cast(tf.shape(x)[0], tf.float32)
    )
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(model(x, training=True) - y)) / count
    gradients = tape.gradient(loss, model.trainable_variables)
    mean = context.all_reduce(tf.distribute.ReduceOp.MEAN, tf.reduce_mean(x))
    model.optimizer.apply(gradients, model.trainable_variables)
    return {"loss": loss, "count": count, "mean": mean}


@_step(REPLICAS)
def number_of_a_replica(model: Any, x: Any, y: Any) -> dict:
    context = tf.distribute.get_replica_context()
    number = tf.cast(context.replica_id_in_sync_group, tf.float32)
    loss, gradients = _gradients(model, x + number, y)
    model.optimizer.apply(gradients, model.trainable_variables)
    return {"loss": loss, "number": number}


@_step(REPLICAS)
def rows_of_all_replicas(model: Any, x: Any, y: Any) -> dict:
    with tf.GradientTape() as tape:
        hidden = tf.math.l2_normalize(model.hidden(x), axis=1)
        everybody = tfdp.all_gather(hidden)
        scores = 3.0 * tf.matmul(hidden, everybody, transpose_b=True)
        own = tf.range(tf.shape(x)[0])
        contrast = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(own, scores)
        )
        loss = contrast + tf.reduce_mean(tf.square(model.last(hidden) - y))
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply(gradients, model.trainable_variables)
    return {"loss": loss, "contrast": contrast}


# Precision.


def _of_policy(policy: str) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(5, activation="tanh", dtype=policy),
                layers.Dense(1, dtype="float32"),
            ]
        )

    return make


class ClippedMixed(keras.Sequential):
    """Scales its loss and clips what it has unscaled."""

    def train_step(self, data: tuple) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            loss = _loss(self, x, y)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def _scaled(**options: Any) -> Callable[[], Any]:
    return lambda: keras.optimizers.LossScaleOptimizer(sgd(), **options)


@PRECISION.add
def scaled_loss_of_keras(env: Env) -> dict:
    return fit_model(
        env,
        Perceptron,
        optimizer=_scaled(initial_scale=64.0, dynamic_growth_steps=2),
    )


@PRECISION.add
def scaled_loss_with_an_overflow_in_one_row(env: Env) -> dict:
    x = FEATURES.copy()
    x[-3] = 3e38  # in the second batch; another replica has it on each set-up
    with env.scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
        optimizer = _scaled(initial_scale=64.0, dynamic_growth_steps=2)()
        model.compile(optimizer, loss="mse")
    fit(env, model, x, targets(FEATURES), epochs=1)
    # The history of a loss that overflows is not finite on one device either.
    scale = np.asarray(optimizer.dynamic_scale)
    return {"weights": weights(env, model), "scale": scale}


@PRECISION.add
def scaled_loss_of_its_own_step(env: Env) -> dict:
    def make() -> keras.Model:
        return ClippedMixed(
            [keras.Input((6,)), layers.Dense(5, activation="tanh"), layers.Dense(1)]
        )

    return fit_model(env, make, optimizer=_scaled(initial_scale=64.0))


@case(
    "mixed precision in a step: equal up to its rounding",
    tol=2e-2,
    deadline_seconds=600.0,
)
@same_as("programs_of_steps")
def steps_in_mixed_precision(env: Env) -> dict:
    results = {}
    for policy in ("mixed_bfloat16", "mixed_float16"):
        keras.utils.set_random_seed(1)
        results[policy] = fit_model(
            env,
            _of_policy(policy),
            optimizer=_scaled(initial_scale=64.0) if policy == "mixed_float16" else sgd,
        )
    return results


def _update_in_a_loop(model: Any, x: Any, y: Any) -> dict:
    def update(i: Any) -> Any:
        _, gradients = _gradients(model, x, y)
        model.optimizer.apply(gradients, model.trainable_variables)
        return i + 1

    tf.while_loop(lambda i: i < 3, update, [tf.constant(0)])
    return {"loss": _loss(model, x, y)}


@case(
    "an update in a loop of the step: refused before a weight moves",
    setups=("mirrored",),
    compare=False,
)
def update_in_a_loop_of_a_step_is_refused(env: Env) -> dict:
    with env.scope():
        model = _with_step(_update_in_a_loop)()
        model.compile(sgd(), loss="mse")
    before = weights(env, model)
    with pytest.raises(ValueError, match="inside a loop"):
        fit(env, model, FEATURES, targets(FEATURES))
    for name, value in weights(env, model).items():
        np.testing.assert_array_equal(value, before[name])
    return {}


@case(
    "an update in a loop of the step, between workers: as on one device",
    setups=("two_workers", "two_by_two"),
    tol=1e-5,
)
def update_in_a_loop_between_workers(env: Env) -> dict:
    return fit_model(env, _with_step(_update_in_a_loop))


# Combinations.


def _penalized(model: Any, x: Any, y: Any) -> dict:
    """A step that couples rows, clips and writes a state."""
    with tf.GradientTape() as tape:
        predicted = model(x, training=True)
        loss = tf.sqrt(tf.reduce_mean(tf.square(predicted - y)))
        loss += 0.1 * tf.sqrt(tf.math.reduce_variance(predicted) + 0.01)
    gradients = tape.gradient(loss, model.trainable_variables)
    gradients, _ = tf.clip_by_global_norm(gradients, 0.3)
    model.optimizer.apply(gradients, model.trainable_variables)
    return {"loss": loss}


def _fit_penalized(env: Env, **options: Any) -> dict:
    return fit_model(env, _with_step(_penalized), **options)


@COMBINED.add
def coupled_with_three_steps_per_execution(env: Env) -> dict:
    return _fit_penalized(env, compiles={"steps_per_execution": 3})


@COMBINED.add
def coupled_with_accumulation(env: Env) -> dict:
    plain = env.is_reference
    return _fit_penalized(
        env,
        optimizer=lambda: keras.optimizers.SGD(
            0.1, gradient_accumulation_steps=2 if plain else None
        ),
        callbacks=[] if plain else [tfdp.callbacks.GradientAccumulation(steps=2)],
    )


@COMBINED.add
def coupled_with_scaling(env: Env) -> dict:
    def step(model: Any, x: Any, y: Any) -> dict:
        with tf.GradientTape() as tape:
            predicted = model(x, training=True)
            loss = tf.sqrt(tf.reduce_mean(tf.square(predicted - y)))
            scaled = model.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        return {"loss": loss}

    callbacks = [] if env.is_reference else [tfdp.callbacks.LossScaling()]
    results = fit_model(env, _with_step(step), callbacks=callbacks)
    return {**results, "history": {"loss": results["history"]["loss"]}}


for _sharding in ("optimizer", "gradients", "parameters"):

    def _sharded(env: Env, sharding: str = _sharding) -> dict:
        def optimizer() -> Any:
            adam = keras.optimizers.Adam(0.01)
            if env.is_reference:
                return adam
            return tfdp.DistributedOptimizer(adam, sharding=sharding)

        return _fit_penalized(env, optimizer=optimizer)

    _sharded.__name__ = f"coupled_with_sharded_{_sharding}"
    COMBINED.append(_sharded)


@COMBINED.add
def coupled_with_train_on_batch(env: Env) -> dict:
    with env.scope():
        model = _with_step(_penalized)()
        model.build((None, 6))
        model.compile(sgd(), loss="mse")
    y = targets(FEATURES)
    losses = [
        model.train_on_batch(FEATURES[i : i + 15], y[i : i + 15], return_dict=True)
        for i in (0, 15, 30)
    ]
    return {"logs": dict(enumerate(losses)), "weights": weights(env, model)}


@COMBINED.add
def compiled_by_xla(env: Env) -> dict:
    compiles = {"jit_compile": not env.is_reference}
    return {
        "plain": fit_model(env, Perceptron, compiles=compiles),
        "coupled": _fit_penalized(env, compiles=compiles),
    }


register(
    "programs_of_steps",
    "gradients changed by hand",
    named(
        "clipped_by_the_global_norm",
        "clipped_in_the_apply_of_an_optimizer",
        "clipped_in_the_apply_of_a_wrapped_optimizer",
        "drawn_in_the_update_of_an_optimizer",
        "drawn_where_the_first_step_builds_the_optimizer",
        "penalty_on_gradients_of_inputs",
        of=GRADIENTS,
    ),
)
register(
    "updates_that_steps_make",
    "several and conditional updates",
    UPDATES,
    same_as="an_update_in_a_branch",
)
for _name, _covers, _programs in (
    ("gradients_that_steps_change", "gradients changed by hand", GRADIENTS),
    ("logs_that_steps_return", "vectors and raw values in logs", LOGS),
    ("steps_that_speak_of_replicas", "replica contexts in a step", REPLICAS),
    ("steps_with_scaled_losses", "scaled losses, overflow", PRECISION),
    ("steps_with_features_of_training", "with what tfdp adds", COMBINED),
):
    register(_name, _covers, _programs, same_as="programs_of_steps")
