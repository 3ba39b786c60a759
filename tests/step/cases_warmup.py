"""Warmup of the learning rate, and the gradient noise scale, against NumPy.

The gradient of the model here is always one, so that a plain optimizer's updates
are its learning rates.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env
from tfdp.features.warmup import options_of

case = registry.case
optimizers = keras.optimizers
BASE = 0.125
BATCHES = 12
Warmup = tfdp.callbacks.LearningRateWarmup


def value(y_true, y_pred):
    """A loss whose gradient is one."""
    return keras.ops.sum(y_pred, axis=-1, keepdims=True)


def meter(env: Env, optimizer: Any = None, **options: Any) -> keras.Model:
    """A model that has moved by the sum of all learning rates."""
    with env.scope():
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), dense])
        optimizer = optimizer() if optimizer else optimizers.SGD(BASE)
        return common.compiled(model, optimizer, value, **options)


class Positions(keras.callbacks.Callback):
    """Notes where every variable is after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[float]] = []

    def on_train_batch_end(self, batch, logs=None):
        values = [w.numpy().item() for w in self.model.trainable_variables]
        self.seen.append(values)


def fit(
    model: keras.Model, *callbacks: Any, batches: int = BATCHES, **options: Any
) -> np.ndarray:
    """Trains; returns by how much each batch has moved each variable."""
    start = [w.numpy().item() for w in model.trainable_variables]
    positions = Positions()
    x = np.ones((4 * batches, 1), "float32")
    common.fit(model, x, x, batch_size=4, callbacks=[*callbacks, positions], **options)
    return -np.diff([start, *positions.seen], axis=0)


def factors(steps: int, first: float, last: float, num: int) -> np.ndarray:
    """Goyal et al. 2017: a straight line, then level."""
    done = np.minimum(np.arange(num) / steps, 1.0)
    return first + done * (last - first)


def check(moves: np.ndarray, expected: Any) -> None:
    expected = np.asarray(expected)
    expected = expected[:, np.newaxis] if expected.ndim == 1 else expected
    np.testing.assert_allclose(moves, np.broadcast_to(expected, moves.shape), rtol=2e-5)


def _replicas(env: Env) -> int:
    return env.num_replicas


@case(
    "Straight from the base rate to N times it",
    compare=False,
)
def warmup_raises_the_rate_in_a_straight_line(env: Env) -> dict:
    model = meter(env)
    moves = fit(model, Warmup(steps=8), batches=6, epochs=2)
    check(moves, BASE * factors(8, 1.0, _replicas(env), BATCHES))
    # Handed over: what other callbacks act on.
    rate = float(model.optimizer.learning_rate.numpy())
    assert rate == BASE * _replicas(env)
    assert options_of(model.optimizer) is None
    return {}


@case("`epochs`, `scale_with_replicas=False`", compare=False)
@registry.same_as("warmup_raises_the_rate_in_a_straight_line")
def warmup_to_the_base_rate_itself(env: Env) -> dict:
    warmup = Warmup(epochs=1.5, scale_with_replicas=False)
    moves = fit(meter(env), warmup, batches=4, epochs=3)
    check(moves, BASE * factors(6, 1 / _replicas(env), 1.0, BATCHES))
    return {}


@case("`initial_factor`, and ReduceLROnPlateau afterwards", compare=False)
def other_callbacks_act_on_the_rate_after_warmup(env: Env) -> dict:
    # Nothing is an improvement by 1e9, but for the first epoch.
    plateau = keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=1e9)
    warmup = Warmup(steps=4, initial_factor=0.25)
    moves = fit(meter(env), warmup, plateau, batches=3, epochs=4)
    expected = BASE * factors(4, 0.25, _replicas(env), BATCHES)
    # The second epoch ends the warmup, and is the first to be a plateau.
    check(moves, expected * np.repeat([1.0, 1.0, 0.5, 0.25], 3))
    return {}


@case(
    "A LearningRateSchedule stays multiplied",
    quick_setup="two_by_two",
    compare=False,
)
def warmup_multiplies_a_schedule(env: Env) -> dict:
    def optimizer():
        schedule = optimizers.schedules.ExponentialDecay(BASE, 3, 0.5, staircase=True)
        return optimizers.SGD(schedule)

    moves = fit(meter(env, optimizer), Warmup(steps=5), batches=6, epochs=2)
    schedule = BASE * 0.5 ** (np.arange(BATCHES) // 3)
    check(moves, schedule * factors(5, 1.0, _replicas(env), BATCHES))
    return {}


@case("Warmup counts updates, not micro-batches", compare=False)
def warmup_counts_updates_when_accumulating(env: Env) -> dict:
    accumulation = tfdp.callbacks.GradientAccumulation(2)
    # 1 epoch of 6 batches has 3 updates.
    moves = fit(meter(env), Warmup(epochs=1), accumulation, batches=6, epochs=2)
    check(moves[::2], np.zeros(6))
    check(moves[1::2], BASE * factors(3, 1.0, _replicas(env), 6))
    return {}


@case("Warmup within `steps_per_execution`", compare=False)
def warmup_changes_the_rate_within_an_execution(env: Env) -> dict:
    model = meter(env, steps_per_execution=3)
    moves = fit(model, Warmup(steps=7))
    rates = BASE * factors(7, 1.0, _replicas(env), BATCHES)
    check(moves, rates.reshape(-1, 3).sum(axis=1))
    assert model.optimizer.learning_rate.numpy() == BASE * _replicas(env)
    return {}


def _resumed(env: Env, done: int, whole: bool) -> dict:
    """Trains some batches, saves, and goes on with another model."""
    model = meter(env)
    first = fit(model, Warmup(steps=6), batches=done)
    path = str(env.tmp / ("model.keras" if whole else "model.weights.h5"))
    (model.save if whole else model.save_weights)(path)
    env.wait_for_all("saved")
    if whole:
        with env.scope():
            other = keras.models.load_model(path, custom_objects={"value": value})
    else:
        other = meter(env)
        other.optimizer.build(other.trainable_variables)
        other.load_weights(path)
    rest = fit(other, Warmup(steps=6), batches=BATCHES - done)
    moves = np.concatenate([first, rest])
    check(moves, BASE * factors(6, 1.0, _replicas(env), BATCHES))
    return {}


@case("Warmup resumed halfway", compare=False)
def warmup_goes_on_where_it_was_saved(env: Env) -> dict:
    return _resumed(env, 4, whole=False)


@case("Training resumed after the warmup", compare=False)
@registry.same_as("warmup_goes_on_where_it_was_saved")
def warmup_that_is_over_is_not_repeated_after_resuming(env: Env) -> dict:
    return _resumed(env, 8, whole=True)


@case("Resumed with exactly the warmup done", compare=False)
@registry.same_as("warmup_goes_on_where_it_was_saved")
def warmup_resumed_at_its_last_update(env: Env) -> dict:
    return _resumed(env, 6, whole=False)


@case("Warmup of a model that has trained before", compare=False)
@registry.same_as("warmup_goes_on_where_it_was_saved")
def warmup_begins_where_it_is_switched_on(env: Env) -> dict:
    model = meter(env)
    check(fit(model, batches=4), np.full(4, BASE))
    moves = fit(model, Warmup(steps=5), batches=8)
    check(moves, BASE * factors(5, 1.0, _replicas(env), 8))
    return {}


def _momentum(rates: np.ndarray, corrects: bool, nesterov: bool = False) -> np.ndarray:
    """The moves of SGD whose momentum contains the rate, for a gradient of one."""
    moves, v = [], 0.0
    for update, rate in enumerate(rates):
        before = rates[max(update - 1, 0)]
        v = 0.9 * v * (rate / before if corrects else 1.0) + rate
        moves.append(0.9 * v + rate if nesterov else v)
    return np.array(moves)


@case("Momentum is rescaled with the rate", compare=False)
def momentum_follows_the_rate_in_warmup(env: Env) -> dict:
    _check_momentum(env, corrects=True, nesterov=True)
    return {}


@case("Plain momentum is rescaled with the rate, or not", compare=False)
@registry.same_as("momentum_follows_the_rate_in_warmup")
def plain_momentum_follows_the_rate_in_warmup_or_not(env: Env) -> dict:
    for corrects in True, False:
        _check_momentum(env, corrects=corrects, nesterov=False)
    return {}


def _check_momentum(env: Env, *, corrects: bool, nesterov: bool) -> None:
    rates = BASE * factors(7, 1.0, _replicas(env), BATCHES)

    def optimizer() -> optimizers.Optimizer:
        return optimizers.SGD(BASE, momentum=0.9, nesterov=nesterov)

    warmup = Warmup(steps=7, momentum_correction=corrects)
    moves = fit(meter(env, optimizer), warmup)
    check(moves, _momentum(rates, corrects, nesterov))


if hasattr(optimizers, "MultiOptimizer"):

    @case("Warmup of a MultiOptimizer", compare=False)
    def warmup_of_each_part_of_a_multi_optimizer(env: Env) -> dict:
        with env.scope():
            inputs = keras.Input((1,))
            heads = [
                keras.layers.Dense(
                    1, use_bias=False, kernel_initializer="zeros", name=name
                )(inputs)
                for name in ("slow", "fast")
            ]
            model = keras.Model(inputs, keras.layers.Concatenate()(heads))
            chosen = {"fast/.*": optimizers.SGD(4 * BASE, momentum=0.9)}
            default = optimizers.SGD(BASE)
            optimizer = optimizers.MultiOptimizer(
                optimizers.OptimizerMap(default, chosen)
            )
            common.compiled(model, optimizer, value)
        moves = fit(model, Warmup(steps=5))
        rates = BASE * factors(5, 1.0, _replicas(env), BATCHES)
        check(moves, np.stack([rates, _momentum(4 * rates, True)], axis=1))
        # Handed over to both.
        parts = model.optimizer.inner_optimizer.optimizers
        handed_over = sorted(float(part.learning_rate.numpy()) for part in parts)
        assert handed_over == [BASE * _replicas(env), 4 * BASE * _replicas(env)]
        return {}


class Noise:
    """The simple noise scale in NumPy, from per-replica gradients."""

    def __init__(self, smoothing: float) -> None:
        self.smoothing = smoothing
        self.signal = self.noise = 0.0

    def update(self, gradients: np.ndarray, samples: np.ndarray) -> None:
        """Takes in mean gradients `[num_replicas, num_weights]`, and their samples."""
        small, large = 1 / (1 / samples).mean(), float(samples.sum())
        own = (gradients**2).sum(axis=1).mean()
        mean = (np.average(gradients, axis=0, weights=samples) ** 2).sum()
        signal = (large * mean - small * own) / (large - small)
        noise = (own - mean) / (1 / small - 1 / large)
        keep = self.smoothing
        self.signal = keep * self.signal + (1 - keep) * signal
        self.noise = keep * self.noise + (1 - keep) * noise


def _noise_scale(env: Env, steps: int, batch_size: int = 8, **options: Any) -> dict:
    """Least squares, whose gradients are known."""
    x, y = common.regression_data(12 * batch_size)
    model = common.build_in_scope(env, _linear)
    w = np.zeros((common.NUM_FEATURES, 1))
    expected, replicas = Noise(0.5), env.num_replicas
    size = batch_size * steps
    for start in range(0, len(x), size):
        sums = np.zeros((replicas, common.NUM_FEATURES))
        for first in range(start, start + size, batch_size):
            batch = slice(first, first + batch_size)
            xs = np.array_split(x[batch].astype("float64"), replicas)
            ys = np.array_split(y[batch].astype("float64"), replicas)
            for rank, (a, b) in enumerate(zip(xs, ys, strict=True)):
                sums[rank] += (2 * a.T @ (a @ w - b) / len(a)).ravel()
        samples = np.array([steps * len(a) for a in xs])
        expected.update(sums / steps, samples)
        mean = np.average(sums / steps, axis=0, weights=samples)
        w -= 0.05 * mean[:, np.newaxis]
    callbacks = [tfdp.callbacks.GradientNoiseScale(0.5)]
    if steps > 1:
        callbacks.append(tfdp.callbacks.GradientAccumulation(steps))
    if options:
        callbacks.append(tfdp.callbacks.LossScaling(**options))
    history = common.fit(model, x, y, batch_size=batch_size, callbacks=callbacks)
    np.testing.assert_allclose(model.get_weights()[0], w, atol=1e-5)
    found = history["gradient_noise_scale"][-1]
    np.testing.assert_allclose(found, expected.noise / expected.signal, rtol=1e-3)
    # An empty replica tells nothing, and spoils nothing.
    history = common.fit(model, x[:1], y[:1], callbacks=callbacks)
    assert np.isfinite(history["gradient_noise_scale"][-1])
    return {}


def _linear() -> keras.Model:
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((common.NUM_FEATURES,)), dense])
    return common.compiled(model, optimizers.SGD(0.05))


@case("The gradient noise scale of known gradients", compare=False)
def gradient_noise_scale_is_that_of_the_replicas_gradients(env: Env) -> dict:
    return _noise_scale(env, 1)


@case("The same of replicas with unequal numbers of samples", compare=False)
@registry.same_as("gradient_noise_scale_is_that_of_the_replicas_gradients")
def gradient_noise_scale_of_unequal_rows(env: Env) -> dict:
    return _noise_scale(env, 1, batch_size=7)


@case("The same with accumulation and loss scaling", compare=False)
@registry.same_as("gradient_noise_scale_is_that_of_the_replicas_gradients")
def gradient_noise_scale_with_accumulation_and_loss_scaling(env: Env) -> dict:
    return _noise_scale(env, 2, initial_scale=64.0)
