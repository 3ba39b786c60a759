"""Steps without late workers are those of one device on the rows of the others."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness import common, registry
from tests.harness.compare import error_of_tensor
from tests.harness.env import Env
from tests.harness.launches import launches
from tests.harness.timing import wait_until
from tests.reduction import cases_plans as plans
from tfdp.communication.transport.quorum import QuorumMember
from tfdp.features.backup_workers import exchange

case = registry.case
WORKERS = ("two_workers", "two_by_two")
# Seven rows do not divide evenly among two or four replicas, nor do the last five.
BATCH, SAMPLES, EPOCHS = 7, 54, 2
STEPS = -(-SAMPLES // BATCH)
_DEADLINE_SECONDS = 60.0

Build = Callable[[], keras.Model]


@dataclasses.dataclass
class Record:
    """What a worker has contributed, how late, and which contributions counted."""

    rows: list[float] = dataclasses.field(default_factory=list)
    behind: list[int] = dataclasses.field(default_factory=list)
    absent: list[list[int]] = dataclasses.field(default_factory=list)
    # The same of moving statistics.
    shares: list[float] = dataclasses.field(default_factory=list)
    missed: list[list[int]] = dataclasses.field(default_factory=list)
    # The sums that have arrived, taken or not.
    arrived: int = 0


@contextlib.contextmanager
def recording() -> Iterator[Record]:
    """Records the exchanges of this worker."""
    record, original = Record(), QuorumMember.exchange
    receive = QuorumMember._receive

    def count(self: QuorumMember, result: Any) -> None:
        receive(self, result)
        record.arrived += 1

    def exchange(self: QuorumMember, share: Any) -> Any:
        behind = len(self._sums)
        result = original(self, share)
        if share.total == 1.0:
            record.shares.append(share.rows)
            record.missed.append(list(result.absent))
        else:
            record.behind.append(behind)
            record.rows.append(share.rows)
            record.absent.append(list(result.absent))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QuorumMember, "exchange", exchange)
        patch.setattr(QuorumMember, "_receive", count)
        yield record


class Late(keras.callbacks.Callback):
    """Holds one worker at a batch of an epoch until the other has come to a later one.

    Args:
        env: The surroundings.
        rank: The worker that is late.
        batch: The batch before which it waits.
        later: The batch that the other has made.
    """

    record: Record | None = None

    def __init__(self, env: Env, rank: int, batch: int, later: int) -> None:
        super().__init__()
        self._is_late = env.rank == rank
        self._folder: pathlib.Path = env.tmp
        self._batch, self._later = batch, later

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._file = self._folder / f"late {self._batch} {self._later} {epoch}"
        self._sums = epoch * STEPS + self._later + 1

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._is_late and batch == self._batch:
            wait_until(self._file.exists, "the other worker", _DEADLINE_SECONDS)
            # It knows of a step that has closed once the sum has arrived.
            record = self.record or Record(arrived=self._sums)
            wait_until(lambda: record.arrived >= self._sums, "its sums")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self._is_late and batch == self._later:
            self._file.touch()


def strategy_of(env: Env, **options: Any) -> tf.distribute.Strategy:
    communication = tfdp.CommunicationOptions(backup_workers=1, **options)
    return tfdp.MultiWorkerMirroredStrategy(communication=communication)


class Rows(keras.metrics.Metric):
    """Counts rows by an integer."""

    def __init__(self) -> None:
        super().__init__(name="rows")
        self.rows = self.add_weight(name="rows", dtype="int32", initializer="zeros")

    def update_state(self, y: Any, found: Any, sample_weight: Any = None) -> None:
        self.rows.assign_add(tf.shape(y)[0])

    def result(self) -> Any:
        return self.rows + 0


class LiveRows(Rows):
    """Returns its variable as it is."""

    def result(self) -> Any:
        return self.rows


def dense(rows: type[Rows] = Rows) -> keras.Model:
    """A model with a penalty, which belongs to no row."""
    model = common.mlp(kernel_regularizer=keras.regularizers.L2(0.05))
    metrics = ["mae", rows()]
    return common.compiled(model, keras.optimizers.Adam(0.02), metrics=metrics)


def normalized(synchronized: bool = False, momentum: float = 0.8) -> keras.Model:
    """A model with moving statistics."""
    layers = [
        keras.Input((common.NUM_FEATURES,)),
        keras.layers.BatchNormalization(synchronized=synchronized, momentum=momentum),
        keras.layers.Dense(1),
    ]
    return common.compiled(keras.Sequential(layers))


def embedding() -> keras.Model:
    """A model whose table has sparse gradients."""
    model = keras.Sequential(
        [
            keras.Input((common.LENGTH,), dtype="int32"),
            keras.layers.Embedding(common.NUM_TOKENS, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    return common.compiled(model, keras.optimizers.Adam(0.02), metrics=["mae"])


def scaled() -> keras.Model:
    """A model whose loss is scaled, and whose gradients are clipped."""
    optimizer = tfdp.DistributedOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.3),
        loss_scale="dynamic",
    )
    return common.compiled(common.mlp(), optimizer, metrics=["mae"])


def rows_of(worker: int, env: Env, num_rows: int) -> range:
    """The rows that a worker has of a batch."""
    parts = replicas_of(worker, env, num_rows)
    return range(parts[0].start, parts[-1].stop)


def replicas_of(worker: int, env: Env, num_rows: int) -> list[range]:
    """The rows that each replica of a worker has of a batch."""
    each, more = divmod(num_rows, env.num_replicas)
    first = worker * env.setup.devices_per_worker
    begins = [
        rank * each + min(rank, more)
        for rank in range(first, first + env.setup.devices_per_worker + 1)
    ]
    return list(map(range, begins, begins[1:]))


def replay(
    env: Env, model: keras.Model, data: tuple, absent: list, rows: list[list[float]]
) -> dict[str, np.ndarray]:
    """Trains one device on the rows that counted; returns the means of the epochs.

    Args:
        env: The surroundings.
        model: A model outside of any strategy, with the initial weights.
        data: Features and targets.
        absent: The workers that each step was closed without.
        rows: For each worker, the rows that it has computed in each step.
    """
    x, y = data
    losses, errors, computed = np.zeros((3, EPOCHS))
    for step, missing in enumerate(absent):
        epoch, batch = divmod(step, STEPS)
        begin = batch * BATCH
        bx, by = x[begin : begin + BATCH], y[begin : begin + BATCH]
        kept: list[int] = []
        off = (np.asarray(model(bx)) - by)[:, 0]
        penalty = float(sum(model.losses) or 0.0)
        for worker in range(env.setup.num_workers):
            own = rows_of(worker, env, len(bx))
            assert rows[worker][step] in (0, len(own))
            if worker not in missing:
                kept += own
            if rows[worker][step]:
                losses[epoch] += np.square(off[own]).sum() + penalty * len(own)
                errors[epoch] += np.abs(off[own]).sum()
                computed[epoch] += len(own)
        with tf.GradientTape() as tape:
            loss = model.compute_loss(bx[kept], by[kept], model(bx[kept]))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        optimizer.apply(gradients, model.trainable_variables)
    return {"loss": losses / computed, "mae": errors / computed, "rows": computed}


def train_and_compare(
    env: Env,
    build: Build,
    data: tuple,
    callbacks: list,
    *,
    steps_per_execution: int = 1,
    **options: Any,
) -> Record:
    """Trains with late workers; compares with one device, and between workers."""
    strategy = strategy_of(env)
    with strategy.scope():
        model = build()
        model.steps_per_execution = steps_per_execution
    alone = build()
    alone.set_weights(model.get_weights())
    with recording() as record:
        for callback in callbacks:
            callback.record = record
        history = common.fit(
            model,
            *data,
            batch_size=BATCH,
            epochs=EPOCHS,
            callbacks=callbacks,
            **options,
        )
    group = strategy.extended.worker_group
    rows = group.all_gather("rows", record.rows)
    assert len(record.absent) == STEPS * EPOCHS
    assert group.all_equal("absent", record.absent)
    expected_logs = replay(env, alone, data, record.absent, rows)
    for name in history.keys() & expected_logs.keys():
        np.testing.assert_allclose(history[name], expected_logs[name], rtol=1e-5)
    for found, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        assert error_of_tensor(found, expected) < 1e-5
    bits = [weight.tobytes().hex() for weight in env.weights(model).values()]
    assert group.all_equal("weights", bits)
    dropped = [
        sum(map(len, record.absent[STEPS * epoch : STEPS * (epoch + 1)]))
        for epoch in range(EPOCHS)
    ]
    assert history["dropped_gradients"] == dropped
    assert not launches(plans.step_of(model.train_function))
    return record


@case(
    "A step without a late worker is that of one device on the other rows",
    compare=False,
    setups=WORKERS,
)
def late_workers_are_left_out(env: Env) -> dict:
    late = Late(env, rank=1, batch=1, later=5)
    data = common.regression_data(SAMPLES)
    record = train_and_compare(env, dense, data, [late], validation_data=data)
    for epoch in range(EPOCHS):
        behind = range(epoch * STEPS + 1, epoch * STEPS + 6)
        assert all(record.absent[step] == [1] for step in behind)
        # It computes nothing for steps that have closed when it begins them.
        assert env.rank == 0 or not any(record.rows[step] for step in behind)
    return {}


@case(
    "Scaled and clipped gradients are those of the workers in time",
    compare=False,
    setups=WORKERS,
)
@registry.same_as("late_workers_are_left_out")
def scaled_gradients_of_late_workers_are_left_out(env: Env) -> dict:
    late = Late(env, rank=1, batch=1, later=4)
    train_and_compare(env, scaled, common.regression_data(SAMPLES), [late])
    return {}


@case(
    "Rows that each replica has of a table are added up",
    compare=False,
    setups=WORKERS,
)
@registry.same_as("late_workers_are_left_out")
def rows_of_all_replicas_are_added_up(env: Env) -> dict:
    late = Late(env, rank=1, batch=1, later=4)
    data = common.regression_data(SAMPLES)
    train_and_compare(env, lambda: with_positions([3, 1, 0, 2, 4, 5]), data, [late])
    return {}


def replay_normalized(
    env: Env, model: keras.Model, data: tuple, record: Record, shares: list
) -> None:
    """Trains with the moments of each replica's rows, as BatchNormalization does.

    Args:
        env: The surroundings.
        model: A model outside of any strategy, with the initial weights.
        data: Features and targets.
        record: What counted in each step.
        shares: For each worker, its share of the rows of the statistics of each step.
    """
    x, y = data
    trained, moving = model.trainable_variables, model.non_trainable_variables
    for step, (absent, missed) in enumerate(
        zip(record.absent, record.missed, strict=True)
    ):
        begin = step % STEPS * BATCH
        bx, by = x[begin : begin + BATCH], y[begin : begin + BATCH]
        before = [v.numpy() for v in moving]
        gradients = [np.zeros(v.shape) for v in trained]
        statistics = [np.zeros(v.shape) for v in moving]
        counted = [0, 0]
        for worker in range(env.setup.num_workers):
            for own in filter(len, replicas_of(worker, env, len(bx))):
                for variable, value in zip(moving, before, strict=True):
                    variable.assign(value)
                with tf.GradientTape() as tape:
                    errors = model(bx[own], training=True) - by[own]
                    loss = tf.reduce_sum(tf.square(errors))
                if worker not in absent:
                    counted[0] += len(own)
                    for total, part in zip(
                        gradients, tape.gradient(loss, trained), strict=True
                    ):
                        total += part.numpy()
                if worker not in missed and shares[worker][step]:
                    counted[1] += len(own)
                    for total, variable in zip(statistics, moving, strict=True):
                        total += len(own) * variable.numpy()
        sums = [tf.constant(g / counted[0], tf.float32) for g in gradients]
        model.optimizer.apply(sums, trained)
        for variable, total in zip(moving, statistics, strict=True):
            variable.assign(total / counted[1])


@case(
    "Moving statistics are averaged over the workers in time",
    compare=False,
    setups=WORKERS,
)
@registry.same_as("late_workers_are_left_out")
def statistics_of_late_workers_are_left_out(env: Env) -> dict:
    strategy = strategy_of(env)
    with strategy.scope():
        model = normalized()
    alone = normalized()
    data = common.regression_data(SAMPLES)
    late = Late(env, rank=1, batch=1, later=4)
    alone.set_weights(model.get_weights())
    with recording() as record:
        history = common.fit(
            model, *data, batch_size=BATCH, epochs=EPOCHS, callbacks=[late]
        )
    group = strategy.extended.worker_group
    shares = group.all_gather("shares", record.shares)
    replay_normalized(env, alone, data, record, shares)
    for found, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        assert error_of_tensor(found, expected) < 1e-5
    bits = [weight.tobytes().hex() for weight in env.weights(model).values()]
    assert group.all_equal("weights", bits)
    assert sum(history["dropped_gradients"]) == sum(map(len, record.absent))
    assert not launches(plans.step_of(model.train_function))
    return {}


@case("A compiled step does not wait", compare=False, setups=WORKERS)
@registry.same_as("late_workers_are_left_out")
def a_compiled_step_does_not_wait(env: Env) -> dict:
    def build() -> keras.Model:
        return common.compiled(common.mlp(), jit_compile=True, metrics=["mae"])

    late = Late(env, rank=1, batch=1, later=4)
    train_and_compare(env, build, common.regression_data(SAMPLES), [late])
    return {}


@case("Several steps in one execution do not wait", compare=False, setups=WORKERS)
@registry.same_as("late_workers_are_left_out")
def several_steps_in_one_execution_do_not_wait(env: Env) -> dict:
    late = Late(env, rank=1, batch=3, later=5)
    data = common.regression_data(SAMPLES)
    train_and_compare(env, dense, data, [late], steps_per_execution=3)
    return {}


@case("A worker that is too late is waited for", compare=False, setups=WORKERS)
@registry.same_as("late_workers_are_left_out")
def a_worker_that_is_too_late_is_waited_for(env: Env) -> dict:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_MAX_BYTES", 1)
        data = common.regression_data(SAMPLES)
        record = train_and_compare(
            env, dense, data, [Late(env, rank=1, batch=1, later=2)]
        )
    assert max(record.behind) <= 2
    assert env.is_chief or max(record.behind) == 2
    return {}


@case("Worker 0 may be late, too", compare=False, setups=WORKERS)
@registry.same_as("late_workers_are_left_out")
def the_first_worker_may_be_late(env: Env) -> dict:
    late = Late(env, rank=0, batch=2, later=6)
    data = common.regression_data(SAMPLES)
    train_and_compare(env, lambda: dense(LiveRows), data, [late])
    return {}


@case(
    "Rows of sparse gradients of late workers are left out",
    compare=False,
    setups=WORKERS,
)
@registry.same_as("late_workers_are_left_out")
def sparse_gradients_of_late_workers_are_left_out(env: Env) -> dict:
    late = Late(env, rank=1, batch=1, later=4)
    train_and_compare(env, embedding, common.token_data(SAMPLES), [late])
    return {}


@case(
    "Statistics of a worker without rows count for none", compare=False, setups=WORKERS
)
@registry.same_as("late_workers_are_left_out")
def statistics_without_rows_count_for_none(env: Env) -> dict:
    """Gradients of batch 3 have closed when a worker begins it, and no statistics."""
    closed, original = env.tmp / "closed", QuorumMember.exchange
    ends: dict[bool, QuorumMember] = {}
    counted = [0]

    def exchange(self: QuorumMember, share: Any) -> Any:
        is_statistics = share.total == 1.0
        ends[is_statistics] = self
        counted[0] += is_statistics
        if is_statistics and counted[0] == 4 and env.is_chief:
            closed.touch()
            wait_until(lambda: 1 in self._shares, "the other", _DEADLINE_SECONDS)  # type: ignore[attr-defined]
        return original(self, share)

    class Begins(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 3 and not env.is_chief:
                wait_until(closed.exists, "the gradients", _DEADLINE_SECONDS)
                wait_until(lambda: ends[False]._sums, "their sum", _DEADLINE_SECONDS)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            means.append(model.layers[0].moving_mean.numpy())

    means: list[np.ndarray] = []
    strategy = strategy_of(env)
    with strategy.scope():
        model = normalized(momentum=0.0)
    x, y = common.regression_data(5 * BATCH)
    x = 10.0 + 0.01 * x
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QuorumMember, "exchange", exchange)
        common.fit(model, x, y, batch_size=BATCH, callbacks=[Begins()])
    np.testing.assert_allclose(means, np.full_like(means, 10.0), rtol=0.01)
    return {}


class Fails(keras.callbacks.Callback):
    """Raises an error at the end of a batch."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self._batch = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == self._batch:
            raise KeyError("own")


@case(
    "After errors at different steps no `fit` continues", compare=False, setups=WORKERS
)
@registry.same_as("late_workers_are_left_out")
def errors_at_different_steps_end_training(env: Env) -> dict:
    with strategy_of(env).scope():
        model = dense()
    callbacks = [Late(env, rank=1, batch=2, later=4), Fails(4 if env.is_chief else 2)]
    data = common.regression_data(SAMPLES)
    with pytest.raises(KeyError, match="own"):
        common.fit(model, *data, batch_size=BATCH, callbacks=callbacks)
    with pytest.raises(RuntimeError, match=r"Received: numbers of steps \[5, 3\]"):
        common.fit(model, *data, batch_size=BATCH)
    return {}


@case("A resumed epoch counts what it had dropped", compare=False, setups=WORKERS)
@registry.same_as("late_workers_are_left_out")
def a_resumed_epoch_counts_all_dropped_gradients(env: Env) -> dict:
    def train(*more: keras.callbacks.Callback) -> dict:
        with strategy_of(env).scope():
            model = dense()
        backup = tfdp.callbacks.BackupAndRestore(env.tmp / "backups", save_freq=4)
        data, callbacks = common.regression_data(SAMPLES), [*more, backup]
        return common.fit(
            model, *data, batch_size=BATCH, epochs=EPOCHS, callbacks=callbacks
        )

    with pytest.raises(KeyError, match="own"):
        train(Fails(5))
    # Each step drops the gradient of one of the two workers.
    assert train()["dropped_gradients"] == [STEPS] * EPOCHS
    return {}


@case("States are saved in memory within an epoch", compare=False, setups=WORKERS)
@registry.same_as("late_workers_are_left_out")
def states_are_saved_in_memory(env: Env) -> dict:
    with strategy_of(env).scope():
        model = dense()
    backup = tfdp.callbacks.BackupAndRestore(env.tmp / "backups", memory_every=3)
    saved: list[int] = []
    save = backup._save

    def note(epoch: int, batches: int, *rest: Any) -> None:
        saved.append(batches)
        save(epoch, batches, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backup, "_save", note)
        data = common.regression_data(SAMPLES)
        common.fit(model, *data, batch_size=BATCH, callbacks=[backup])
    assert saved[:2] == [3, 6]
    return {}


def fails(
    env: Env,
    text: str,
    build: Build = dense,
    data: Any = None,
    callbacks: tuple = (),
    **options: Any,
) -> None:
    """Training ends with a sentence before a weight moves."""
    with strategy_of(env, **options).scope():
        model = build()
    before = model.get_weights()
    data = data or common.regression_data(SAMPLES)
    with pytest.raises(ValueError, match=text):
        common.fit(model, *data, batch_size=BATCH, callbacks=list(callbacks))
    for found, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(found, expected)


def with_optimizer(**arguments: Any) -> Build:
    def build() -> keras.Model:
        optimizer = tfdp.DistributedOptimizer(keras.optimizers.Adam(), **arguments)
        return common.compiled(common.mlp(), optimizer)

    return build


class TwoUpdates(keras.Model):
    """Updates its weights twice in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.dense(x)

    def train_step(self, data: tuple) -> dict:
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def two_updates() -> keras.Model:
    model = TwoUpdates()
    model(tf.zeros([1, common.NUM_FEATURES]))
    return common.compiled(model)


def normalized_twice() -> keras.Model:
    """A model that calls one BatchNormalization twice."""
    inputs = keras.Input((common.NUM_FEATURES,))
    layer = keras.layers.BatchNormalization()
    outputs = keras.layers.Dense(1)(layer(2.0 * layer(inputs)))
    return common.compiled(keras.Model(inputs, outputs))


class Positions(keras.layers.Layer):
    """Adds an embedding of positions, one of which occurs twice."""

    def __init__(self, positions: list[int]) -> None:
        super().__init__()
        self.table = keras.layers.Embedding(common.NUM_FEATURES, 1)
        self.positions = positions

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + self.table(tf.constant(self.positions))[:, 0]


def with_positions(positions: list[int]) -> keras.Model:
    layers = [
        keras.Input((common.NUM_FEATURES,)),
        Positions(positions),
        keras.layers.Dense(1),
    ]
    optimizer = keras.optimizers.Adam(0.02)
    return common.compiled(keras.Sequential(layers), optimizer, metrics=["mae"])


def over_the_batch() -> keras.Model:
    """A model whose loss compares rows with the mean of the batch."""

    def loss(y: tf.Tensor, found: tf.Tensor) -> tf.Tensor:
        return tf.square(found - tf.reduce_mean(found)) + tf.square(found - y)

    return common.compiled(common.mlp(), loss=loss)


@case("What needs all workers in a step says so", compare=False, setups=WORKERS)
@registry.same_as("late_workers_are_left_out")
def what_needs_all_workers_says_so(env: Env) -> dict:
    fails(env, "does not support sharding", with_optimizer(sharding="optimizer"))
    fails(
        env,
        "does not support gradient accumulation",
        with_optimizer(accumulation_steps=2),
    )
    fails(
        env,
        "does not support `LocalSGD` and `DiLoCo`",
        callbacks=(tfdp.callbacks.LocalSGD(3),),
    )
    check = tfdp.callbacks.ConsistencyCheck()
    fails(env, "`ConsistencyCheck` compares", callbacks=(check,))
    fails(env, "the whole batch for .*batch_normalization", lambda: normalized(True))
    fails(env, "statistics that a step calls twice", normalized_twice)
    return {}


@case(
    "What backup workers cannot do says so",
    compare=False,
    setups=WORKERS,
    quick_setup="two_by_two",
)
@registry.same_as("late_workers_are_left_out")
def what_backup_workers_cannot_do_says_so(env: Env) -> dict:
    fails(env, "of the whole batch for `Sub` .*tf.reduce_mean", over_the_batch)
    fails(env, "of the whole batch for ", lambda: with_positions([0, 1, 1, 2, 3, 4]))
    fails(env, "one update of the optimizer in a step", two_updates)
    x, y = common.regression_data(SAMPLES)
    batches = [(x[begin : begin + BATCH], y[begin : begin + BATCH]) for begin in (0, 7)]
    unknown = tf.data.Dataset.from_generator(
        lambda: batches,
        output_signature=(
            tf.TensorSpec([None, common.NUM_FEATURES]),
            tf.TensorSpec([None, 1]),
        ),
    )
    fails(env, "data whose rows each worker can count", data=(unknown,))
    options = tfdp.CommunicationOptions(backup_workers=2)
    with tfdp.MultiWorkerMirroredStrategy(communication=options).scope():
        model = dense()
    with pytest.raises(ValueError, match=r"workers\. Received: backup_workers=2, 2 w"):
        common.fit(model, x, y)
    return {}
