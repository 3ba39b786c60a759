"""Workers with different numbers of batches: an epoch ends for all at one step.

Each worker has data of its own. One device is given what all workers together took in
each step: the rows of those that had any (`"join"`), or the steps in which all had
some (`"stop"`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import typing
import warnings

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.data.cases_distribute import (
    NUM,
    Policy,
    counted_model,
    files_of,
    parse,
    with_policy,
)
from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as
from tests.harness.results import flatten_results
from tfdp.ground import user_code

BATCH = common.BATCH_SIZE
# Of two workers: 3 and 5 batches. A batch of 5 is split alike for 2 and 4 replicas.
NUM_ROWS = (21, 37)
SHORTEST, LONGEST = 3, 5
Batches = list[tuple[np.ndarray, np.ndarray]]


@contextlib.contextmanager
def uneven(env: Env, how: str) -> typing.Iterator[list]:
    """Trains with `uneven=how`, and collects what tfdp warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if env.is_reference:
            yield caught
            return
        extended = env.strategy.extended
        before = extended.options
        extended.options = dataclasses.replace(before, uneven=how)
        try:
            yield caught
        finally:
            extended.options = before
            user_code.forget_topics()


def data_of(rank: int, num_rows: int | None = None) -> tuple:
    """The rows of one worker."""
    return common.regression_data(num_rows or NUM_ROWS[rank], seed=rank)


def batches_of(rank: int, num_rows: int | None = None) -> Batches:
    """The batches of one worker, the last one smaller."""
    x, y = data_of(rank, num_rows)
    cuts = range(BATCH, len(x), BATCH)
    return list(zip(np.split(x, cuts), np.split(y, cuts), strict=True))


def halves(batch: tuple) -> Batches:
    """The two halves of a batch, the first one larger."""
    x, y = (np.array_split(part, 2) for part in batch)
    return list(zip(x, y, strict=True))


def own_rows(rank: int, policy: Policy, num_rows: int | None = None) -> Batches:
    """The rows that one of two workers contributes to each step."""
    batches = batches_of(rank, num_rows)
    if policy == Policy.OFF:  # a batch lasts for two steps
        return [half for batch in batches for half in halves(batch)]
    return [halves(batch)[rank] for batch in batches]


def joined(parts: typing.Sequence[Batches], how: str) -> Batches:
    """What one device is given: the rows of all workers, step by step."""
    ends = [len(part) for part in parts]
    steps = []
    for step in range(min(ends) if how == "stop" else max(ends)):
        found = [part[step] for part in parts if step < len(part)]
        x, y = (np.concatenate(rows) for rows in zip(*found, strict=True))
        steps.append((x, y))
    return steps


def given(batches: Batches) -> tf.data.Dataset:
    """A dataset of batches of any size, of known length."""
    shapes = [(None, *part.shape[1:]) for part in batches[0]]
    spec = tuple(tf.TensorSpec(shape, tf.float32) for shape in shapes)
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=spec
    )
    return dataset.apply(tf.data.experimental.assert_cardinality(len(batches)))


def of_one_device(
    how: str, policy: Policy = Policy.AUTO, num_rows: tuple = NUM_ROWS
) -> tf.data.Dataset:
    """The data for the reference."""
    parts = [own_rows(rank, policy, rows) for rank, rows in enumerate(num_rows)]
    return given(joined(parts, how))


def dataset_of(env: Env, policy: Policy = Policy.AUTO) -> tf.data.Dataset:
    """This worker's data, of known length."""
    return with_policy(common.batched(*data_of(env.rank)), policy)


def of_unknown_length(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same data, whose end shows when it is there."""
    return dataset.filter(lambda *_: True)


class Steps(keras.callbacks.Callback):
    """Counts the steps of each epoch, and keeps what Keras says of their number."""

    def __init__(self):
        super().__init__()
        self.counts: list[int] = []
        self.told: list = []

    def on_epoch_begin(self, epoch, logs=None):
        self.counts.append(0)
        self.told.append(self.params["steps"])

    def on_train_batch_end(self, batch, logs=None):
        self.counts[-1] = batch + 1


def train(env: Env, *data: typing.Any, **options: typing.Any) -> dict:
    """Builds, fits twice over the data, and returns all that may differ."""
    keras.backend.clear_session()  # models of one name
    keras.utils.set_random_seed(1234)
    names = "steps_per_execution", "run_eagerly"
    how = {name: options.pop(name) for name in names if name in options}
    with env.scope():
        model = common.compiled(common.mlp(), metrics=["mae"], **how)
    history = common.fit(model, *data, **{"epochs": 2} | options)
    return {"history": history, "weights": env.weights(model)}


def counted(env: Env, expected: int, *data, is_known: bool = True, **options) -> dict:
    """Trains, and checks that each epoch had as many steps."""
    steps = Steps()
    results = train(env, *data, callbacks=[steps], **options)
    assert steps.counts == [expected] * len(steps.counts), steps.counts
    assert env.is_reference or not is_known or steps.told[0] == expected, steps.told
    return results


def told(caught: list, begin: str = "Workers have d") -> list[str]:
    """What tfdp has warned of the lengths of data."""
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if text.startswith(begin)]


@case(
    "`join`: workers without data add nothing until the last is through",
    setups=("two_by_two", "two_workers"),
)
@same_as("stop_at_the_shortest_of_known_lengths")
def join_of_known_and_unknown_lengths(env: Env) -> dict:
    results = {}
    with uneven(env, "join") as caught:
        data = of_one_device("join") if env.is_reference else dataset_of(env)
        results["known"] = counted(env, LONGEST, data)
        if not env.is_reference:
            (text,) = set(told(caught))
            assert "Received batches: 3 on worker 0, 5 on worker 1" in text, text
            data = of_unknown_length(data)
        results["unknown"] = train(env, data, steps_per_execution=2)
        # As many batches on both, but of other sizes: each sample counts alike.
        rows = 21, 24
        alike = of_one_device("join", num_rows=rows)
        for kind in "rows", "rows of unknown length", "rows that nobody knows":
            data = alike if env.is_reference else _of_kind(env, kind, rows[env.rank])
            is_known = kind != "rows of unknown length"
            results[kind] = counted(env, SHORTEST, data, is_known=is_known)
    if not env.is_reference:
        (text,) = set(told(caught, "Workers have datasets with"))
        assert "batches of 8 rows and a last one of 5 on worker 0, ba" in text, text
        assert text.endswith("batches of 8 rows on worker 1"), text
    return results


def _of_kind(env: Env, kind: str, num_rows: int) -> tf.data.Dataset:
    """This worker's data, of whose end or rows more or less is known."""
    if kind == "rows that nobody knows":
        return given(batches_of(env.rank, num_rows))
    data = common.batched(*data_of(env.rank, num_rows))
    return of_unknown_length(data) if "unknown" in kind else data


@case(
    "`stop`: all end with the first that has no data, known lengths; not validation",
    setups=("two_workers", "two_by_two"),
)
def stop_at_the_shortest_of_known_lengths(env: Env) -> dict:
    val_rows = (8, 21)
    with uneven(env, "stop") as caught:
        if env.is_reference:
            data = of_one_device("stop")
            validation = of_one_device("join", num_rows=val_rows)
        else:
            data = dataset_of(env)
            validation = common.batched(*data_of(env.rank, val_rows[env.rank]))
        results = counted(env, SHORTEST, data, validation_data=validation)
        if not env.is_reference:
            (text,) = told(caught, "Workers have different numbers")
            assert "batches: 3 on worker 0, 5 on worker 1. " in text, text
            assert text.endswith("Dropped batches: 2 of worker 1."), text
    return results


@case(
    "`stop` with several steps in an execution, known lengths",
    setups=("two_workers", "two_by_two"),
)
@same_as("stop_at_the_shortest_of_known_lengths")
def stop_at_the_shortest_within_an_execution(env: Env) -> dict:
    options = {"steps_per_execution": 2, "is_known": False}
    with uneven(env, "stop") as caught:
        data = of_one_device("stop") if env.is_reference else dataset_of(env)
        results = {
            "one by one": counted(env, SHORTEST, data),
            "in pairs": counted(env, SHORTEST + 1, data, **options),
        }
    assert env.is_reference or len(told(caught, "Workers have different numbers")) == 1
    return results


class Listed(keras.utils.PyDataset):
    """Batches of which Keras knows the number, and the dataset it makes does not."""

    def __init__(self, batches: Batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


@case(
    "`stop`: all end with the first that has no data, unknown lengths",
    setups=("two_workers", "two_by_two"),
)
@same_as("stop_at_the_shortest_of_known_lengths")
def stop_at_the_shortest_of_unknown_lengths(env: Env) -> dict:
    results = {}
    with uneven(env, "stop") as caught:
        reference = of_one_device("stop")
        dataset = reference
        if not env.is_reference:
            dataset = of_unknown_length(dataset_of(env))
        results["dataset"] = train(env, dataset)
        results["in pairs"] = train(env, dataset, steps_per_execution=2)
        assert not told(caught)
        data = reference
        if not env.is_reference:
            data = (batch for batch in batches_of(env.rank))
        results["generator"] = train(env, data, epochs=1)
        data = reference if env.is_reference else Listed(batches_of(env.rank))
        results["py dataset"] = counted(env, SHORTEST, data)
        assert len(told(caught)) == (not env.is_reference)
    return results


@case(
    "Sharding OFF, different cardinality: crash where it is known, or a hang",
    setups=("two_workers", "two_by_two"),
)
@same_as("stop_at_the_shortest_of_known_lengths")
def uneven_data_that_is_not_sharded(env: Env) -> dict:
    results = {}
    for how in "join", "stop":
        data = of_one_device(how, Policy.OFF)
        if not env.is_reference:
            data = dataset_of(env, Policy.OFF)
        with uneven(env, how) as caught:
            steps = 2 * (SHORTEST if how == "stop" else LONGEST)
            results[how] = counted(env, steps, data)
            assert len(told(caught)) == (how == "stop" and not env.is_reference)
    return results


@case(
    "Sharding OFF, different cardinality that nobody knows, `steps_per_execution`",
    setups=("two_workers", "two_by_two"),
)
@same_as("stop_at_the_shortest_of_known_lengths")
def uneven_data_of_unknown_length_that_is_not_sharded(env: Env) -> dict:
    results = {}
    for how in "join", "stop":
        data = of_one_device(how, Policy.OFF)
        if not env.is_reference:
            data = of_unknown_length(dataset_of(env, Policy.OFF))
        with uneven(env, how):
            results[how] = train(env, data, steps_per_execution=2)
    return results


@case(
    "`stop` where workers were given distributed datasets, one of them endless",
    setups=("two_workers", "two_by_two"),
)
@same_as("stop_at_the_shortest_of_known_lengths")
def endless_data_on_one_worker(env: Env) -> dict:
    """The other one has 3 batches; an epoch of 8 steps goes on with empty ones.

    Datasets that were distributed before are read by TensorFlow's own iterators.
    """
    results = {}
    for how, kind in ("stop", "options"), ("join", "function"):
        data = _with_an_endless_worker(env, how, 8)
        with uneven(env, how):
            results[how] = train(env, data, steps_per_epoch=8, epochs=1)
            results[kind] = results[how]
            if not env.is_reference:
                again = _distributed(env, kind, data)
                results[kind] = train(env, again, steps_per_epoch=8, epochs=1)
    return results


def _distributed(env: Env, kind: str, data: tf.data.Dataset) -> typing.Any:
    strategy = env.distribution
    if kind == "options":
        options = tf.distribute.InputOptions()
        return strategy.experimental_distribute_dataset(data, options)
    return strategy.distribute_datasets_from_function(lambda _: _per_replica(env))


def _with_an_endless_worker(env: Env, how: str, num_steps: int) -> tf.data.Dataset:
    if env.is_reference:
        short = own_rows(0, Policy.AUTO)
        endless = own_rows(1, Policy.AUTO, 16) * num_steps
        return given(joined([short, endless[:num_steps]], how))
    dataset = common.batched(*data_of(env.rank, None if env.rank == 0 else 16))
    return dataset if env.rank == 0 else dataset.repeat()


def _per_replica(env: Env) -> tf.data.Dataset:
    """The same rows for the replicas of a worker as tfdp would cut them."""
    devices = env.setup.devices_per_worker
    num_rows = None if env.rank == 0 else 16
    parts = [
        tuple(np.array_split(part, devices)[index] for part in half)
        for half in own_rows(env.rank, Policy.AUTO, num_rows)
        for index in range(devices)
    ]
    shapes = [(None, *part.shape[1:]) for part in parts[0]]
    spec = tuple(tf.TensorSpec(shape, tf.float32) for shape in shapes)
    dataset = tf.data.Dataset.from_generator(lambda: iter(parts), output_signature=spec)
    known = tf.data.experimental.assert_cardinality(len(parts))
    dataset = dataset.apply(known)
    return dataset if env.rank == 0 else dataset.repeat()


@case(
    "Sharding by FILE, files of different sizes",
    compare=False,
    setups=("two_workers", "two_by_two"),
)
@same_as("stop_at_the_shortest_of_known_lengths")
def files_of_different_sizes(env: Env) -> dict:
    """The first worker reads 21 samples of two files, the second one 11 of one."""
    dataset = tf.data.TFRecordDataset(files_of(env, 3)).map(parse).batch(BATCH)
    results = {}
    for how in "stop", "join":
        with uneven(env, how):
            history = common.fit(counted_model(env), with_policy(dataset, Policy.FILE))
        # With "stop" three steps of four samples of the first worker.
        expected = np.ones(NUM)
        if how == "stop":
            expected[23:] = 0
        results[how] = history
        np.testing.assert_array_equal(history["seen"][0], expected, how)
    return results


@case(
    "`stop` with models that run eagerly, and with two devices",
    setups=("two_workers", "two_by_two"),
)
@same_as("stop_at_the_shortest_of_known_lengths")
def stop_eagerly(env: Env) -> dict:
    results = {}
    with uneven(env, "stop"):
        for policy in Policy.AUTO, Policy.OFF:
            data = of_one_device("stop", policy)
            if not env.is_reference:
                data = of_unknown_length(dataset_of(env, policy))
            results[policy.name] = train(env, data, run_eagerly=True)
    return results


class Interrupted(Exception):
    """Stands for a job that is stopped from outside."""


class Interrupt(keras.callbacks.Callback):
    """Raises on every worker after a number of steps, and notes all that there were."""

    def __init__(self, after: int | None = None):
        super().__init__()
        self.after = after
        self.seen: list[tuple[int, int]] = []
        self.epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append((self.epoch, batch))
        if len(self.seen) == self.after:
            raise Interrupted


@case(
    "`stop`: a run that is interrupted goes on within an epoch that ends early",
    compare=False,
    setups=("two_workers", "two_by_two"),
)
@same_as("checkpoints_at_one_path")
def backup_within_an_epoch_that_stops(env: Env) -> dict:
    """Workers shuffle data of their own by seeds of their own, in epochs of 6 steps."""

    def fit(*callbacks: keras.callbacks.Callback) -> dict:
        x, y = data_of(env.rank)
        rows = tf.data.Dataset.from_tensor_slices((x, y))
        dataset = rows.shuffle(64, seed=env.rank + 1).batch(BATCH)
        dataset = of_unknown_length(with_policy(dataset, Policy.OFF))
        return train(env, dataset, epochs=3, callbacks=list(callbacks))

    def backup() -> keras.callbacks.Callback:
        return tfdp.callbacks.BackupAndRestore(str(env.tmp / "backup"), save_freq=4)

    with uneven(env, "stop") as caught:
        whole, first, second = Interrupt(), Interrupt(after=9), Interrupt()
        expected = fit(whole)
        with contextlib.suppress(Interrupted):
            fit(backup(), first)
        assert len(first.seen) == 9
        env.wait_for_all("interrupted")
        results = fit(backup(), second)
        assert not [w for w in caught if "position in the data" in str(w.message)]
    assert len(whole.seen) == 3 * 2 * SHORTEST
    assert first.seen[:8] + second.seen == whole.seen
    for name, value in flatten_results(expected).items():
        np.testing.assert_array_equal(flatten_results(results)[name], value, name)
    return results
