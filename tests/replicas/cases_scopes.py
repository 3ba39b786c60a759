"""What workers do inside a scope, together and alone, and how leaving it ends."""

from __future__ import annotations

import gc
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as

TWO = {"setups": ("two_workers",), "compare": False}


def accumulating() -> keras.Model:
    """A model whose files hold a view of the optimizer, which saving makes."""
    optimizer = tfdp.DistributedOptimizer(
        keras.optimizers.Adam(0.01), accumulation_steps=2, loss_scale="dynamic"
    )
    return common.compiled(common.mlp(), optimizer)


def assert_trains(env: Env, model: keras.Model) -> dict:
    """Trains once more: workers that have lost each other would wait here."""
    common.fit(model, *common.regression_data(16), epochs=1)
    # By position: automatic names differ where one worker has made more models.
    return {str(i): value for i, value in enumerate(env.weights(model).values())}


@case("Scopes: `fit` with a checkpoint inside, and saving on one worker", **TWO)
def saving_alone_inside_the_scope(env: Env) -> dict:
    x, y = common.regression_data(16)
    with env.scope():
        model = accumulating()
        keep = keras.callbacks.ModelCheckpoint(str(env.tmp / "best.keras"))
        common.fit(model, x, y, callbacks=[keep])
        if env.rank == 0:
            model.save(env.tmp / "alone.keras")
            model.save_weights(env.tmp / "alone.weights.h5")
    assert_trains(env, model)
    if env.rank == 1:
        with env.scope():
            keras.saving.save_model(model, env.tmp / "other.keras")
    return assert_trains(env, model)


def temporary() -> None:
    """Creates variables that are garbage when it returns, or later."""
    common.compiled(common.mlp(), keras.optimizers.Adam(0.01))


@case("Scopes: what one worker makes alone and drops changes nothing", **TWO)
@same_as("saving_alone_inside_the_scope")
def temporary_variables_of_one_worker(env: Env) -> dict:
    x, y = common.regression_data(16)
    for rank in range(2):
        with env.scope():
            model = common.compiled(common.mlp())
            common.fit(model, x, y)
            if env.rank == rank:
                model.save(env.tmp / "model.keras")
                other = keras.models.load_model(env.tmp / "model.keras")
                keras.models.clone_model(other)
                del other
                with env.scope():
                    temporary()
            assert_trains(env, model)
            if env.rank == rank:
                temporary()
    # No call of all workers is inside of this scope.
    with env.scope():
        if env.rank == 1:
            model.save(env.tmp / "again.keras")
    return assert_trains(env, model)


@case("Scopes: garbage that one worker has collected, and another has not", **TWO)
@same_as("saving_alone_inside_the_scope")
def garbage_of_one_worker(env: Env) -> dict:
    gc.disable()
    try:
        with env.scope():
            temporary()
            if env.rank == 0:
                gc.collect()
            model = common.compiled(common.mlp())
            temporary()
            if env.rank == 1:
                gc.collect()
        with env.scope():
            temporary()
            if env.rank == 1:
                gc.collect()
        return assert_trains(env, model)
    finally:
        gc.enable()


@case("Scopes: a model of one worker alone is named on both", **TWO)
@same_as("saving_alone_inside_the_scope")
def models_of_one_worker(env: Env) -> dict:
    return _models_of_one_worker(env, names_at_exit=True)


@case("Scopes: a model of one worker alone is named before the next call", **TWO)
@same_as("saving_alone_inside_the_scope")
def models_of_one_worker_before_a_call(env: Env) -> dict:
    return _models_of_one_worker(env, names_at_exit=False)


def _models_of_one_worker(env: Env, *, names_at_exit: bool) -> dict:
    x, y = common.regression_data(16)
    model = common.build_in_scope(env, lambda: common.compiled(common.mlp()))
    for rank in range(2):
        own: list[keras.Model] = []
        with pytest.raises(ValueError) as caught:  # noqa: PT012, SIM117
            with env.scope():
                common.fit(model, x, y, epochs=1)
                if env.rank == rank:
                    own.append(common.mlp())
                if not names_at_exit:
                    model.evaluate(x, y, verbose=0)
        text = str(caught.value)
        assert "create what only one of them needs outside" in text
        # Keras's filter of tracebacks keeps one frame if it would leave out all.
        files = [pathlib.Path(entry.path) for entry in caught.traceback]
        folder = pathlib.Path(tfdp.__file__).parent
        assert len([file for file in files if folder in file.parents]) <= 1, files
        assert f"worker {1 - rank} creates nothing" in text
        assert f"worker {rank} creates '" in text
    return assert_trains(env, model)


@case("Scopes: one within the other, and loops inside, start from one state", **TWO)
@same_as("saving_alone_inside_the_scope")
def loops_inside_the_scope(env: Env) -> dict:
    x, y = common.regression_data(16)

    def started_apart() -> keras.Model:
        model = common.compiled(common.mlp())
        # As if its initializers were not seeded.
        for weight in model.weights:
            for part in weight.value.values:
                part.assign(part + env.rank)
        return model

    with env.scope():
        with env.scope():
            model = started_apart()
        losses = [model.evaluate(x, y, verbose=0)]
        weights = [env.weights(model)]
        model = started_apart()
        weights.append({"predicted": model.predict(x, verbose=0)})
        model = started_apart()
        tfdp.checkpoint.save(model, env.tmp / "saved")
        model = started_apart()
        losses.append(model.train_on_batch(x, y))
        weights.append(env.weights(model))
        model = started_apart()
    weights.append(env.weights(model))
    return {"losses": losses, **{str(i): part for i, part in enumerate(weights)}}


@case("Scopes: an error inside that one worker handles is no hang", **TWO)
@same_as("saving_alone_inside_the_scope")
def an_error_that_one_worker_handles(env: Env) -> dict:
    x, y = common.regression_data(16)
    model = common.build_in_scope(env, lambda: common.compiled(common.mlp()))
    with pytest.raises(RuntimeError, match="different calls") as caught:  # noqa: PT012
        try:
            with env.scope():
                common.fit(model, x, y, epochs=1)
                if env.rank == 1:
                    raise KeyError("no such layer")
        except KeyError:
            model.evaluate(x, y, verbose=0)
    assert "worker 0 at 'leaving strategy.scope()'" in str(caught.value)
    assert "worker 1 at 'the settings of evaluate'" in str(caught.value)
    return assert_trains(env, model)


@case("Scopes: a model of one worker alone, with no call of all inside", **TWO)
@same_as("saving_alone_inside_the_scope")
def models_of_one_worker_without_a_call(env: Env) -> dict:
    model = common.build_in_scope(env, lambda: common.compiled(common.mlp()))

    def leave(*, creates: bool) -> None:
        with env.scope():
            own = common.mlp() if creates else None
        assert own is None

    for rank in range(2):
        if env.rank == rank:
            with pytest.raises(ValueError, match="has left the scope of") as caught:
                leave(creates=True)
            text = str(caught.value)
            assert text.startswith(f"Worker {1 - rank} has left the scope of "), text
            assert "cases_scopes.py:" in text
            assert "`with env.scope():` without the variables that this" in text
        else:
            leave(creates=False)
        env.wait_for_all(f"worker {rank} has raised")
        if env.rank == rank:
            leave(creates=False)  # a scope that no other worker enters
    return assert_trains(env, model)


class Creating(keras.callbacks.Callback):
    """Creates variables on the first worker alone."""

    def __init__(self, env: Env, kept: list[keras.Model]) -> None:
        super().__init__()
        self._env, self._kept = env, kept

    def create(self) -> None:
        if self._env.rank == 0:
            self._kept.append(common.mlp())

    def on_train_begin(self, logs=None) -> None:
        self.create()

    def on_train_batch_end(self, batch, logs=None) -> None:
        self.create()


@case("Scopes: variables that a callback of one worker creates in `fit`", **TWO)
@same_as("saving_alone_inside_the_scope")
def callbacks_of_one_worker(env: Env) -> dict:
    return _callbacks_of_one_worker(env, run_eagerly=False)


@case("Scopes: the same with `run_eagerly`", **TWO)
@same_as("saving_alone_inside_the_scope")
def callbacks_of_one_worker_in_an_eager_fit(env: Env) -> dict:
    return _callbacks_of_one_worker(env, run_eagerly=True)


def _callbacks_of_one_worker(env: Env, *, run_eagerly: bool) -> dict:
    x, y = common.regression_data(24)
    model = common.build_in_scope(
        env, lambda: common.compiled(common.mlp(), run_eagerly=run_eagerly)
    )
    for keeps in (False, True):
        kept: list[keras.Model] = []
        creating = Creating(env, kept)
        caught = None
        try:
            with env.scope():
                common.fit(model, x, y, batch_size=16, callbacks=[creating])
                if not keeps:
                    kept.clear()
                    creating = None
        except ValueError as error:
            caught = str(error)
        assert (caught is not None) == keeps, caught
        if caught is not None:
            assert "create what only one of them needs outside" in caught
            assert "worker 1 creates nothing" in caught
    return assert_trains(env, model)


@case("Scopes: variables that a callback creates before the first step", **TWO)
@same_as("variables_of_a_function")
def callbacks_of_all_workers(env: Env) -> dict:
    x, y = common.regression_data(16)
    created: list[keras.Variable] = []
    seen: list[float] = []
    begin = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: created.append(keras.Variable(float(env.rank))),
        on_train_batch_end=lambda batch, logs: seen.append(float(created[0].numpy())),
    )
    with env.scope():
        model = common.compiled(common.mlp(), keras.optimizers.Adam(0.01))
        common.fit(model, x, y, callbacks=[begin])
    # Those of the first worker, from the first step on.
    assert set(seen) == {0.0}
    return assert_trains(env, model)


@case(
    "Scopes: variables that a `tf.function` creates have the first worker's values",
    setups=("two_by_two", "two_workers"),
    compare=False,
)
def variables_of_a_function(env: Env) -> dict:
    created: list[tf.Variable] = []

    @tf.function
    def read_in_steps() -> Any:
        def step() -> tf.Tensor:
            if not created:
                created.append(tf.Variable(tf.fill([3], env.rank + 5)))
            return created[0] + 0

        return env.strategy.run(step)

    with env.scope():
        found = env.strategy.experimental_local_results(read_in_steps())
        grown = tf.Variable(tf.fill([2, 1], env.rank), shape=[None, 1])
        text = tf.Variable([["ab" * (env.rank + 1)]])
    for value in found:
        np.testing.assert_array_equal(value, [5, 5, 5])
    for value in env.local_values(grown):
        np.testing.assert_array_equal(value, [[0], [0]])
    for value in env.local_values(text):
        assert value == b"ab"
    return {}
