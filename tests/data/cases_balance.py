"""Rows that follow weights: the result stays that of one device."""

from __future__ import annotations

import collections.abc
import contextlib
import io
import itertools
import time
import warnings
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env
from tests.harness.registry import case, same_as
from tests.reduction.cases_plans import traced_step
from tfdp.training.data.load_balancer import LoadBalancer
from tfdp.training.program.step import DividedStep

layers = keras.layers
BATCH = 16
# Five full batches and one of five rows, which two by two replicas share as well.
NUM_SAMPLES = 5 * BATCH + 5
MULTI = ("two_workers", "two_by_two")
# Of the first worker and of the others, one pair for each change.
WEIGHTS = ((1500, 500), (300, 1700), (1999, 1), (1100, 900))
SLOW_SECONDS = 0.008


@contextlib.contextmanager
def rebalanced(env: Env) -> collections.abc.Iterator[LoadBalancer | None]:
    """What `tfdp run --rebalance` has the strategy make, for one case."""
    if env.strategy is None:
        yield None
        return
    extended = env.strategy.extended
    extended.balance = LoadBalancer(env.setup.num_workers, extended.num_local)
    try:
        yield extended.balance
    finally:
        extended.balance = None


class Shift(keras.callbacks.Callback):
    """Other weights after every second batch, the same on all workers."""

    def __init__(self, balance: LoadBalancer | None) -> None:
        super().__init__()
        self.balance = balance
        self.weights = itertools.cycle(WEIGHTS)
        # Of the first epoch: with which weights each batch is divided.
        self.in_force: list[tuple[int, ...]] = []

    def on_train_batch_begin(self, batch, logs=None):
        if self.balance is not None and batch % 2 == 0:
            self.balance.set(next(self.weights))
        if self.balance is not None:
            self.in_force.append(self.balance.worker_weights)


class Follow(keras.callbacks.Callback):
    """Keeps the rows of each worker at the begin of each epoch."""

    def __init__(self, balance: LoadBalancer | None) -> None:
        super().__init__()
        self.balance = balance
        self.rows: list[list[int]] = []

    def on_epoch_begin(self, epoch, logs=None):
        if self.balance is not None:
            self.rows.append(self.balance.rows(BATCH))


@contextlib.contextmanager
def told_of_rows(
    tell: collections.abc.Callable[[int], None],
) -> collections.abc.Iterator[None]:
    """Calls a function with the rows of each replica of this worker, in each step.

    A layer would be told of those of all: the program is that of one device.
    """
    build = DividedStep.__call__

    def told(step: DividedStep, args: tuple, group, rows) -> object:
        def note(own: np.ndarray) -> np.int32:
            tell(int(own))
            return np.int32(0)

        noted = tf.numpy_function(note, [rows.own], tf.int32)
        with tf.control_dependencies([noted]):
            return build(step, args, group, rows)

    with mock.patch.object(DividedStep, "__call__", told):
        yield


def model_of(env: Env, optimizer=None, **options) -> keras.Model:
    with env.scope():
        hidden = layers.Dense(4, activation="tanh", kernel_regularizer="l2")
        inputs = keras.Input((common.NUM_FEATURES,))
        model = keras.Sequential([inputs, hidden, layers.Dense(1)])
        return common.compiled(model, optimizer, metrics=["mae"], **options)


def shifted(env: Env, model: keras.Model, *data, **options) -> dict:
    """Fits with weights that change; returns history and weights."""
    shown = io.StringIO()
    with rebalanced(env) as balance, contextlib.redirect_stdout(shown):
        given = [Shift(balance), *options.pop("callbacks", [])]
        history = common.fit(model, *data, batch_size=BATCH, callbacks=given, **options)
    return {"history": history, "weights": env.weights(model)}


@case(
    "Rebalance: the slow worker gets fewer rows, and the result is that of one device",
    setups=("two_workers", "two_by_two"),
    side_by_side=False,
)
@same_as("rows_are_those_of_the_weights")
def rows_follow_speed(env: Env) -> dict:
    model = model_of(env)
    shown = io.StringIO()

    def sleep(rows: int) -> None:
        time.sleep(SLOW_SECONDS * rows * (env.rank == 1))

    with (
        rebalanced(env) as balance,
        contextlib.redirect_stdout(shown),
        told_of_rows(sleep),
    ):
        follow = Follow(balance)
        history = common.fit(
            model,
            *common.regression_data(NUM_SAMPLES),
            batch_size=BATCH,
            epochs=7,
            callbacks=[follow],
        )
    if balance is not None:
        of_second = [rows[1] for rows in follow.rows]
        assert of_second[0] == BATCH // 2
        # What else the machine does may give it some rows back.
        assert min(of_second) <= BATCH // 4, of_second
        assert max(of_second[3:]) < BATCH // 2, of_second
        said = [line for line in shown.getvalue().splitlines() if "tfdp: " in line]
        assert bool(said) == env.is_chief
        assert all("own part of a step" in line for line in said)
    return {"history": history, "weights": env.weights(model)}


@case(
    "Rebalance: each replica has the rows that its weight says; validation is equal",
    setups=MULTI,
)
def rows_are_those_of_the_weights(env: Env) -> dict:
    seen: list[int] = []
    model = model_of(env)
    x, y = common.regression_data(NUM_SAMPLES)
    shown = io.StringIO()
    with (
        rebalanced(env) as balance,
        contextlib.redirect_stdout(shown),
        told_of_rows(seen.append),
    ):
        shift = Shift(balance)
        # It times the same steps.
        monitor = tfdp.callbacks.CommunicationMonitor(env.tmp / "logs", every=4)
        history = common.fit(
            model,
            x,
            y,
            batch_size=BATCH,
            epochs=2,
            callbacks=[shift, monitor],
            validation_data=(x[:BATCH], y[:BATCH]),
        )
        if balance is not None:
            check_rows(env, balance, shift, seen)
    return {"history": history, "weights": env.weights(model)}


def check_rows(env: Env, balance: LoadBalancer, shift: Shift, seen: list[int]) -> None:
    """Compares the rows of all steps with those of the weights in force."""
    num_local = env.strategy.extended.num_local
    sizes = iter([*[BATCH] * 5, 5] * 2)
    expected = []
    for step, weights in enumerate(shift.in_force, start=1):
        balance.set(weights)
        expected.append(balance.rows(next(sizes))[env.rank])
        if step % 6 == 0:  # the end of an epoch: one batch of validation
            expected.append(BATCH // env.setup.num_workers)
    starts = range(0, len(seen), num_local)
    assert [sum(seen[s : s + num_local]) for s in starts] == expected


def _unknown_length() -> tf.data.Dataset:
    x, y = common.regression_data(NUM_SAMPLES)
    spec = (tf.TensorSpec([None, *x.shape[1:]]), tf.TensorSpec([None, 1]))

    def batches():
        for start in range(0, NUM_SAMPLES, BATCH):
            yield x[start : start + BATCH], y[start : start + BATCH]

    return tf.data.Dataset.from_generator(batches, output_signature=spec)


def _weighted() -> tf.data.Dataset:
    weight = np.linspace(0.0, 2.0, NUM_SAMPLES).astype("float32")
    data = *common.regression_data(NUM_SAMPLES), weight
    return common.batched(*data, batch_size=BATCH)


def _endless() -> tf.data.Dataset:
    data = common.regression_data(NUM_SAMPLES)
    return common.batched(*data, batch_size=BATCH).repeat()


# Name: dataset or None for arrays, options of `compile`, of `fit`, of the optimizer.
KINDS: dict[str, tuple] = {
    "a_dataset_of_unknown_length": (_unknown_length, {}, {}, 1),
    "sample_weights": (_weighted, {}, {}, 1),
    "endless_data": (_endless, {}, {"steps_per_epoch": 4}, 1),
    "steps_per_execution": (_weighted, {"steps_per_execution": 2}, {}, 1),
    "accumulation": (_weighted, {}, {}, 3),
}


def _register(name: str, kind: tuple) -> None:
    make, compile_options, fit_options, accumulation = kind

    def function(env: Env) -> dict:
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        if accumulation > 1:
            steps = accumulation
            if env.is_reference:
                config = {"gradient_accumulation_steps": steps}
                optimizer = keras.optimizers.SGD(0.05, momentum=0.9, **config)
            else:
                optimizer = tfdp.DistributedOptimizer(
                    optimizer, accumulation_steps=steps
                )
        model = model_of(env, optimizer=optimizer, **compile_options)
        return shifted(env, model, make(), epochs=2, **fit_options)

    registry.register(
        f"rebalanced_{name}",
        function,
        f"Rebalance: weights that change, with {name.replace('_', ' ')}",
        setups=MULTI,
        same_as="rows_are_those_of_the_weights",
    )


for _name, _kind in KINDS.items():
    _register(_name, _kind)


class Fail(keras.callbacks.Callback):
    """Raises in the middle of the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (1, 3):
            raise InterruptedError


@case(
    "Rebalance: a run that goes on from a backup begins with equal rows, and is right",
    setups=("two_workers", "two_by_two"),
)
@same_as("rows_are_those_of_the_weights")
def rebalanced_run_goes_on(env: Env) -> dict:
    data = common.regression_data(NUM_SAMPLES)
    if env.is_reference:
        return shifted(env, model_of(env), *data, epochs=3)

    def train(*callbacks: keras.callbacks.Callback) -> dict:
        backup = tfdp.callbacks.BackupAndRestore(env.tmp / "backup", save_freq=2)
        given = [backup, *callbacks]
        keras.backend.clear_session()  # layers count from one again
        return shifted(env, model_of(env), *data, epochs=3, callbacks=given)

    with contextlib.suppress(InterruptedError):
        train(Fail())
        raise AssertionError("it was not interrupted")
    return train()


@case(
    "Rebalance: arrays that tfdp shuffles itself, in an order of each epoch",
    setups=("two_workers",),
    compare=False,
)
@same_as("rows_are_those_of_the_weights")
def rows_of_shuffled_arrays(env: Env) -> dict:
    tf.random.set_seed(None)
    seen: list[int] = []
    model = model_of(env)
    data = common.regression_data(4 * BATCH)
    with rebalanced(env) as balance, told_of_rows(seen.append):
        balance.set((1500, 500))
        common.fit(model, *data, batch_size=BATCH, shuffle=True, epochs=2)
    # Nobody is fast enough to be told apart in four steps: the weights stay.
    assert seen == [12 if env.is_chief else 4] * 8
    return {}


@case(
    "Rebalance: says that data with the sharding of its own is left alone",
    setups=("two_workers",),
    compare=False,
)
@same_as("stop_at_the_shortest_of_known_lengths")
def own_shards_are_left_alone(env: Env) -> dict:
    options = tf.data.Options()
    policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_distribute.auto_shard_policy = policy
    dataset = common.batched(*common.regression_data(2 * BATCH), batch_size=BATCH)
    seen: list[int] = []
    model = model_of(env)
    with (
        rebalanced(env) as balance,
        warnings.catch_warnings(record=True) as caught,
        told_of_rows(seen.append),
    ):
        warnings.simplefilter("always")
        balance.set((1500, 500))
        common.fit(model, dataset.with_options(options))
    told = [w for w in caught if "`--rebalance` has no effect" in str(w.message)]
    assert len(told) == 1
    assert seen == [BATCH // 2] * 4
    return {}


@case(
    "Rebalance: without it neither the step nor its data knows of weights",
    setups=("two_workers", "two_by_two"),
    compare=False,
)
@same_as("rows_are_those_of_the_weights")
def no_weights_without_rebalance(env: Env) -> dict:
    def kinds(step) -> set[str]:
        functions = step.graph._functions.values()
        nodes = [n for f in functions for n in f.cached_definition.node_def]
        return {node.op for node in [*step.graph.as_graph_def().node, *nodes]}

    # Where the largest remainders are, wherever a batch is divided by weight.
    by_weight = {"InvertPermutation"}
    data = common.regression_data()
    assert not by_weight & kinds(traced_step(model_of(env), data))
    with rebalanced(env):
        assert by_weight < kinds(traced_step(model_of(env), data))
    assert not by_weight & kinds(traced_step(model_of(env), data))
    made = env.strategy.experimental_distribute_dataset(common.batched(*data))
    shares, num_rows = made.dataset.element_spec
    assert len(shares) == env.strategy.extended.num_local
    assert shares[0][0].shape[0] is None
    assert num_rows.shape == []
    return {}
