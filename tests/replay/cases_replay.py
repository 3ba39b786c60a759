"""A flipped bit is found before the update, and the replica that has it is named."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import typing

import keras
import numpy as np
import pytest

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env
from tests.harness.registry import same_as
from tests.reduction.cases_plans import collectives, step_of
from tests.replay import flips as flipping
from tests.replay.flips import ALWAYS, AS_STAND_IN, FLIPPED_IN, OF_OWN_ROWS, Flips
from tests.replicas.cases_drift import Keep, kinds
from tfdp.training.step.step import active

layers = keras.layers
# A replay traces the step twice more.
case = functools.partial(registry.case, deadline_seconds=240.0)
PLACES = {
    "gradient": flipping.in_gradient,
    "kernel": flipping.in_kernel,
    "sum": flipping.in_sum,
    "statistics": flipping.in_statistics,
}
# Batches of 8 rows, and of 5 in the last step.
DATA = common.regression_data(29)
# Batches of 7 rows.
EQUAL = common.regression_data(42)


def network(*, synchronized: bool = True) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((common.NUM_FEATURES,)),
            layers.Dense(6, activation="tanh"),
            layers.BatchNormalization(synchronized=synchronized, momentum=0.8),
            layers.Dropout(0.3, seed=5),
            layers.Dense(1),
        ]
    )


def build() -> keras.Model:
    keras.utils.set_random_seed(3)
    return common.compiled(network(), keras.optimizers.Adam(0.01), metrics=["mae"])


def sequence() -> keras.Model:
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((common.LENGTH,), dtype="int32"),
            layers.Embedding(common.NUM_TOKENS, 5, mask_zero=True),
            layers.LSTM(4, dropout=0.2),
            layers.Dense(1),
        ]
    )
    return common.compiled(model, keras.optimizers.Adam(0.01))


@contextlib.contextmanager
def warnings_of_tfdp() -> typing.Iterator[io.StringIO]:
    shown = io.StringIO()
    handler = logging.StreamHandler(shown)
    logger = logging.getLogger("tfdp")
    logger.addHandler(handler)
    try:
        yield shown
    finally:
        logger.removeHandler(handler)


def replayed(
    env: Env, build: typing.Callable, data: tuple, *callbacks, replay=0.5, **options
) -> dict:
    """Trains with replays that agree; without them on one device."""
    model = common.build_in_scope(env, build)
    chosen = list(callbacks)
    if env.num_replicas > 1:
        chosen.append(tfdp.callbacks.ConsistencyCheck(every=3, replay=replay))
    with warnings_of_tfdp() as shown, contextlib.redirect_stderr(io.StringIO()) as out:
        history = common.fit(model, *data, callbacks=chosen, **options)
    assert not active.active()
    assert "made again" not in shown.getvalue()
    if env.num_replicas > 1 and env.rank == 0:
        assert "tfdp: replayed" in out.getvalue()
        assert ("% of the time" in out.getvalue()) == (replay < 1)
    return {"history": history, "weights": env.weights(model)}


@case("Replay: BatchNormalization, Dropout and uneven rows")
@same_as("a_flip_in_a_gradient_is_mended")
def replays_give_what_one_device_gives(env: Env) -> dict:
    return replayed(env, build, EQUAL, batch_size=7)


@case("Replay: a last batch of fewer rows")
@same_as("a_flip_in_a_gradient_is_mended")
def replays_of_a_smaller_last_batch(env: Env) -> dict:
    return replayed(env, build, DATA)


@case("Replay: embedding with sparse gradients, LSTM with a mask", tol=1e-5)
@same_as("a_flip_in_a_gradient_is_mended")
def replays_of_a_sequence_model(env: Env) -> dict:
    return replayed(env, sequence, common.token_data(29))


@case("Replay: accumulation, and the optimizer's own accumulation")
@same_as("a_flip_in_a_gradient_is_mended")
def replays_with_accumulation(env: Env) -> dict:
    def build_accumulating() -> keras.Model:
        keras.utils.set_random_seed(3)
        optimizer = keras.optimizers.SGD(0.05, gradient_accumulation_steps=3)
        return common.compiled(common.mlp(), optimizer)

    accumulation = tfdp.callbacks.GradientAccumulation(steps=2)
    return {
        "callback": replayed(env, build, DATA, accumulation, replay=1.0),
        "keras": replayed(env, build_accumulating, DATA, replay=1.0),
    }


@case("Replay: sharded state", setups=("mirrored", "two_by_two"))
@same_as("a_flip_in_a_gradient_is_mended")
def replays_with_sharded_state(env: Env) -> dict:
    found = {}
    for stage in (1, 2):
        shards = tfdp.callbacks.ShardedOptimizer(stage=stage)
        found[f"stage {stage}"] = replayed(
            env, build, DATA, tfdp.callbacks.GradientAccumulation(steps=2), shards
        )
    return found


@case("Replay: no alarm with local statistics of BatchNormalization", compare=False)
@same_as("a_flip_in_a_gradient_is_mended")
def replays_with_local_statistics_raise_no_alarm(env: Env) -> dict:
    def build_local() -> keras.Model:
        keras.utils.set_random_seed(3)
        return common.compiled(network(synchronized=False))

    def images() -> keras.Model:
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                keras.Input((common.NUM_FEATURES,)),
                layers.Reshape((common.NUM_FEATURES, 1, 1)),
                layers.Conv2D(4, 3, padding="same", activation="relu"),
                layers.BatchNormalization(),
                layers.Conv2D(4, 3, padding="same"),
                layers.GlobalAveragePooling2D(),
                layers.Dense(1),
            ]
        )
        return common.compiled(model)

    replayed(env, build_local, DATA)
    replayed(env, images, DATA)
    return {}


def assert_named(env: Env, text: str, replica: int, *, exactly: bool = True) -> None:
    """Checks that a message names the replica, and no other one if it can be known."""
    names = [rank for rank in range(env.num_replicas) if f"replica {rank} (" in text]
    assert names == ([replica] if exactly else [0, 1]), text


def mended(env: Env, place: str, replica: int, calls: tuple) -> dict:
    """Trains with a bit that flips once, and returns what one device gives, too."""
    model = common.build_in_scope(env, build)
    if env.num_replicas == 1:
        history = common.fit(model, *EQUAL, batch_size=7)
        return {"history": history, "weights": env.weights(model)}
    flips = Flips(env, replica % env.num_replicas, calls)
    check = tfdp.callbacks.ConsistencyCheck(replay=1.0)
    with warnings_of_tfdp() as shown, PLACES[place](flips):
        history = common.fit(model, *EQUAL, batch_size=7, callbacks=[flips, check])
    text = shown.getvalue()
    assert text.count(f"In step {FLIPPED_IN} of epoch 1 of fit, ") == 1, text
    assert "The step was made again before its update" in text
    assert_named(env, text, replica % env.num_replicas)
    return {"history": history, "weights": env.weights(model)}


@case("Replay: a bit of a gradient flips once")
def a_flip_in_a_gradient_is_mended(env: Env) -> dict:
    return mended(env, "gradient", -1, AS_STAND_IN)


@case("Replay: a bit of a gradient of the first replica's own rows flips once")
@same_as("a_flip_in_a_gradient_is_mended")
def a_flip_in_a_gradient_of_own_rows_is_mended(env: Env) -> dict:
    return mended(env, "gradient", 0, OF_OWN_ROWS)


@case("Replay: a bit of a kernel's output flips once")
@same_as("a_flip_in_a_gradient_is_mended")
def a_flip_in_a_kernel_is_mended(env: Env) -> dict:
    return {
        "first": mended(env, "kernel", 0, AS_STAND_IN),
        "last": mended(env, "kernel", -1, OF_OWN_ROWS),
    }


@case("Replay: a bit of a statistic of the batch flips once on a replica")
@same_as("a_flip_in_a_gradient_is_mended")
def a_flip_in_a_statistic_is_mended(env: Env) -> dict:
    # The first of two sums of the own rows: in the stand-in's, Dropout sets what is
    # wrong to zero, so that no bit of a gradient differs.
    return mended(env, "statistics", -1, (3, 3))


@case("Replay: a bit of a sum flips once")
@same_as("a_flip_in_a_gradient_is_mended")
def a_flip_in_a_sum_is_mended(env: Env) -> dict:
    return mended(env, "sum", -1, (1, 1))


@case("Replay: a bit of the first replica's sum flips once")
@same_as("a_flip_in_a_gradient_is_mended")
def a_flip_in_a_sum_of_the_first_replica_is_mended(env: Env) -> dict:
    return mended(env, "sum", 0, (1, 1))


@case("Replay: a bit of a sum of accumulated gradients flips once")
@same_as("a_flip_in_a_gradient_is_mended")
def a_flip_in_an_accumulated_sum_is_mended(env: Env) -> dict:
    model = common.build_in_scope(env, build)
    callbacks = [tfdp.callbacks.GradientAccumulation(steps=2)]
    flips = Flips(env, env.num_replicas - 1, (1, 1))
    if env.num_replicas > 1:
        callbacks += [flips, tfdp.callbacks.ConsistencyCheck(replay=1.0)]
    with warnings_of_tfdp() as shown, flipping.in_sum(flips):
        history = common.fit(model, *EQUAL, batch_size=7, callbacks=callbacks)
    assert ("received another sum" in shown.getvalue()) == (env.num_replicas > 1)
    return {"history": history, "weights": env.weights(model)}


def ended(env: Env, place: str, *, varies: bool) -> None:
    """Trains with bits that flip always, and checks how that ends."""
    model = common.build_in_scope(env, build)
    replica = env.num_replicas // 2
    flips = Flips(env, replica, ALWAYS, varies=varies)
    check = tfdp.callbacks.ConsistencyCheck(replay=1.0)
    with PLACES[place](flips), pytest.raises(RuntimeError) as caught:
        common.fit(model, *EQUAL, batch_size=7, callbacks=[flips, check])
    text = str(caught.value)
    assert f"In step {FLIPPED_IN} of epoch 1 of fit, " in text
    assert "also when the step was made again; no weight was changed" in text
    assert ("another sum" in text) == (place == "sum")
    assert_named(env, text, replica, exactly=varies or env.num_replicas > 2)
    assert not active.active()
    for value, before in zip(model.get_weights(), flips.weights_before, strict=True):
        np.testing.assert_array_equal(value, before)


@case("Replay: bits flip always", compare=False)
@same_as("a_flip_in_a_gradient_is_mended")
def flips_that_stay_end_the_job_without_an_update(env: Env) -> dict:
    for place in ("gradient", "kernel", "sum"):
        ended(env, place, varies=True)
    ended(env, "gradient", varies=False)
    return {}


@case("Replay: nothing of it where it is off, and in other steps", compare=False)
@same_as("one_changed_bit_is_named_by_all_workers")
def a_step_that_is_not_replayed_has_the_same_operations(env: Env) -> dict:
    counts, nodes = [], []
    for options in ({}, {"replay": 0.5}, {}):
        with env.scope():
            model = common.compiled(common.mlp())
        keep = Keep()
        check = tfdp.callbacks.ConsistencyCheck(**options)
        with contextlib.redirect_stderr(io.StringIO()):
            common.fit(model, *common.regression_data(), callbacks=[check, keep])
        step, key = step_of(keep.function), env.strategy.extended.group.key
        counts.append([collectives(step, k, key) for k in ("all_reduce", "all_gather")])
        nodes.append(kinds(step))
    assert counts[0] == counts[1] == counts[2]
    assert nodes[0] == nodes[1] == nodes[2]
    return {}


@case("Replay: bad input", compare=False, quick_setup="two_by_two")
def replays_that_cannot_be_are_refused(env: Env) -> dict:
    for value in (0, -0.1, 1.5, "x", float("nan"), True):
        with pytest.raises(ValueError, match="`replay` must be a number above 0"):
            tfdp.callbacks.ConsistencyCheck(replay=value)
    check = tfdp.callbacks.ConsistencyCheck(replay=0.5)
    for options, callbacks, problem in (
        ({}, [tfdp.callbacks.GradientAccumulation(steps="auto")], 'steps="auto"'),
        ({}, [tfdp.callbacks.ShardedOptimizer(stage=3)], "parameters"),
        ({"run_eagerly": True}, [], "run_eagerly"),
        ({"jit_compile": True}, [], "jit_compile"),
        ({"steps_per_execution": 2}, [], "steps_per_execution=2"),
    ):
        with env.scope():
            model = common.compiled(common.mlp(), **options)
        with pytest.raises(ValueError, match=f"Received: .*{problem}"):
            common.fit(model, *common.regression_data(), callbacks=[*callbacks, check])
    return {}


class TwoUpdates(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        for _ in range(2):
            logs = super().train_step(data)
        return logs


@case("Replay: a step with two updates is refused", compare=False)
@same_as("replays_that_cannot_be_are_refused")
def a_step_with_two_updates_is_refused(env: Env) -> dict:
    model = common.build_in_scope(env, lambda: common.compiled(TwoUpdates()))
    check = tfdp.callbacks.ConsistencyCheck(replay=0.5)
    with pytest.raises(ValueError, match="needs a `train_step` with one update"):
        common.fit(model, *common.regression_data(), callbacks=[check])
    assert not active.active()
    return {}


@case("Replay: a loss scale, a guard and a clipped norm")
@same_as("a_flip_in_a_gradient_is_mended")
def replays_with_other_features(env: Env) -> dict:
    def build_clipped() -> keras.Model:
        keras.utils.set_random_seed(3)
        return common.compiled(network(), keras.optimizers.Adam(0.01, clipnorm=0.5))

    guard = tfdp.callbacks.SpikeGuard(threshold=50.0)
    scaling = tfdp.callbacks.LossScaling(initial_scale=2.0**10)
    return replayed(env, build_clipped, DATA, guard, scaling)


@case(
    "Bad input: another `replay` on one worker", setups=("two_workers",), compare=False
)
def another_replay_on_one_worker(env: Env) -> dict:
    model = common.build_in_scope(env, lambda: common.compiled(common.mlp()))
    check = tfdp.callbacks.ConsistencyCheck(replay=0.5 if env.rank else 0.25)
    with pytest.raises(RuntimeError, match=r"replay=0.25.*replay=0.5"):
        common.fit(model, *common.regression_data(), callbacks=[check])
    return {}
