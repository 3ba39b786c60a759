"""Files under sharding are those of plain Keras: all workers give, one writes."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import keras
import numpy as np
import pytest

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env
from tests.keras_hooks import cases_interchange as interchange
from tests.keras_hooks.cases_callbacks import Interrupt, Interrupted
from tests.keras_hooks.cases_interchange import FIRST, REST
from tests.sharding.cases_sharded import Sharded, fit, make, sharding_of
from tests.step.cases_accumulation import Switches, trained

case = registry.case
callbacks, optimizers = keras.callbacks, keras.optimizers
adamw = make(optimizers.AdamW, global_clipnorm=0.1)
averaging = make(
    optimizers.AdamW, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3
)
# One update, and two micro-batches that wait for the next one.
SWITCHES = {
    stage: Sharded(4, scale=16.0, growth_steps=2, stage=stage) for stage in (1, 2)
}


def _trained(env: Env, stage: int, chosen: Any, *more: Any) -> keras.Model:
    """A model that has trained on the first half; the second lies in a file."""
    x, y = common.regression_data()
    with env.scope():
        model = common.compiled(common.mlp(), chosen())
    fit(model, env, SWITCHES[stage], x[FIRST], y[FIRST], callbacks=list(more))
    np.savez(env.tmp / f"{env.rank}.npz", x=x[REST], y=y[REST])
    os.replace(env.tmp / f"{env.rank}.npz", env.tmp / "data.npz")
    assert model.optimizer.accumulated_steps == 2
    return model


def _names(env: Env) -> list[str]:
    return sorted(p.name for p in env.tmp.iterdir() if p.name.startswith("m."))


@case(
    "ModelCheckpoint at one path: the files open where tfdp cannot be imported",
    reference_last=True,
)
@registry.same_as("files_of_sharded_parameters_are_those_of_plain_keras")
def sharded_files_open_in_a_process_without_tfdp(env: Env) -> dict:
    if env.is_reference:
        return interchange._in_a_process_without_tfdp(env.tmp)
    model = _trained(
        env,
        2,
        adamw,
        callbacks.ModelCheckpoint(str(env.tmp / "m.keras")),
        callbacks.ModelCheckpoint(
            str(env.tmp / "m.weights.h5"), save_weights_only=True
        ),
    )
    assert _names(env) == ["m.keras", "m.weights.h5"]
    return interchange._saved_and_continued(env, model)


@case(
    "`save` and `save_weights` by all workers, in stage 1",
    reference_last=True,
)
@registry.same_as("files_of_sharded_parameters_are_those_of_plain_keras")
def sharded_files_go_on_in_plain_keras(env: Env) -> dict:
    if env.is_reference:
        return interchange.continue_plainly(env.tmp)
    model = _trained(env, 1, averaging)
    model.save(str(env.tmp / "m.keras"))
    model.save_weights(str(env.tmp / "m.weights.h5"))
    env.wait_for_all("saved")
    return interchange._saved_and_continued(env, model)


@case("Only the first worker writes", compare=False)
@registry.same_as("worker_that_is_asked_alone_says_what_to_do")
def only_the_first_worker_writes_sharded_state(env: Env) -> dict:
    _check_who_writes(env, _trained(env, 2, adamw))
    return {}


def _check_who_writes(env: Env, model: keras.Model) -> None:
    folder = env.tmp / str(env.rank)
    folder.mkdir()
    model.save(str(folder / "m.keras"))
    model.save_weights(str(folder / "m.weights.h5"))
    expected = ["m.keras", "m.weights.h5"] if env.is_chief else []
    assert sorted(path.name for path in folder.iterdir()) == expected


@case(
    "Only the first worker writes; one that is asked for all state says what to do",
    compare=False,
    setups=("two_workers", "two_by_two"),
)
def worker_that_is_asked_alone_says_what_to_do(env: Env) -> dict:
    with env.scope():
        optimizer = tfdp.DistributedOptimizer(
            adamw(), sharding=sharding_of("optimizer")
        )
        model = common.compiled(common.mlp(), optimizer)
        optimizer.build(model.trainable_variables)
    _check_who_writes(env, model)
    with pytest.raises(RuntimeError, match="on all workers"):
        model.optimizer.as_keras().save_own_variables({})
    return {}


@case("Files of plain Keras go on sharded, and the other way round")
@registry.same_as("files_of_sharded_parameters_are_those_of_plain_keras")
def plain_files_go_on_sharded(env: Env) -> dict:
    x, y = common.regression_data()
    path, weights = str(env.tmp / "plain.keras"), str(env.tmp / "plain.weights.h5")
    if env.is_chief:
        plain = averaging(gradient_accumulation_steps=4)
        outer = optimizers.LossScaleOptimizer(plain, initial_scale=16.0)
        model = common.compiled(common.mlp(), outer)
        common.fit(model, x[FIRST], y[FIRST])
        model.save(path)
        model.save_weights(weights)
    env.wait_for_all("saved")
    results = {}
    for name, switches in {**SWITCHES, "whole": Switches(4, 16.0)}.items():
        with env.scope():
            model = keras.models.load_model(path)
        if isinstance(switches, Sharded):
            history = fit(model, env, switches, x[REST], y[REST])
            if switches.stage == 2:
                # It has trained; all of this is overwritten, slices included.
                model.load_weights(weights)
                again = fit(model, env, switches, x[REST], y[REST])
                assert again["loss"] == pytest.approx(history["loss"], rel=1e-5)
        else:
            chosen = switches.callbacks(env)
            history = common.fit(model, x[REST], y[REST], callbacks=chosen)
        inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        results[str(name)] = {
            "loss": history["loss"],
            "weights": {str(i): w.numpy() for i, w in enumerate(model.weights)},
            "iterations": np.asarray(inner.iterations),
        }
    return results


@case("A sharded file goes on unsharded on the same replicas")
@registry.same_as("files_of_sharded_parameters_are_those_of_plain_keras")
def sharded_file_goes_on_whole(env: Env) -> dict:
    x, y = common.regression_data()
    results = {}
    if env.is_reference:
        with env.scope():
            model = common.compiled(common.mlp(), SWITCHES[2].optimizer(env, adamw))
        common.fit(model, x[FIRST], y[FIRST])
        common.fit(model, x[REST], y[REST])
        return {name: trained(model, env) for name in ("whole", "sharded")}
    path = str(env.tmp / "m.weights.h5")
    model = _trained(env, 2, adamw)
    model.save_weights(path)
    env.wait_for_all("saved")
    targets = {"whole": Switches(4, 16.0, 2), "sharded": SWITCHES[1]}
    for name, switches in targets.items():
        keras.backend.clear_session()
        with env.scope():
            model = common.compiled(common.mlp(), adamw())
        chosen = switches.callbacks(env)
        # Built with all that is switched on, and trained.
        common.fit(model, x[FIRST], y[FIRST], callbacks=chosen)
        model.load_weights(path)
        common.fit(model, x[REST], y[REST], callbacks=chosen)
        results[name] = trained(model, env)
    return results


@case("BackupAndRestore, interrupted with slices that wait")
def backup_restores_sharded_state(env: Env) -> dict:
    x, y = common.regression_data(48)

    def start() -> keras.Model:
        with env.scope():
            return common.compiled(common.mlp(), SWITCHES[2].optimizer(env, averaging))

    def fit_on(*chosen: Any) -> dict:
        return fit(model, env, SWITCHES[2], x, y, epochs=3, callbacks=list(chosen))

    model = start()
    if env.is_reference:
        fit_on()
        return trained(model, env)
    backup = env.tmp / "backup"
    with pytest.raises(Interrupted):
        fit_on(callbacks.BackupAndRestore(str(backup)), Interrupt(1))
    env.wait_for_all("interrupted")
    keras.backend.clear_session()
    keras.utils.set_random_seed(99)
    model = start()
    history = fit_on(callbacks.BackupAndRestore(str(backup)))
    assert len(history["loss"]) < 3, "started again from the first epoch"
    return trained(model, env)


@case("A checkpoint while gradients wait that Keras itself accumulates on each worker")
@registry.same_as("overflow_on_last_replica_skips_the_step_everywhere")
def gradients_that_wait_on_each_worker_are_summed(env: Env) -> dict:
    x, y = common.regression_data()
    model = _accumulating(env)
    common.fit(model, x[FIRST], y[FIRST])
    if not env.is_reference:
        tfdp.checkpoint.save(model, env.tmp / "checkpoint")
        model = _accumulating(env)
        tfdp.checkpoint.restore(model, env.tmp / "checkpoint")
    common.fit(model, x[REST], y[REST])
    return {str(i): w for i, w in enumerate(model.get_weights())}


def _accumulating(env: Env) -> keras.Model:
    with env.scope():
        optimizer = optimizers.Adam(0.01, gradient_accumulation_steps=4)
        model = common.compiled(common.mlp(), optimizer)
        optimizer.build(model.trainable_variables)
    return model


@case("An optimizer whose state cannot be told apart", compare=False)
def optimizer_with_ambiguous_state_is_refused_before_it_trains(env: Env) -> dict:
    with env.scope():
        model = common.compiled(
            common.mlp(),
            tfdp.DistributedOptimizer(Ambiguous(0.1), sharding="optimizer"),
        )
    # Not at the first save, after hours of training.
    with pytest.raises(ValueError, match="Ambiguous cannot be sharded") as caught:
        common.fit(model, *common.regression_data(16))
    assert 'Use `sharding="none"`' in str(caught.value)
    # And where Keras has built it, before anything is lost.
    with env.scope():
        model = common.compiled(common.mlp(), Ambiguous(0.1))
    common.fit(model, *common.regression_data(16))
    callback = tfdp.callbacks.ShardedOptimizer()
    with pytest.raises(ValueError, match="Ambiguous cannot be sharded"):
        common.fit(model, *common.regression_data(16), callbacks=[callback])
    return {}


class Ambiguous(optimizers.Optimizer):
    """Keeps two variables of one name, out of everybody's sight."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.pair = tuple(
                self.add_variable((), initializer="zeros", name="same") for _ in "ab"
            )

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, learning_rate * gradient)


@case(
    "A backup within an update moves to one replica",
    compare=False,
    setups=("mirrored",),
)
@registry.same_as("backup_restores_sharded_state")
def sharded_sums_in_a_backup_move_to_one_replica(env: Env) -> dict:
    def train(scope: Any, folder: str, *more: Any) -> list:
        keras.utils.set_random_seed(3)
        with scope:
            model = common.mlp()
            adam = tfdp.DistributedOptimizer(
                keras.optimizers.Adam(0.01), accumulation_steps=3, sharding="gradients"
            )
            common.compiled(model, adam)
        backup = tfdp.callbacks.BackupAndRestore(env.tmp / folder, save_freq=1)
        common.fit(model, *common.regression_data(), callbacks=[backup, *more])
        return model.get_weights()

    def stop(batch: int, logs: Any) -> None:
        if batch == 2:
            raise KeyError

    cut = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    with pytest.raises(KeyError):
        train(env.scope(), "cut", cut)
    found = train(contextlib.nullcontext(), "cut")
    for value, wanted in zip(found, train(env.scope(), "whole"), strict=True):
        np.testing.assert_allclose(value, wanted, atol=1e-5)
    return {}
