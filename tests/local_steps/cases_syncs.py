"""What workers that step alone still wait for each other for: exchanges only."""

from __future__ import annotations

import hashlib
import os
import pathlib
import signal
import time

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env
from tests.harness.launches import Launch, launches
from tests.harness.timing import wait_until
from tests.local_steps.cases_local_sgd import adam, first_model, momentum
from tests.reduction import cases_plans as plans

case = registry.case
SYNC_EVERY = 6
WORKERS = ("two_workers", "two_by_two")
_DEADLINE_SECONDS = 60.0


def normalized(synchronized: bool = True) -> keras.Model:
    """A model with moving statistics, compiled with a metric beside its loss."""
    model = keras.Sequential(
        [
            keras.Input((common.NUM_FEATURES,)),
            keras.layers.BatchNormalization(synchronized=synchronized, momentum=0.8),
            keras.layers.Dense(4, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )
    return common.compiled(model, keras.optimizers.SGD(0.05), metrics=["mae"])


def launches_of_a_step(env: Env, callback: keras.callbacks.Callback) -> list[Launch]:
    model = common.build_in_scope(env, normalized)
    steps: list[tf.types.experimental.ConcreteFunction] = []

    class Keep(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            steps.append(plans.step_of(model.train_function))

    common.fit(model, *common.regression_data(16), callbacks=[callback, Keep()])
    return launches(steps[0])


@case("Inner steps launch no collective", compare=False)
@registry.same_as("replicas_alone_draw_other_numbers")
def inner_steps_launch_nothing(env: Env) -> dict:
    found = launches_of_a_step(env, tfdp.callbacks.LocalSGD(SYNC_EVERY))
    assert {launch.branch for launch in found} == {"then_branch"}, found
    late = tfdp.callbacks.DiLoCo(SYNC_EVERY, scope="replica", delay=2)
    found = launches_of_a_step(env, late)
    if env.setup.is_multi_worker:
        assert not found  # a thread exchanges
    else:
        assert {launch.branch for launch in found} == {"then_branch"}, found
    return {}


class Part(keras.callbacks.Callback):
    """Holds the second worker at a batch until the first has come to a later one."""

    def __init__(self, env: Env, name: str, later: int) -> None:
        super().__init__()
        self._is_first = env.is_chief
        self._file: pathlib.Path = env.tmp / name
        self._later = later

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if self._is_first and batch == self._later:
            self._file.touch()
        if not self._is_first and batch == 1:
            what = "the other worker, which waits, too"
            wait_until(self._file.exists, what, _DEADLINE_SECONDS)


def fit_with_a_late_worker(
    env: Env, callback: keras.callbacks.Callback, later: int
) -> None:
    """Trains, the first worker up to a batch before the second one goes on."""
    with env.scope():
        model = first_model(momentum)
    data = common.regression_data(10 * common.BATCH_SIZE)
    callbacks = [callback, Part(env, "later", later)]
    common.fit(model, *data, epochs=1, callbacks=callbacks)
    env.weights(model)


@case(
    "A worker that is late holds nobody up between exchanges",
    compare=False,
    setups=WORKERS,
)
@registry.same_as("exchanges_go_on_without_a_late_worker")
def a_late_worker_stops_nobody_before_an_exchange(env: Env) -> dict:
    # The batch before the first exchange.
    fit_with_a_late_worker(env, tfdp.callbacks.LocalSGD(SYNC_EVERY), SYNC_EVERY - 2)
    return {}


@case(
    "A worker that is late holds nobody up while exchanges travel",
    compare=False,
    setups=WORKERS,
)
@registry.same_as("exchanges_go_on_without_a_late_worker")
def a_late_worker_stops_nobody_while_exchanges_travel(env: Env) -> dict:
    late = tfdp.callbacks.DiLoCo(SYNC_EVERY, scope="replica", delay=3)
    # What was sent after the sixth batch is used after the ninth.
    fit_with_a_late_worker(env, late, SYNC_EVERY + 1)
    return {}


class StopOnOne(keras.callbacks.Callback):
    """Wants to end training on the last worker, and counts the batches."""

    def __init__(self, env: Env) -> None:
        super().__init__()
        self._wants = env.rank == env.setup.num_workers - 1
        self.count = 0

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self.count += 1
        if self._wants and batch == 1:
            self.model.stop_training = True


@case(
    "One worker's wish to stop holds from the next exchange",
    compare=False,
    setups=WORKERS,
)
@registry.same_as("exchanges_go_on_without_a_late_worker")
def all_stop_at_the_next_exchange(env: Env) -> dict:
    with env.scope():
        model = first_model(adam)
    stop = StopOnOne(env)
    callbacks = [tfdp.callbacks.LocalSGD(4), stop]
    common.fit(model, *common.regression_data(), callbacks=callbacks)
    assert stop.count == 4
    return {}


@case("Moving statistics of each replica meet", compare=False)
def moving_statistics_are_averaged_when_all_meet(env: Env) -> dict:
    # In the last batch only the first replica has a row.
    x, y = common.regression_data(11 * common.BATCH_SIZE + 1)
    x *= np.tile(np.arange(1, common.BATCH_SIZE + 1), 12)[: len(x), None] / 4
    x = x.astype("float32")
    model = common.build_in_scope(env, normalized)
    common.fit(model, x, y, epochs=1, callbacks=[tfdp.callbacks.LocalSGD(5)])
    means = np.zeros([env.num_replicas, common.NUM_FEATURES])
    variances = np.ones_like(means)
    for begin in range(0, len(x), common.BATCH_SIZE):
        batch = x[begin : begin + common.BATCH_SIZE]
        for replica, rows in enumerate(np.array_split(batch, env.num_replicas)):
            if len(rows):
                means[replica] += 0.2 * (rows.mean(0) - means[replica])
                variances[replica] += 0.2 * (rows.var(0) - variances[replica])
    layer = model.layers[0]
    found = env.read([layer.moving_mean, layer.moving_variance])
    wanted = (means.mean(0), variances.mean(0))
    for value, expected in zip(found.values(), wanted, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)
    return {}


class OwnLogs(keras.Model):
    """Returns a number of its batch that is no metric."""

    def train_step(self, data: tuple) -> dict:
        super().train_step(data)
        return {"mean_of_rows": tf.reduce_mean(data[0])}


@case("Logs of a step of one's own are those of all", compare=False)
@registry.same_as("replicas_alone_draw_other_numbers")
def logs_are_averaged_at_the_end_of_an_epoch(env: Env) -> dict:
    x, y = common.regression_data(2 * common.BATCH_SIZE)
    with env.scope():
        inputs = keras.Input((common.NUM_FEATURES,))
        model = common.compiled(OwnLogs(inputs, keras.layers.Dense(1)(inputs)))
    found = common.fit(model, x, y, callbacks=[tfdp.callbacks.LocalSGD(4)], epochs=1)
    wanted = x[common.BATCH_SIZE :].mean()
    np.testing.assert_allclose(found["mean_of_rows"], [wanted], rtol=1e-5)
    return {}


def check_same_weights(env: Env, model: keras.Model) -> None:
    """All replicas of all workers have the same weights."""
    own = b"".join(value.tobytes() for value in env.weights(model).values())
    worker_group = env.strategy.extended.worker_group
    assert worker_group.all_equal("weights", hashlib.sha256(own).hexdigest())


@case(
    "A worker that is late for exchanges is left out, and catches up",
    compare=False,
    setups=WORKERS,
)
def exchanges_go_on_without_a_late_worker(env: Env) -> dict:
    callback = tfdp.callbacks.DiLoCo(
        3, scope="replica", delay=1, min_participants=1, patience_seconds=0.05
    )
    with env.scope():
        model = first_model(adam)
    data = common.regression_data(20 * common.BATCH_SIZE)
    # Six exchanges are made by the first worker alone.
    callbacks = [callback, Part(env, "rounds", 18)]
    history = common.fit(model, *data, epochs=2, callbacks=callbacks)
    check_same_weights(env, model)
    assert history["loss"][1] < history["loss"][0]
    return {}


class StopTheOther(keras.callbacks.Callback):
    """Stops the second worker's process for a while, during which the first trains."""

    def __init__(self, env: Env, seconds: float) -> None:
        super().__init__()
        self._is_first, self._seconds = env.is_chief, seconds
        self._file = env.tmp / "process"
        if not self._is_first:
            self._file.write_text(str(os.getpid()), "utf-8")
        env.wait_for_all("written")
        self._stopped = 0.0
        self.batches_meanwhile = 0

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if not self._is_first:
            return
        other = int(self._file.read_text("utf-8"))
        if batch == 7:
            os.kill(other, signal.SIGSTOP)
            self._stopped = time.monotonic()
        elif self._stopped:
            self.batches_meanwhile += 1
            time.sleep(0.05)
            if time.monotonic() - self._stopped > self._seconds:
                # Nobody sends it if this worker waits for the other one.
                os.kill(other, signal.SIGCONT)
                self._stopped = 0.0


@case(
    "A worker that stands still for 30 s costs the others no inner step",
    compare=False,
    setups=("two_workers",),
    side_by_side=False,
)
@registry.same_as("exchanges_go_on_without_a_late_worker")
def a_stopped_worker_costs_no_inner_step(env: Env) -> dict:
    callback = tfdp.callbacks.DiLoCo(
        10, scope="replica", delay=4, min_participants=1, patience_seconds=0.2
    )
    with env.scope():
        model = first_model(adam)
    data = common.regression_data(800 * common.BATCH_SIZE)
    stop = StopTheOther(env, 30.0)
    common.fit(model, *data, epochs=1, callbacks=[callback, stop])
    check_same_weights(env, model)
    if env.is_chief:
        assert 100 < stop.batches_meanwhile < 790
    return {}
