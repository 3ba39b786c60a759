"""Structures of data: tuples, dicts and `None` reach a step as they were given."""

from __future__ import annotations

import collections
import itertools
import typing

import keras
import numpy as np
import tensorflow as tf

from tests.data.cases_balance import rebalanced
from tests.data.cases_distribute import Policy, with_policy
from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as

layers = keras.layers
Pair = collections.namedtuple("Pair", ["left", "right"])
# Two batches of four and one of three: no number of replicas divides all.
NUM_SAMPLES, BATCH = 11, 4


def _described(data: typing.Any) -> typing.Any:
    """A structure as one that can be compared, with its kinds of containers."""
    if isinstance(data, dict):
        return {key: _described(part) for key, part in data.items()}
    if isinstance(data, (tuple, list)):
        return [type(data).__name__, *(_described(part) for part in data)]
    return None if data is None else "array"


class Sums(keras.Model):
    """Adds up a Dense layer of each leaf; notes which structures it was given."""

    def __init__(self, num_leaves: int):
        super().__init__()
        self.parts = [layers.Dense(1) for _ in range(num_leaves)]
        self.seen: list = []

    def call(self, inputs):
        self.seen.append(_described(inputs))
        leaves = [x for x in keras.tree.flatten(inputs) if x is not None]
        pairs = enumerate(zip(self.parts, leaves, strict=True), start=1)
        total = sum(weight * part(leaf) for weight, (part, leaf) in pairs)
        self.add_loss(tf.reduce_mean(tf.square(total)))
        return {"sum": total, "parts": (total, [leaves[0], (-total,)])}


def _arrays() -> tuple[np.ndarray, np.ndarray]:
    x = common.features(NUM_SAMPLES)
    return x[:, :3], x[:, 3:5]


def _batches(data: typing.Any) -> typing.Iterator:
    for start in range(0, NUM_SAMPLES, BATCH):
        rows = slice(start, start + BATCH)
        yield keras.tree.map_structure(
            lambda x, rows=rows: None if x is None else x[rows], data
        )


class Items(keras.utils.PyDataset):
    """Batches of a structure of arrays."""

    def __init__(self, data: typing.Any):
        super().__init__()
        self.batches = list(_batches(data))

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def _sums(env: Env, num_leaves: int) -> Sums:
    with env.scope():
        model = Sums(num_leaves)
        model.compile(keras.optimizers.SGD(0.01))
    return model


def _named(found: dict) -> dict:
    """The leaves of the results by their place, which tells the structure too."""
    paths = keras.tree.flatten_with_path(found)
    return {" ".join(map(str, path)): leaf for path, leaf in paths}


@case("Several inputs without targets: one input arrived (arrays, all loops)")
@same_as("dict_inputs")
def structures_of_arrays(env: Env) -> dict:
    a, b = _arrays()
    x = [{"k": Pair(a, None)}, (b,)]
    batch = next(_batches(x))
    model = _sums(env, 2)
    options = {"batch_size": BATCH, "verbose": 0}
    found = {
        "history": model.fit(x, shuffle=False, **options).history,
        "evaluate": model.evaluate(x, **options),
        "predict": model.predict(x, **options),
        "train_on_batch": model.train_on_batch(batch),
        "test_on_batch": model.test_on_batch(batch),
        "predict_on_batch": model.predict_on_batch(batch),
    }
    # Keras makes tuples of lists where TensorFlow holds the arrays.
    kinds = [_described(x), _described(keras.tree.lists_to_tuples(x))]
    assert all(seen in kinds for seen in model.seen), model.seen
    return {**_named(found), "weights": env.weights(model)}


def _of_two_inputs(env: Env) -> keras.Model:
    with env.scope():
        inputs = [keras.Input((3,)), keras.Input((2,))]
        outputs = layers.Dense(1)(layers.Concatenate()(inputs))
        outputs = layers.ActivityRegularization(l2=0.1)(outputs)
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.01))
    return model


@case("Several inputs without targets: one input arrived (batches)")
@same_as("dict_inputs")
def structures_of_batches(env: Env) -> dict:
    a, b = _arrays()
    functional, sums = _of_two_inputs(env), _sums(env, 1)
    data = tf.data.Dataset.from_tensor_slices(((a, b),)).batch(BATCH)
    without, one = ((a, None),), ({"k": (a,)},)
    found = {
        "dataset": functional.fit(data, verbose=0).history,
        "list": functional.predict([a, b], verbose=0),
        "generator": sums.fit(_batches(without), verbose=0).history,
        "items": sums.predict(Items(one), verbose=0),
    }
    kinds = [_described(without[0]), _described(one[0])]
    assert all(seen in kinds for seen in sums.seen), sums.seen
    weights = {"functional": env.weights(functional), "sums": env.weights(sums)}
    return {**_named(found), "weights": weights}


def _elements(count: int) -> list:
    """Elements of datasets: each a batch of so many rows."""
    a = np.arange(3.0 * count).reshape(count, 3)
    b = np.arange(count)
    ragged = tf.RaggedTensor.from_row_lengths(np.arange(2 * count), [2] * count)
    sparse = tf.sparse.from_dense(a)
    kinds = {"named": Pair(a, (b,)), "ragged": ragged, "sparse": (sparse,)}
    return [a, {"k": (a,), "n": None}, ((kinds, None, np.float32(3)),)]


def _share(element: typing.Any, rank: int, num_replicas: int) -> typing.Any:
    """The rows of a replica, in NumPy."""

    def take(leaf: typing.Any) -> typing.Any:
        if leaf is None or not np.ndim(_dense(leaf)):
            return leaf
        return np.array_split(_dense(leaf), num_replicas)[rank]

    return tf.nest.map_structure(take, element)


def _dense(leaf: typing.Any) -> np.ndarray:
    if isinstance(leaf, tf.SparseTensor):
        return tf.sparse.to_dense(leaf).numpy()
    return np.asarray(leaf.to_tensor() if isinstance(leaf, tf.RaggedTensor) else leaf)


def _received(env: Env, element: typing.Any) -> dict[int, typing.Any]:
    """What each local replica is given of an element, by its rank."""
    seen = {}

    def note(own: typing.Any) -> None:
        context = tf.distribute.get_replica_context()
        seen[int(context.replica_id_in_sync_group)] = own

    env.strategy.run(note, args=(element,))
    return seen


def _assert_shares(env: Env, element: typing.Any, expected: typing.Callable) -> None:
    for rank, own in _received(env, element).items():
        wanted = expected(rank)
        tf.nest.assert_same_structure(own, wanted)
        for leaf, values in zip(
            tf.nest.flatten(own), tf.nest.flatten(wanted), strict=True
        ):
            if values is None:
                continue
            if np.size(values):
                np.testing.assert_array_equal(_dense(leaf), values)
            else:  # of a ragged tensor without rows nobody knows the columns
                assert _dense(leaf).shape[0] == 0


def _read_in_a_graph(data: typing.Any) -> typing.Any:
    """The first element as a loop of several steps takes it."""
    read = tf.function(lambda iterator: iterator.get_next_as_optional())
    return read(iter(data)).get_value()


@case("Structures through every way in which data is divided", compare=False)
@same_as("dict_inputs")
def structures_of_elements(env: Env) -> dict:
    if env.is_reference:
        return {}
    strategy, replicas = env.strategy, env.num_replicas
    for element in _elements(5):
        dataset = tf.data.Dataset.from_tensors(element).repeat(2)
        local = strategy.experimental_distribute_dataset(dataset)
        options = tf.distribute.InputOptions()
        by_stock = strategy.experimental_distribute_dataset(dataset, options)

        def expected(rank: int, element: typing.Any = element) -> typing.Any:
            return _share(element, rank, replicas)

        for found in (*local, next(iter(by_stock)), _read_in_a_graph(local)):
            _assert_shares(env, found, expected)
        if env.setup.is_multi_worker:
            _check_several_workers(env, element, dataset)
    return {}


def _check_several_workers(
    env: Env, element: typing.Any, dataset: tf.data.Dataset
) -> None:
    """Whole batches divided by weight, sharding OFF, and data that ends at one."""
    from tfdp.training.data.per_replica_dataset import ReadOptions

    strategy, replicas = env.strategy, env.num_replicas
    local = strategy.experimental_distribute_dataset(dataset)
    with rebalanced(env):
        by_weight = local.with_read_options(
            ReadOptions(syncs_end_of_data=False, by_weight=True)
        )
        for found in (next(iter(by_weight)), _read_in_a_graph(by_weight)):
            _assert_shares(env, found, lambda rank: _share(element, rank, replicas))
    off = strategy.experimental_distribute_dataset(with_policy(dataset, Policy.OFF))
    steps = itertools.islice(off, replicas)
    local_steps = range(0, replicas, strategy.extended.num_local)
    for step, found in zip(local_steps, steps, strict=False):
        first = strategy.extended.first_rank
        _assert_shares(
            env,
            found,
            lambda rank, step=step, first=first: _share(
                element, step + rank - first, replicas
            ),
        )
    # The first worker has one batch more than the others, and nobody knows.
    longer = dataset.take(2 if env.is_chief else 1).filter(lambda *_: True)
    _, second = strategy.experimental_distribute_dataset(longer)

    def nothing(leaf: typing.Any) -> typing.Any:
        if leaf is None:
            return None
        return leaf[:0] if np.ndim(leaf) else np.zeros_like(leaf)

    if not env.is_chief:
        empty = tf.nest.map_structure(nothing, _share(element, 0, replicas))
        _assert_shares(env, second, lambda rank: empty)
