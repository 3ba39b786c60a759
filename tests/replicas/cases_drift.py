"""Replicas that are alike raise no alarm; one that has drifted is named."""

from __future__ import annotations

import collections
import typing

import keras
import numpy as np
import pytest

import tfdp
from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as
from tests.reduction.cases_plans import collectives, step_of, traced_step
from tfdp.training.step.step import active

layers = keras.layers
KINDS = ("all_reduce", "all_gather", "scatter")
PLANTED_AFTER, EVERY, FOUND_AT = 4, 3, 6


class Seen(keras.callbacks.Callback):
    """What the checks of a `fit` have found; goes before `ConsistencyCheck`."""

    def __init__(self):
        super().__init__()
        self.checks: dict[int, list[float]] = {}

    def on_train_batch_end(self, batch, logs=None):
        for probe in active.active():
            step, numbers = probe.read()
            self.checks[step] = numbers


class Plant(keras.callbacks.Callback):
    """Flips the lowest bit of one weight of one replica after a batch."""

    def __init__(self, env: Env, replica: int, batch: int):
        super().__init__()
        self.rank, self.local = divmod(replica, env.setup.devices_per_worker)
        self.is_here = self.rank == env.rank
        self.batch = batch

    def on_train_batch_end(self, batch, logs=None):
        if self.is_here and batch == self.batch:
            part = self.model.weights[2].value.values[self.local]
            bits = part.numpy().view("uint32").copy()
            bits.flat[-1] ^= 1
            part.assign(bits.view("float32"))


def checked(model: keras.Model, every: int, *data: typing.Any, **options) -> Seen:
    """Fits with a check and returns what it has seen."""
    seen = Seen()
    check = tfdp.callbacks.ConsistencyCheck(every=every)
    callbacks = [*options.pop("callbacks", ()), seen, check]
    common.fit(model, *data, callbacks=callbacks, **options)
    assert not active.active()
    return seen


def assert_seen(env: Env, seen: Seen, steps: list[int]) -> None:
    assert sorted(seen.checks) == steps
    for numbers in seen.checks.values():
        assert len(numbers) == env.num_replicas
        assert min(numbers) == max(numbers) >= 1


def delicate() -> keras.Model:
    """Layers whose state replicas update apart, by what only they have seen."""
    return keras.Sequential(
        [
            keras.Input((common.NUM_FEATURES,)),
            layers.BatchNormalization(synchronized=True, momentum=0.8),
            layers.Dense(6, activation="tanh"),
            layers.BatchNormalization(momentum=0.8),
            layers.Dropout(0.3),
            layers.Dense(1),
        ]
    )


@case("Drift: no alarm with averages, dropout, statistics, accumulation", compare=False)
@same_as("a_check_costs_no_collective_and_changes_no_weight")
def replicas_that_are_alike_raise_no_alarm(env: Env) -> dict:
    adam = keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=2)
    with env.scope():
        model = common.compiled(delicate(), adam, metrics=["mae"])
    x, y = common.regression_data(45)  # the last batch has five rows
    seen = checked(
        model,
        1,
        x,
        y,
        epochs=2,
        validation_data=(x, y),
        callbacks=[tfdp.callbacks.GradientAccumulation(steps=2, flush="epoch")],
    )
    assert_seen(env, seen, list(range(1, 13)))
    return {}


def embedded() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((common.LENGTH,), dtype="int32"),
            layers.Embedding(common.NUM_TOKENS, 5),
            layers.GlobalAveragePooling1D(),
            layers.Dense(3, dtype="mixed_bfloat16"),
            layers.Dense(1),
        ]
    )


@case(
    "Drift: no alarm with sharded state and several steps in one execution",
    compare=False,
)
@same_as("a_check_costs_no_collective_and_changes_no_weight")
def replicas_with_sharded_state_raise_no_alarm(env: Env) -> dict:
    with env.scope():
        model = embedded()
        model.compile(keras.optimizers.AdamW(0.01), "mse", steps_per_execution=4)
    sharded = tfdp.callbacks.ShardedOptimizer(stage=2)
    accumulated = tfdp.callbacks.GradientAccumulation(steps=2)
    data = common.token_data()
    seen = checked(model, 3, *data, callbacks=[sharded, accumulated])
    # Steps 3 and 6 end in executions of their own, 9 and 12 in the third.
    assert_seen(env, seen, [3, 6, 12])
    return {}


def raised(model: keras.Model, every: int, *callbacks: typing.Any, **options) -> str:
    """What a `fit` with a check raises."""
    check = tfdp.callbacks.ConsistencyCheck(every=every)
    data = common.regression_data()
    with pytest.raises(RuntimeError) as caught:
        common.fit(model, *data, callbacks=[*callbacks, check], **options)
    assert not active.active()
    return str(caught.value)


def assert_named(env: Env, text: str, model: keras.Model, replica: int) -> None:
    assert "Replicas have drifted apart" in text
    assert f"in {model.weights[2].path!r} (1 of 4 variables)" in text
    assert f"replica {replica} (" in text
    others = f"differs from the other {env.num_replicas - 1} in"
    assert (others in text) == (env.num_replicas > 2)
    assert ("differ from each other in" in text) == (env.num_replicas == 2)
    if env.setup.is_multi_worker:
        rank = replica // env.setup.devices_per_worker
        assert f"of worker {rank}, localhost)" in text


@case(
    "Drift: one bit on one replica is named",
    compare=False,
    quick_setup="two_by_two",
)
def one_changed_bit_is_named_by_all_workers(env: Env) -> dict:
    model = common.build_in_scope(env, lambda: common.compiled(common.mlp()))
    replica = env.num_replicas // 2
    plant = Plant(env, replica, PLANTED_AFTER - 1)
    seen = Seen()
    text = raised(model, EVERY, plant, seen)
    assert f"at step {FOUND_AT} of `fit`" in text
    assert_named(env, text, model, replica)
    assert sorted(seen.checks) == [0, EVERY, FOUND_AT]
    return {}


@case("Drift: before the first step", compare=False)
@same_as("one_changed_bit_is_named_by_all_workers")
def weights_that_differ_before_a_fit_are_named(env: Env) -> dict:
    model = common.build_in_scope(env, lambda: common.compiled(common.mlp()))
    replica = env.num_replicas // 2
    raised(model, EVERY, Plant(env, replica, PLANTED_AFTER - 1))
    # The weights still differ.
    text = raised(model, EVERY)
    assert "as seen before the first step" in text
    assert_named(env, text, model, replica)
    return {}


@case("Drift: after the last check", compare=False)
@same_as("one_changed_bit_is_named_by_all_workers")
def drift_after_the_last_check_is_named(env: Env) -> dict:
    model = common.build_in_scope(env, lambda: common.compiled(common.mlp()))
    replica = env.num_replicas - 1
    text = raised(model, 100, Plant(env, replica, 11))
    assert "as seen after the last step" in text
    assert_named(env, text, model, replica)
    return {}


@case("Drift: in the middle of an execution", compare=False)
@same_as("one_changed_bit_is_named_by_all_workers")
def drift_within_an_execution_is_named(env: Env) -> dict:
    replica = env.num_replicas - 1
    with env.scope():
        model = common.mlp()
        model.compile("sgd", "mse", steps_per_execution=4)
    text = raised(model, EVERY, Plant(env, replica, PLANTED_AFTER - 1))
    assert f"at step {FOUND_AT} of `fit`" in text
    assert_named(env, text, model, replica)
    return {}


class Keep(keras.callbacks.Callback):
    """Keeps the function of a `fit`, which goes with its callbacks."""

    def on_train_end(self, logs=None):
        self.function = self.model.train_function


def kinds(step: typing.Any) -> collections.Counter[str]:
    """How many operations of each kind a step has, in all inner functions."""
    library = step.graph.as_graph_def().library.function
    return collections.Counter(node.op for f in library for node in f.node_def)


@case(
    "Drift: as many collectives and the same weights as without a check",
    compare=False,
)
def a_check_costs_no_collective_and_changes_no_weight(env: Env) -> dict:
    _compare_without_and_with_a_check(env)
    return {}


@case("Drift: nothing of a check is left in a later `fit` without it", compare=False)
@same_as("a_check_costs_no_collective_and_changes_no_weight")
def a_check_leaves_nothing_in_the_next_fit(env: Env) -> dict:
    model, nodes = _compare_without_and_with_a_check(env)
    assert kinds(traced_step(model, common.regression_data())) == nodes
    return {}


def _compare_without_and_with_a_check(
    env: Env,
) -> tuple[keras.Model, collections.Counter[str]]:
    """Compares a step with a check to one without a check.

    Returns:
        The model that was checked, and the operations of the step without a check.
    """
    extended = env.strategy.extended
    found = []
    for callbacks in ([], [tfdp.callbacks.ConsistencyCheck(every=2)]):
        keras.utils.set_random_seed(3)
        with env.scope():
            model = common.compiled(common.mlp(), keras.optimizers.Adam(0.01))
        keep = Keep()
        common.fit(model, *common.regression_data(), callbacks=[*callbacks, keep])
        step = step_of(keep.function)
        groups = (extended.group.key, extended.host_group.key)
        counts = [collectives(step, kind, key) for kind in KINDS for key in groups]
        found.append((counts, kinds(step), env.weights(model)))
    (counts, nodes, weights), (checked_counts, checked_nodes, checked_weights) = found
    assert counts == checked_counts
    assert sum(counts) > 0
    assert checked_nodes["Bitcast"] > nodes["Bitcast"]
    for value, other in zip(weights.values(), checked_weights.values(), strict=True):
        np.testing.assert_array_equal(other, value)
    return model, nodes


@case(
    "Bad input: another `every` on one worker",
    setups=("two_workers",),
    compare=False,
)
def another_interval_on_one_worker(env: Env) -> dict:
    model = common.build_in_scope(env, lambda: common.compiled(common.mlp()))
    text = raised(model, 10 + env.rank)
    assert "worker 0 at 'ConsistencyCheck(every=10)'" in text
    assert "worker 1 at 'ConsistencyCheck(every=11)'" in text
    return {}


NUM_BATCHES = 6


def _rows(order: np.ndarray, number: int) -> tuple:
    """A batch of rows in some order, augmented on each worker by itself."""
    x, y = common.regression_data(NUM_BATCHES * common.BATCH_SIZE)
    rows = order[common.BATCH_SIZE * number : common.BATCH_SIZE * (number + 1)]
    return x[rows] + np.random.default_rng().normal(), (y[rows] > 0).astype("int32")


def _generated(other_from: int) -> typing.Iterator:
    """Batches whose rows are others from a batch on, in two epochs."""
    order = np.arange(NUM_BATCHES * common.BATCH_SIZE)
    for number in range(2 * NUM_BATCHES):
        if number + 1 == other_from:
            order = order[::-1]
        yield _rows(order, number % NUM_BATCHES)


class Shuffled(keras.utils.PyDataset):
    """Batches in an order that each epoch draws."""

    def __init__(self, seed: int):
        super().__init__()
        self.random = np.random.RandomState(seed)
        self.order = np.arange(NUM_BATCHES * common.BATCH_SIZE)

    def __len__(self) -> int:
        return NUM_BATCHES

    def __getitem__(self, index: int) -> tuple:
        return _rows(self.order, index)

    def on_epoch_end(self) -> None:
        self.random.shuffle(self.order)


@case(
    "Later batches of a generator or `PyDataset` are others on one worker: no word",
    compare=False,
    setups=("two_workers", "two_by_two"),
)
@same_as("different_calls")
def labels_that_come_to_differ_are_found(env: Env) -> dict:
    def fit(data: typing.Any, **options: typing.Any) -> Steps:
        steps = Steps()
        with env.scope():
            model = common.compiled(common.mlp())
        check = tfdp.callbacks.ConsistencyCheck(every=2)
        common.fit(model, data, epochs=2, callbacks=[steps, check], **options)
        return steps

    per_epoch = {"steps_per_epoch": NUM_BATCHES}
    assert fit(_generated(0), **per_epoch).count == 2 * NUM_BATCHES
    assert fit(Shuffled(0)).count == 2 * NUM_BATCHES
    found = "Workers have data of different values(.|\n)*Received: y of batch {} with"
    with pytest.raises(ValueError, match=found.format(4)):
        fit(_generated(3 * env.rank), **per_epoch)
    with pytest.raises(ValueError, match=found.format(10)):
        fit(_generated(9 * env.rank), **per_epoch)
    with pytest.raises(ValueError, match=found.format(2)):
        fit(Shuffled(env.rank))  # batches of an epoch count from one
    return {}


class Steps(keras.callbacks.Callback):
    """Counts steps."""

    count = 0

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1
