"""Data that is wrong on one worker: one sentence on every worker, and no hang."""

from __future__ import annotations

import pathlib
import typing
import warnings

import keras
import numpy as np
import tensorflow as tf

from tests.data.cases_own_rows import build, sentence_of
from tests.data.cases_uneven import told, uneven
from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as

BATCH = common.BATCH_SIZE


def _of(x: np.ndarray, y: typing.Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, y)).map(lambda x, y: (x, y))


def _wrong_elements(env: Env) -> dict[str, tuple[tf.data.Dataset, str]]:
    x, y = common.regression_data(4 * BATCH)
    is_other = env.rank == 1
    fewer = x[:, : common.NUM_FEATURES - is_other]
    doubled = y.astype("float64") if is_other else y
    named = {"a": y} if is_other else y
    return {
        "features": (_of(fewer, y), "batch[0]/shape/1: 6 on worker 0, 5 on worker 1"),
        "dtype": (
            _of(x, doubled),
            "batch[1]/dtype: 'float32' on worker 0, 'float64' on worker 1",
        ),
        "structure": (_of(x, named), "nothing on worker 1"),
    }


@case(
    "Datasets of other elements on one worker: a hang",
    compare=False,
    setups=("two_workers", "two_by_two"),
)
@same_as("data_that_may_differ_between_workers")
def datasets_of_different_elements(env: Env) -> dict:
    off = tf.data.Options()
    off.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    for dataset, difference in _wrong_elements(env).values():
        for data in (dataset.batch(BATCH), dataset.batch(BATCH).with_options(off)):
            found = sentence_of(env, data)
            assert "Workers have datasets whose elements differ" in found, found
            assert difference in found, found
    # What is not known on one worker is no difference.
    x, y = common.regression_data(4 * BATCH)
    data = _of(x, y).batch(BATCH)
    if env.rank == 1:
        spec = (tf.TensorSpec([None, None]), tf.TensorSpec([None, 1]))
        data = tf.data.Dataset.from_generator(lambda: data_again, output_signature=spec)
        data_again = _of(x, y).batch(BATCH)
        data = data.apply(tf.data.experimental.assert_cardinality(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        common.train(env, build, data)
    return {}


@case(
    "A dataset that is shorter than a batch on one worker: a hang",
    compare=False,
    setups=("two_workers", "two_by_two"),
)
@same_as("stop_at_the_shortest_of_known_lengths")
def a_dataset_shorter_than_a_batch_on_one_worker(env: Env) -> dict:
    x, y = common.regression_data(3 * BATCH)
    own = 3 if env.rank == 1 else len(x)
    for drops in False, True:
        for how in "join", "stop":
            data = _of(x[:own], y[:own]).batch(BATCH, drop_remainder=drops)
            with uneven(env, how) as caught:
                model = common.build_in_scope(env, build)
                model.fit(data, verbose=0)
            sentence = "Workers have "
            assert told(caught, sentence), [str(w.message) for w in caught]
            weights = env.weights(model)
            assert all(np.isfinite(w).all() for w in weights.values())
    return {}


class StopAfter(keras.callbacks.Callback):
    """Stops training after some steps."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == 4


@case(
    "A dataset without an end and without `steps_per_epoch`: no word",
    compare=False,
    setups=("mirrored", "two_workers"),
)
@same_as("data_that_may_differ_between_workers")
def a_dataset_without_an_end(env: Env) -> dict:
    data = _of(*common.regression_data(2 * BATCH)).repeat().batch(BATCH)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        common.train(env, build, data, callbacks=[StopAfter()])
        common.train(env, build, data, steps_per_epoch=2)
    found = [str(w.message) for w in caught]
    found = [text for text in found if "never ends" in text]
    assert len(found) == (env.rank == 0 and not env.is_reference), found
    return {}


class Augmented(keras.utils.PyDataset):
    """Batches whose rows are augmented at random, on each worker by itself."""

    def __init__(self, rank: int, *arrays: np.ndarray) -> None:
        super().__init__()
        self.arrays = arrays
        self.random = np.random.RandomState(rank)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple:
        rows = slice(BATCH * index, BATCH * index + BATCH)
        x, y = (array[rows] for array in self.arrays)
        return x + self.random.normal(size=x.shape).astype("float32"), y


def _lines(folder: pathlib.Path) -> tf.data.Dataset:
    """A dataset of files that each worker has in a folder of its own."""
    folder.mkdir(exist_ok=True)
    paths = [folder / "a.txt", folder / "b.txt"]
    for path in paths:
        path.write_text("1\n2\n3\n4\n")
    lines = tf.data.TextLineDataset([str(path) for path in paths])
    ones = tf.ones([common.NUM_FEATURES])
    return lines.map(lambda line: (tf.strings.to_number(line) * ones, [1.0]))


def _fit_quietly(env: Env, model: keras.Model, *datasets: typing.Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each worker prepares all rows
        for data in datasets:
            common.fit(model, data)
            assert all(np.isfinite(w).all() for w in env.weights(model).values())


@case(
    "Data that differs between workers by rounding: an error",
    compare=False,
    setups=("two_workers", "two_by_two"),
)
def data_that_may_differ_between_workers(env: Env) -> dict:
    x, y = common.regression_data(2 * BATCH)
    rounded = x * np.float32(1 + 1e-6 * env.rank)
    model = common.build_in_scope(env, build)
    _fit_quietly(env, model, Augmented(env.rank, x, (y > 0).astype("float32")))
    common.fit(model, rounded, y)
    # Nor is an error spared by this.
    assert "in another order" in sentence_of(env, x[:: 1 - 2 * env.rank], y=y)
    return {}


@case(
    "Data that differs between workers on purpose: an error",
    compare=False,
    setups=("two_workers", "two_by_two"),
)
@same_as("data_that_may_differ_between_workers")
def data_that_differs_between_workers_on_purpose(env: Env) -> dict:
    x, y = common.regression_data(2 * BATCH)
    rounded = x * np.float32(1 + 1e-6 * env.rank)
    own = common.regression_data(2 * BATCH, seed=env.rank)
    augmented = Augmented(env.rank, x, (y > 0).astype("float32"))
    random = np.random.RandomState(env.rank)
    off = tf.data.Options()
    off.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )

    def noisy(x: tf.Tensor, y: tf.Tensor) -> tuple:
        noise = tf.numpy_function(lambda: random.normal(), [], tf.float64)
        return x + tf.cast(tf.ensure_shape(noise, []), tf.float32), y

    model = common.build_in_scope(env, build)
    _fit_quietly(
        env,
        model,
        _of(*own).batch(BATCH).with_options(off),
        _of(x, y).map(noisy).batch(BATCH),
        (augmented[index] for index in range(2)),
        _lines(env.tmp / f"of{env.rank}").batch(BATCH),
    )
    common.fit(model, rounded, y, validation_data=(rounded, y))
    model.evaluate(rounded, y, verbose=0)
    model.predict(rounded, verbose=0)
    model.train_on_batch(rounded[:BATCH], y[:BATCH])
    return {}
