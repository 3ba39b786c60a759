"""Which worker reads which sample: each one once an epoch."""

from __future__ import annotations

import hashlib
import random

import keras
import numpy as np
import tensorflow as tf

from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as
from tfdp.checkpoint.random_state import random_states, set_random_states
from tfdp.ground._compat import random_seeds
from tfdp.training.replicas import random_seed

Policy = tf.data.experimental.AutoShardPolicy
NUM = 32


class TimesSeen(keras.metrics.Metric):
    """Counts how often each sample, named by its label, was seen."""

    def __init__(self, name="seen", **options):
        super().__init__(name=name, **options)
        self.seen = self.add_variable((NUM,), "zeros", name="seen")

    def update_state(self, y_true, y_pred, sample_weight=None):
        ids = keras.ops.cast(keras.ops.reshape(y_true, (-1,)), "int32")
        self.seen.assign_add(keras.ops.sum(keras.ops.one_hot(ids, NUM), axis=0))

    def result(self):
        return self.seen + 0.0


def counted_model(env: Env) -> keras.Model:
    with env.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        return common.compiled(model, keras.optimizers.SGD(1e-6), metrics=[TimesSeen()])


def _ids() -> np.ndarray:
    return np.arange(NUM, dtype="float32")[:, None]


class Seen(keras.callbacks.Callback):
    """Keeps the samples that were seen up to each batch."""

    def __init__(self):
        super().__init__()
        self.batches: list[np.ndarray] = []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(keras.ops.convert_to_numpy(logs["seen"]))


def _assert_each_once(history: dict) -> None:
    for epoch, seen in enumerate(history["seen"]):
        np.testing.assert_array_equal(seen, np.ones(NUM), f"epoch {epoch}")


def with_policy(dataset: tf.data.Dataset, policy: Policy) -> tf.data.Dataset:
    """Returns the dataset with an auto-shard policy."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


@case("`shuffle=True`, `Dataset.shuffle` with one seed: the batches of one device")
def shuffled_data_gives_the_batches_of_one_device(env: Env) -> dict:
    seen = Seen()
    common.fit(counted_model(env), _ids(), _ids(), shuffle=True, callbacks=[seen])
    dataset = tf.data.Dataset.from_tensor_slices((_ids(), _ids()))
    dataset = dataset.shuffle(NUM, seed=3).batch(common.BATCH_SIZE)
    common.fit(counted_model(env), dataset, epochs=2, callbacks=[seen])
    return {"seen": seen.batches}


@case(
    "`shuffle=True`, `Dataset.shuffle` without a seed on any worker: shards overlap",
    compare=False,
    fresh=True,
    quick_setup="two_workers",
)
def shuffling_without_seeds_gives_each_sample_once(env: Env) -> dict:
    arrays = common.fit(counted_model(env), _ids(), _ids(), shuffle=True, epochs=2)
    _assert_each_once(arrays)
    dataset = tf.data.Dataset.from_tensor_slices((_ids(), _ids()))
    dataset = dataset.shuffle(NUM).batch(common.BATCH_SIZE)
    shuffled = common.fit(counted_model(env), dataset, epochs=2)
    _assert_each_once(shuffled)
    return {"arrays": arrays, "dataset": shuffled}


def _orders(dataset: tf.data.Dataset) -> list[list[int]]:
    """The order in which samples come, in two epochs."""
    return [[int(row) for row in dataset.as_numpy_iterator()] for _ in range(2)]


@case(
    "Operations with seeds, no global seed set: the numbers of one device",
    compare=False,
    fresh=True,
    # One process needs no seed in place of a global one.
    setups=("two_workers", "two_by_two"),
)
@same_as("shuffled_data_gives_the_batches_of_one_device")
def seeds_of_operations_give_the_numbers_of_one_device(env: Env) -> dict:
    ids = tf.data.Dataset.range(NUM)

    def seeded() -> list:
        noise = ids.take(3).map(lambda _: 1e6 * tf.random.uniform([], seed=2))
        again = ids.shuffle(NUM, seed=1, reshuffle_each_iteration=False)
        return [_orders(d) for d in (ids.shuffle(NUM, seed=1), again, noise)]

    found, (first, second) = seeded(), _orders(ids.shuffle(NUM))
    assert first != second
    data = tf.data.Dataset.from_tensor_slices((_ids(), _ids()))
    seen = Seen()
    model = counted_model(env)
    data = data.shuffle(NUM, seed=1).batch(common.BATCH_SIZE)
    common.fit(model, data, callbacks=[seen])
    state = random_states()
    before = random_seeds.tensorflow_random_state()
    random_seeds.set_tensorflow_random_state(
        {"seed": None, "rng": None, "generator": None}
    )
    expected = seeded()
    assert found == expected, "the order of one device"
    batch = expected[0][0][: common.BATCH_SIZE]
    np.testing.assert_array_equal(np.flatnonzero(seen.batches[0]), sorted(batch))
    # As in another process, with a seed of its own, that goes on with this run.
    random_seed.set_stand_in_seed(before["seed"] + 1)
    set_random_states(state)
    assert seeded() == expected
    return {
        "unseeded": np.array([first, second, *_orders(ids.shuffle(NUM))]),
        "weights": env.weights(model),
        "dropout": keras.layers.Dropout(0.5)(tf.ones((1, NUM)), training=True),
    }


@case(
    "Generators that the user has seeded, each by itself",
    compare=False,
    quick_setup="two_workers",
)
def generators_seeded_by_the_user_stay_as_they_are(env: Env) -> dict:
    random.seed(env.rank)
    np.random.seed(5)
    random_seed.agree_on_seed(env.strategy)
    drawn = np.random.random(3)
    np.testing.assert_array_equal(drawn, np.random.RandomState(5).random(3))
    return {"python": random.random(), "keras": keras.random.uniform((2,))}


@case(
    "`shuffle=True` with another seed on each worker: shards overlap",
    compare=False,
)
@same_as("shuffling_without_seeds_gives_each_sample_once")
def shuffled_arrays_of_other_seeds_give_each_sample_once(env: Env) -> dict:
    keras.utils.set_random_seed(100 + env.rank)
    history = common.fit(counted_model(env), _ids(), _ids(), shuffle=True, epochs=2)
    _assert_each_once(history)
    return history


def files_of(env: Env, count: int) -> list[str]:
    """Writes the samples to files; every worker asks for the same ones."""
    paths = [str(env.tmp / f"{index}.tfrecord") for index in range(count)]
    if env.is_chief:
        for path, rows in zip(paths, np.array_split(_ids(), count), strict=True):
            with tf.io.TFRecordWriter(path) as writer:
                for row in rows:
                    writer.write(tf.io.serialize_tensor(row).numpy())
    env.wait_for_all(f"files{count}")
    return paths


def parse(record: tf.Tensor) -> tuple:
    row = tf.ensure_shape(tf.io.parse_tensor(record, tf.float32), (1,))
    return row, row


@case("FILE sharding with fewer files than workers crashes")
@same_as("a_file_per_worker")
def one_file_for_all_workers(env: Env) -> dict:
    results = {}
    for policy in Policy.FILE, Policy.AUTO:
        dataset = tf.data.TFRecordDataset(files_of(env, 1)).map(parse)
        dataset = with_policy(dataset.batch(common.BATCH_SIZE), policy)
        results[policy.name] = common.fit(counted_model(env), dataset)
        _assert_each_once(results[policy.name])
    return results


@case("FILE sharding with a file per worker", compare=False)
def a_file_per_worker(env: Env) -> dict:
    prepared = tf.Variable(0)

    def note(*rows: tf.Tensor) -> tuple:
        prepared.assign_add(1)
        return rows

    dataset = tf.data.TFRecordDataset(files_of(env, 2)).shuffle(9, seed=1)
    dataset = dataset.map(parse).map(note).batch(common.BATCH_SIZE)
    history = common.fit(counted_model(env), with_policy(dataset, Policy.FILE))
    _assert_each_once(history)
    # None twice, to see whether there are files enough.
    assert int(prepared) == NUM // env.setup.num_workers
    return history


@case(
    "Sharding OFF and the same data everywhere: half of it unread",
    compare=False,
)
@same_as("stop_at_the_shortest_of_known_lengths")
def sharding_off_with_the_same_data_everywhere(env: Env) -> dict:
    """Each worker reads all that it was given: no row is left out."""
    dataset = with_policy(common.batched(_ids(), _ids()), Policy.OFF)
    history = common.fit(counted_model(env), dataset)
    for seen in history["seen"]:
        np.testing.assert_array_equal(seen, np.full(NUM, env.setup.num_workers))
    return history


@case(
    "Sharding OFF and data of its own on each worker; `predict` too",
    compare=False,
)
@same_as("stop_at_the_shortest_of_known_lengths")
def sharding_off_with_own_data_on_each_worker(env: Env) -> dict:
    rows = _ids()[env.rank :: env.setup.num_workers]
    dataset = with_policy(common.batched(rows, rows), Policy.OFF)
    history = common.fit(counted_model(env), dataset)
    _assert_each_once(history)
    with env.scope():
        inputs = keras.Input((1,))
        identity = keras.Model(inputs, keras.layers.Identity()(inputs))
    rows = np.arange(101, dtype="float32")[env.rank :: env.setup.num_workers, None]
    dataset = with_policy(common.batched(rows), Policy.OFF)
    predicted = identity.predict(dataset, verbose=0)
    np.testing.assert_array_equal(np.sort(predicted.ravel()), np.arange(101))
    return {"history": history, "predict": predicted}


@case(
    "`map` before `batch`: each worker prepares its own rows only",
)
@same_as("py_dataset")
def each_worker_prepares_its_own_rows(env: Env) -> dict:
    calls = []

    def scale(x: np.ndarray) -> np.ndarray:
        calls.append(x)
        return x * np.float32(0.5)

    def prepare(x: tf.Tensor, y: tf.Tensor) -> tuple:
        scaled = tf.numpy_function(scale, [x], tf.float32, stateful=False)
        return tf.ensure_shape(scaled, x.shape), y

    model = common.build_in_scope(env, lambda: common.compiled(common.mlp()))
    data = tf.data.Dataset.from_tensor_slices(common.regression_data(20))
    data = data.shuffle(20, seed=1).map(prepare).batch(common.BATCH_SIZE)
    history = common.fit(model, data, epochs=2)
    # Each worker has as many rows of batches of 8, 8 and 4.
    assert len(calls) == 2 * 20 // env.setup.num_workers
    return {
        "history": history,
        "weights": env.weights(model),
        "predict": model.predict(data, verbose=0),
    }


def _augment(index: tf.Tensor, epoch: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Turns a sample and drops a part of it at random, in each epoch otherwise."""
    for_turn, for_part = tf.unstack(tf.random.split(tf.stack([index, epoch]), 2))
    turn = tf.random.stateless_uniform([], for_turn, maxval=len(x), dtype=tf.int32)
    kept = tf.random.stateless_uniform(tf.shape(x), for_part) < 0.8
    return tf.where(kept, tf.roll(x, turn, 0), 0.0)


@case("Augmentation seeded by index and epoch: on each step the samples of one device")
def augmented_samples_are_those_of_one_device(env: Env) -> dict:
    num, epochs = 21, 2

    def prepare(place: tf.Tensor, row: tuple) -> tuple:
        index, (x, y) = row
        return _augment(index, place // num, x), y

    rows = tf.data.Dataset.from_tensor_slices(common.regression_data(num)).enumerate()
    rows = rows.shuffle(num, seed=1).repeat(epochs).enumerate()
    data = rows.map(prepare).batch(common.BATCH_SIZE)
    with env.scope():
        inputs = keras.Input((common.NUM_FEATURES,))
        identity = keras.Model(inputs, keras.layers.Identity()(inputs))
    samples = identity.predict(data, verbose=0)
    assert len(samples) == epochs * num
    model = common.build_in_scope(env, lambda: common.compiled(common.mlp()))
    history = common.fit(model, data)
    # Bit by bit: the same samples, in the same steps.
    digest = hashlib.sha256(np.ascontiguousarray(samples).tobytes()).digest()
    return {
        "samples": np.frombuffer(digest, "uint8").astype("float32"),
        "history": history,
        "weights": env.weights(model),
    }


@case("Datasets already distributed")
@same_as("dataset_distributed_from_a_function")
def dataset_already_distributed(env: Env) -> dict:
    model = common.build_in_scope(
        env, lambda: common.compiled(common.mlp(), metrics=["mae"])
    )
    dataset = common.batched(*common.regression_data(NUM))
    dataset = env.distribution.experimental_distribute_dataset(dataset)
    return {
        "history": common.fit(model, dataset),
        "weights": env.weights(model),
        "evaluate": model.evaluate(dataset, verbose=0),
    }


@case("Datasets already distributed, from a function")
def dataset_distributed_from_a_function(env: Env) -> dict:
    model = common.build_in_scope(
        env, lambda: common.compiled(common.mlp(), metrics=["mae"])
    )

    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
        size = context.get_per_replica_batch_size(common.BATCH_SIZE)
        x, y = common.regression_data(NUM)
        # The part of each global batch that this worker reads.
        parts = context.num_input_pipelines
        index = context.input_pipeline_id
        rows = np.arange(NUM).reshape(-1, parts, common.BATCH_SIZE // parts)
        rows = rows[:, index].ravel()
        return common.batched(x[rows], y[rows], batch_size=size)

    dataset = env.distribution.distribute_datasets_from_function(make)
    history = common.fit(model, dataset)
    return {"history": history, "weights": env.weights(model)}
