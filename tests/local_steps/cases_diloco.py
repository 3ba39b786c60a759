"""DiLoCo against nodes on one device that are brought together by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env
from tests.local_steps.cases_local_sgd import (
    EPOCHS,
    NUM_ROWS,
    Make,
    Replicas,
    adam,
    batches,
    check_weights,
    data_with_overflows,
    first_model,
    inner_variables,
    momentum,
    scale_of,
    scaled,
    trained_alone,
)

case = registry.case
optimizers = keras.optimizers
SYNC_EVERY = 4


class Nodes(Replicas):
    """Nodes that train alone, and an outer optimizer: the definition of DiLoCo."""

    def __init__(
        self,
        count: int,
        weights: list[np.ndarray],
        outer: optimizers.Optimizer,
        build: Callable[[Make], keras.Model] = first_model,
        make: Make = adam,
    ) -> None:
        super().__init__(count, make, weights, build)
        trained = self.models[0].trainable_variables
        self._anchors = [keras.Variable(variable.numpy()) for variable in trained]
        self._outer = outer
        self._outer.build(self._anchors)
        self.since = np.zeros((len(trained), count))

    def step(self, x: np.ndarray, y: np.ndarray, left_out: Iterable[int] = ()) -> None:
        super().step(x, y, left_out)
        self.since += self.samples
        self.samples[:] = 0

    def meet(self, positions: list[int]) -> None:
        """An outer step of some variables."""
        for position in positions:
            variables = [m.trainable_variables[position] for m in self.models]
            values = [variable.numpy() for variable in variables]
            mean = np.average(values, axis=0, weights=self.since[position])
            anchor = self._anchors[position]
            self._outer.update_step(
                anchor.numpy() - mean, anchor, self._outer.learning_rate
            )
            for variable in variables:
                variable.assign(anchor)
            self.since[position] = 0

    def average_slots(self) -> None:
        slots = [[v for v in inner_variables(m) if v.shape] for m in self.models]
        for variables in zip(*slots, strict=True):
            mean = np.mean([variable.numpy() for variable in variables], axis=0)
            for variable in variables:
                variable.assign(mean)


def expected_model(
    count: int,
    first: list[np.ndarray],
    fragments: list[tuple[int, list[int]]],
    make: Make = adam,
) -> keras.Model:
    """Trains nodes; a fragment has the updates, modulo `SYNC_EVERY`, when it is due."""
    outer = optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    nodes = Nodes(count, first, outer, make=make)
    for _ in range(EPOCHS):
        for number, batch in enumerate(batches(), start=1):
            nodes.step(*batch)
            for offset, positions in fragments:
                if number % SYNC_EVERY == offset:
                    nodes.meet(positions)
        for _, positions in fragments:
            nodes.meet([p for p in positions if nodes.since[p].any()])
        nodes.average_slots()
    return nodes.models[0]


EVERYTHING = [(0, [0, 1, 2, 3])]


@case("Replicas train alone between outer steps", compare=False)
@registry.same_as("exchanges_go_on_without_a_late_worker")
def diloco_makes_outer_steps_of_what_replicas_have_learned(env: Env) -> dict:
    callback = tfdp.callbacks.DiLoCo(sync_every=SYNC_EVERY, scope="replica")
    model, first = trained_alone(env, adam, callback)
    check_weights(env, model, expected_model(env.num_replicas, first, EVERYTHING))
    env.read(model.optimizer.variables)  # one state of all replicas
    return {}


@case("Fragments of the weights are exchanged one after the other", compare=False)
@registry.same_as("exchanges_go_on_without_a_late_worker")
def diloco_exchanges_fragments_in_turn(env: Env) -> dict:
    callback = tfdp.callbacks.DiLoCo(SYNC_EVERY, scope="replica", fragments=2)
    model, first = trained_alone(env, adam, callback)
    # The first kernel has 24 of the 33 weights.
    fragments = [(2, [0]), (0, [1, 2, 3])]
    check_weights(env, model, expected_model(env.num_replicas, first, fragments))
    return {}


class Slow(keras.layers.Layer):
    """Takes some time in each step."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def call(self, x: tf.Tensor) -> tf.Tensor:
        wait = tf.py_function(lambda: time.sleep(self._seconds), [], [])
        with tf.control_dependencies([wait]):
            return tf.identity(x)


def is_inner_step(number: int, made: int, share: float, every: int) -> bool:
    """Whether a worker makes an update: one after an exchange, those, and its share."""
    return number % every in (0, 1) or made < share * number


@case(
    "A slow worker makes fewer inner steps",
    compare=False,
    setups=("two_workers", "two_by_two"),
)
@registry.same_as("exchanges_go_on_without_a_late_worker")
def diloco_has_slow_workers_leave_out_inner_steps(env: Env) -> dict:
    with env.scope():
        inputs = keras.Input((common.NUM_FEATURES,))
        # So much that a busy machine makes nobody else the slow one.
        x = Slow(0.25 if env.rank else 0.0)(inputs)
        model = common.compiled(keras.Model(inputs, common.mlp()(x)), momentum())
    first = model.get_weights()
    callback = tfdp.callbacks.DiLoCo(6, scope="replica", dynamic_steps=True)
    data = common.regression_data(NUM_ROWS)
    history = common.fit(model, *data, epochs=3, callbacks=[callback])
    shares = history["inner_steps"]
    assert shares[0] == 1 > 0.8 > max(shares[1:]), shares
    outer = optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    nodes = Nodes(env.num_replicas, first, outer, make=momentum)
    slow = range(env.num_replicas // 2, env.num_replicas)
    for share in shares:
        made = 0
        for number, batch in enumerate(batches(), start=1):
            makes = is_inner_step(number, made, share, 6)
            made += makes
            nodes.step(*batch, left_out=() if makes else slow)
            if number % 6 == 0:
                nodes.meet([0, 1, 2, 3])
        nodes.average_slots()
    assert int(model.optimizer.iterations) == 3 * len(batches())
    check_weights(env, model, nodes.models[0])
    return {}


@case(
    "The replicas of a node train together",
    compare=False,
    setups=("two_by_two", "two_workers"),
)
@registry.same_as("left_over_batches_have_the_scale_that_replicas_agree_on")
def diloco_trains_nodes_synchronously(env: Env) -> dict:
    options = tfdp.CommunicationOptions(node_size=env.setup.devices_per_worker)
    strategy = tfdp.MultiWorkerMirroredStrategy(communication=options)
    with strategy.scope():
        model = first_model(adam)
    first = model.get_weights()
    data = common.regression_data(NUM_ROWS)
    common.fit(
        model, *data, epochs=EPOCHS, callbacks=[tfdp.callbacks.DiLoCo(SYNC_EVERY)]
    )
    check_weights(env, model, expected_model(2, first, EVERYTHING))
    return {}


@case(
    "The node that overflows skips its step, and no other",
    compare=False,
    setups=("two_by_two",),
)
@registry.same_as("left_over_batches_have_the_scale_that_replicas_agree_on")
def diloco_skips_an_overflow_in_its_node(env: Env) -> dict:
    options = tfdp.CommunicationOptions(node_size=env.setup.devices_per_worker)
    strategy = tfdp.MultiWorkerMirroredStrategy(communication=options)
    with strategy.scope():
        model = first_model(scaled)  # as the policy `mixed_float16` makes it
    outer = optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    nodes = Nodes(2, model.get_weights(), outer, make=scaled)
    x, y = data_with_overflows()
    common.fit(model, x, y, callbacks=[tfdp.callbacks.DiLoCo(SYNC_EVERY)])
    for number, start in enumerate(range(0, len(x), common.BATCH_SIZE), start=1):
        rows = slice(start, start + common.BATCH_SIZE)
        nodes.step(x[rows], y[rows])
        if number % SYNC_EVERY == 0 or rows.stop == len(x):
            nodes.meet([0, 1, 2, 3])
    nodes.average_slots()
    check_weights(env, model, nodes.models[0])
    assert model.optimizer.loss_scale == min(map(scale_of, nodes.models))
    assert model.optimizer.skipped_steps == 1
    return {}


@case("`sync_every=1` with SGD(1.0) is synchronous training")
@registry.same_as("diloco_is_resumed_exactly")
def diloco_of_single_steps_is_synchronous(env: Env) -> dict:
    with env.scope():
        model = common.compiled(common.mlp(), optimizers.SGD(0.05))
    callback = tfdp.callbacks.DiLoCo(1, optimizers.SGD(1.0), scope="replica")
    data = common.regression_data(NUM_ROWS)
    history = common.fit(
        model,
        *data,
        epochs=EPOCHS,
        validation_data=data,
        callbacks=[] if env.is_reference else [callback],
    )
    return {"history": history, "weights": env.weights(model)}


class Stop(keras.callbacks.Callback):
    """Ends the run within its first epoch, between two exchanges."""

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if batch == 8:
            raise KeyboardInterrupt


def resumed_and_not(
    env: Env, make: Callable[[], keras.callbacks.Callback], num_rows: int, every: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Results of a run that was interrupted and resumed, and of one that was not.

    They are the weights, and the lists of the history.
    """
    data = common.regression_data(num_rows)

    def fit(folder: str, *more: keras.callbacks.Callback) -> list[np.ndarray]:
        keras.utils.set_random_seed(3)
        with env.scope():
            model = first_model(momentum)
        backup = tfdp.callbacks.BackupAndRestore(str(env.tmp / folder), save_freq=every)
        callbacks = [make(), *more, backup]
        try:
            history = common.fit(model, *data, epochs=EPOCHS, callbacks=callbacks)
        except KeyboardInterrupt:
            return []
        return [*env.weights(model).values(), *map(np.array, history.values())]

    whole = fit("whole")
    assert not fit("killed", Stop())
    return fit("killed"), whole


def check_resumed(
    env: Env,
    make: Callable[[], keras.callbacks.Callback],
    num_rows: int = common.NUM_SAMPLES,
    save_freq: int = 4,
) -> dict:
    results = resumed_and_not(env, make, num_rows, save_freq)
    for found, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(found, expected)
    return {}


@case("A run that is killed between averages is resumed exactly", compare=False)
@registry.same_as("diloco_is_resumed_exactly")
def local_sgd_is_resumed_exactly(env: Env) -> dict:
    # The last batch of an epoch is smaller.
    return check_resumed(
        env, lambda: tfdp.callbacks.LocalSGD(3, start_step=2), NUM_ROWS
    )


@case("A run that is killed between outer steps is resumed exactly", compare=False)
def diloco_is_resumed_exactly(env: Env) -> dict:
    return check_resumed(env, lambda: tfdp.callbacks.DiLoCo(3, scope="replica"))


@case("Nodes need more than one", compare=False, setups=("mirrored",))
@registry.same_as("diloco_is_resumed_exactly")
def diloco_on_one_node_says_so(env: Env) -> dict:
    with env.scope():
        model = first_model(adam)
    with pytest.raises(ValueError, match="All replicas are on one node"):
        common.fit(
            model, *common.regression_data(), callbacks=[tfdp.callbacks.DiLoCo()]
        )
    return {}
