"""`fit` with `bucket_mb="auto"`: plans change, the results do not."""

from __future__ import annotations

import collections.abc
import contextlib
import types
import typing
import warnings
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as
from tests.reduction.cases_plans import collectives, step_of
from tfdp.features.tuning import callback, plan_cache, proposals, tuner
from tfdp.ground import user_code

SMALL_BLOCKS = {"BLOCK_STEPS": 2, "_MIN_UPDATES": 2, "_SKIPPED_AT_FIRST": 1}
STEPS_PER_EPOCH = 30
layers = keras.layers


class StepClock:
    """A clock by which small buckets are fast, and the first worker faster.

    It is read before and after each step.
    """

    def __init__(self, env: Env) -> None:
        self._reducer = env.strategy.extended.reducer
        self._delay = 0.01 * env.rank
        self._now, self._in_step = 0.0, False
        self.model: keras.Model | None = None
        self.sizes: list[float | str] = []

    def __call__(self) -> float:
        if self._in_step:
            size = self._reducer.options_of(self.model.trainable_variables).bucket_mb
            self.sizes.append(size)
            self._now += self._delay + (1.0 if size == "auto" else 0.5 + size)
        self._in_step = not self._in_step
        return self._now


@contextlib.contextmanager
def tuned(env: Env, **constants: int) -> collections.abc.Iterator[StepClock | None]:
    """Trains with `bucket_mb="auto"` under the one strategy, by a made-up clock."""
    if env.is_reference:
        yield None
        return
    extended = env.strategy.extended
    before, clock = extended.options, StepClock(env)

    options = tfdp.CommunicationOptions(bucket_mb="auto")
    extended.options = extended.reducer.options = options
    with (
        mock.patch.multiple(tuner, **(SMALL_BLOCKS | constants)),
        # The models here are smaller than the smallest bucket that is worth it.
        mock.patch.object(proposals, "_MIN_BUCKET_BYTES", 64),
        mock.patch.object(callback, "time", types.SimpleNamespace(perf_counter=clock)),
        mock.patch.object(
            plan_cache, "plans_path", return_value=env.tmp / f"{env.rank}.json"
        ),
    ):
        try:
            yield clock
        finally:
            extended.options = extended.reducer.options = before
            user_code.forget_topics()


def new_model(env: Env, clock: StepClock | None, **options: typing.Any) -> keras.Model:
    """A perceptron of eight variables, in float64."""
    with env.scope():
        hidden = [
            layers.Dense(12, activation="tanh", dtype="float64") for _ in range(3)
        ]
        last = layers.Dense(1, dtype="float64")
        inputs = keras.Input((common.NUM_FEATURES,), dtype="float64")
        model = keras.Sequential([inputs, *hidden, last])
        common.compiled(model, **options)
    if clock is not None:
        clock.model = model
    return model


def data(num_steps: int = STEPS_PER_EPOCH) -> tuple:
    x, y = common.regression_data(8 * num_steps)
    return x.astype("float64"), y.astype("float64")


@case(
    "buckets that are tuned in fit",
    tol=1e-9,
)
def plans_that_change_in_fit_train_as_one_device_does(env: Env) -> dict:
    with tuned(env) as clock:
        model = new_model(env, clock)
        common.fit(model, *data(), epochs=9)
        found = {"first": env.weights(model)}
        if clock is not None:
            _check_winner(env, model, clock)
            clock.sizes.clear()
        other = new_model(env, clock)
        # Too short for a trial: it begins with what the other has found.
        common.fit(other, *data(3))
        if clock is not None:
            assert not clock.sizes
            reducer = env.strategy.extended.reducer
            sizes = [
                reducer.options_of(m.trainable_variables).bucket_mb
                for m in (model, other)
            ]
            assert sizes[0] == sizes[1] != "auto"
            assert _num_buckets(env, other) == _num_buckets(env, model)
        return {**found, "second": env.weights(other)}


def _check_winner(env: Env, model: keras.Model, clock: StepClock) -> None:
    """The fastest plan is in force; steps have had several, all workers the same."""
    tried = dict.fromkeys(clock.sizes)
    assert len(tried) > 3, tried
    assert len(clock.sizes) < 9 * STEPS_PER_EPOCH, "the trial is not over"
    reducer = env.strategy.extended.reducer
    options = reducer.options_of(model.trainable_variables)
    assert options.bucket_mb == min(size for size in tried if size != "auto")
    agree = env.strategy.extended.worker_group.all_equal
    assert agree("sizes", repr(clock.sizes))
    plan = env.strategy.communication_plan(model)
    assert "tuned: " in str(plan).replace("\n", " ")
    assert "% faster than the default [" in plan.gain
    assert len(plan.buckets) > 3
    assert _num_buckets(env, model) == len(plan.buckets)


def _num_buckets(env: Env, model: keras.Model) -> int:
    """How many gradient all-reduces the step has that `fit` leaves behind."""
    step = step_of(model.train_function)
    key = env.strategy.extended.group.key
    local = env.setup.devices_per_worker
    options = env.strategy.extended.reducer.options_of(model.trainable_variables)
    if options.algorithm not in ("auto", "ring"):
        # Other algorithms have several operations for each bucket.
        return len(env.strategy.communication_plan(model).buckets)
    return collectives(step, "all_reduce", key) // local


@case(
    "buckets that are tuned with accumulation",
    tol=1e-9,
)
@same_as("plans_that_change_in_fit_train_as_one_device_does")
def plans_change_between_micro_batches(env: Env) -> dict:
    with tuned(env) as clock:
        model = new_model(env, clock)
        steps = tfdp.callbacks.GradientAccumulation(steps=2)
        common.fit(model, *data(60), epochs=9, callbacks=[steps])
        if clock is not None:
            assert len(dict.fromkeys(clock.sizes)) > 3
        return env.weights(model)


@case("what keeps the default buckets", compare=False)
@same_as("plans_that_change_in_fit_train_as_one_device_does")
def what_cannot_be_tuned_says_so_once(env: Env) -> dict:
    assert _told(env) == _stays(
        env, "a trial of other plans needs a `fit` of 222 steps, and this one has 30"
    )
    assert _told(env, run_eagerly=True) == _stays(
        env, "with `run_eagerly=True` there is no traced step to try plans with"
    )
    sharded = [tfdp.callbacks.ShardedOptimizer()]
    assert _told(env, callbacks=sharded) == _stays(
        env, "the layout of sharded state depends on its buckets, which cannot change"
    )
    unknown = tf.data.Dataset.from_generator(
        lambda: iter([data(1)]),
        output_signature=tuple(tf.TensorSpec([8, n], tf.float64) for n in (6, 1)),
    )
    assert _told(env, batches=(unknown,)) == _stays(
        env, "the number of steps of its data is unknown (set `steps_per_epoch`)"
    )
    return {}


@case("loops that are not tuned", compare=False, quick_setup="two_workers")
@same_as("plans_that_change_in_fit_train_as_one_device_does")
def loops_of_a_users_own_have_the_default_buckets(env: Env) -> dict:
    with tuned(env) as clock, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model = new_model(env, clock)
            model.train_on_batch(*data(1))
            assert env.strategy.extended.reducer.tuned_of(model.variables) is None
    texts = [text for text in map(_text, caught) if "bucket_mb" in text]
    assert len(texts) == env.is_chief
    assert all("tunes buckets only in `fit`" in text for text in texts)
    return {}


def _told(env: Env, **options: typing.Any) -> list[str]:
    """What two short `fit`s say of buckets that stay."""
    with tuned(env) as clock, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callbacks = options.pop("callbacks", [])
        batches = options.pop("batches", data())
        for _ in range(2):
            model = new_model(env, clock, **options)
            common.fit(model, *batches, callbacks=callbacks)
        assert not clock.sizes
    return [text for text in map(_text, caught) if "bucket_mb" in text]


def _stays(env: Env, reason: str) -> list[str]:
    """What the first worker says, for all of them."""
    text = f'`bucket_mb="auto"` stays with the default buckets: {reason}.'
    return [text] if env.is_chief else []


def _text(caught: warnings.WarningMessage) -> str:
    return str(caught.message)


@case("a trial that is broken off", compare=False)
@same_as("plans_that_change_in_fit_train_as_one_device_does")
def trial_that_is_broken_off_leaves_the_default(env: Env) -> dict:
    class Stop(keras.callbacks.Callback):
        error: Exception | None = None

        def on_train_batch_end(self, batch, logs=None):
            if batch == 20:
                self.model.stop_training = True
                if self.error is not None:
                    raise self.error

    for error in (None, RuntimeError("stop")):
        with tuned(env) as clock, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model, stop = new_model(env, clock), Stop()
            stop.error = error
            with contextlib.suppress(RuntimeError):
                common.fit(model, *data(), epochs=9, callbacks=[stop])
            assert len(dict.fromkeys(clock.sizes)) > 1
            reducer = env.strategy.extended.reducer
            assert reducer.tuned_of(model.trainable_variables) is None
            plan = env.strategy.communication_plan(model)
            assert len(plan.buckets) == 1
            before = np.asarray(model.get_weights()[0])
            common.fit(model, *data(2))
            assert np.any(before != model.get_weights()[0])
        ended = [t for t in map(_text, caught) if "ended before a plan" in t]
        assert len(ended) == (error is None and env.is_chief)
    return {}
