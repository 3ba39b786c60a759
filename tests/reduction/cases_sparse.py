"""Sparse gradients: the rows of all replicas, in the form that moves fewer bytes."""

from __future__ import annotations

import functools
import typing

import keras
import numpy as np
import tensorflow as tf

from tests.collectives.cases_primitives import each_replica, new_group
from tests.exactness.cases_exactness import precision
from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import ALL, case, same_as
from tfdp.communication.collectives.timing import Recorder
from tfdp.training.reduction.sparse import reduce_indexed_slices

SETUPS = (*ALL, "three_devices")
WIDTH = 3
sparse_case = functools.partial(case, setups=SETUPS, compare=False)

Rows = typing.Callable[[int], list[int]]


def values_of(rank: int, num_rows: int, dtype: str = "float32") -> np.ndarray:
    """Small whole numbers: their sums are exact in every dtype."""
    rng = np.random.default_rng(rank)
    return rng.integers(-9, 10, (num_rows, WIDTH)).astype(
        tf.as_dtype(dtype).as_numpy_dtype
    )


def table_of(env: Env, rows: Rows, height: int) -> np.ndarray:
    """The dense sum over all replicas, by NumPy."""
    table = np.zeros((height, WIDTH))
    for rank in range(env.num_replicas):
        np.add.at(table, rows(rank), values_of(rank, len(rows(rank))))
    return table


def reduced(
    env: Env,
    rows: Rows,
    height: int | None,
    *,
    may_sum: bool,
    dtype: str = "float32",
    index_dtype: str = "int64",
) -> tuple[list[tuple[np.ndarray, np.ndarray]], set[str]]:
    """Local results as (indices, values), and what collectives have run."""
    group = new_group(env)

    def work(replica, rank):
        values = values_of(rank, len(rows(rank)), dtype)
        # Of unknown length, as the gradients of an Embedding are.
        unknown = tf.TensorShape([None, WIDTH])
        slices = tf.IndexedSlices(
            tf.compat.v1.placeholder_with_default(tf.constant(values), unknown),
            tf.compat.v1.placeholder_with_default(
                tf.constant(rows(rank), index_dtype), [None]
            ),
            None if height is None else tf.constant([height, WIDTH]),
        )
        result = reduce_indexed_slices(slices, group, replica, may_sum=may_sum)
        assert result.values.shape.as_list() == [None, WIDTH]
        return result.indices, result.values

    with Recorder() as recorder:
        step = tf.function(lambda: each_replica(env, work), autograph=False)
        results = [(i.numpy(), v.numpy()) for i, v in step()]
    own = [c for c in recorder.collectives if c.replica == 0]
    run = {c.kind for c in own if c.values.numpy()[0] > 0}  # it has begun
    return results, run


def check(env: Env, rows: Rows, height: int, results: list, **wanted: str) -> None:
    """Every local replica has the dense sum, on rows that were touched."""
    touched = {row for rank in range(env.num_replicas) for row in rows(rank)}
    expected = table_of(env, rows, height)
    for indices, values in results:
        assert indices.dtype == wanted.get("index_dtype", "int64")
        assert values.dtype == wanted.get("dtype", "float32")
        assert set(indices.tolist()) == touched
        table = np.zeros((height, WIDTH))
        np.add.at(table, indices, values)
        np.testing.assert_array_equal(table, expected)


def few(rank: int) -> list[int]:
    """Few rows of a large table, two of them on every replica, one twice."""
    return [5, 90 + rank, 5, 7]


def most(rank: int) -> list[int]:
    """All rows of a small table, shifted."""
    return [(row + rank) % 6 for row in range(6)]


@sparse_case(
    "sparse: few rows of a large table are gathered", quick_setup="three_devices"
)
def few_rows_are_gathered(env: Env) -> dict:
    for may_sum in (True, False):
        results, run = reduced(env, few, 100, may_sum=may_sum)
        check(env, few, 100, results)
        assert run == {"all_gather"}
        # What a replica touched twice travels once, or as it is.
        times = env.num_replicas * (1 if may_sum else 2)
        for indices, _ in results:
            assert np.count_nonzero(indices == 5) == times
    return {}


@sparse_case(
    "sparse: most rows of a small table travel as the table",
    quick_setup="three_devices",
)
@same_as("embedding_with_adam")
def most_rows_travel_as_the_table(env: Env) -> dict:
    # Two replicas move as much either way: then rows are gathered.
    rows = functools.partial(lambda rank: most(rank)[: 5 if rank else 6])
    results, run = reduced(env, rows, 6, may_sum=True)
    check(env, rows, 6, results)
    is_dense = env.num_replicas > 2
    assert run == ({"all_gather", "all_reduce"} if is_dense else {"all_gather"})
    for indices, _ in results if is_dense else []:
        assert len(set(indices.tolist())) == len(indices), "each row once"
    return {}


@sparse_case("sparse: rows are kept apart where the optimizer is not linear")
@same_as("few_rows_are_gathered")
def rows_are_kept_apart_for_optimizers_that_square(env: Env) -> dict:
    results, run = reduced(env, most, 6, may_sum=False)
    check(env, most, 6, results)
    assert run == {"all_gather"}
    expected = [most(rank) for rank in range(env.num_replicas)]
    for indices, values in results:
        assert sorted(indices) == sorted(np.concatenate(expected))
        assert len(values) == len(indices)
    results, _ = reduced(env, few, 100, may_sum=False)
    for indices, _ in results:
        assert np.count_nonzero(indices == 5) == 2 * env.num_replicas
    return {}


@sparse_case("sparse: a row that a replica touched twice travels once")
@same_as("few_rows_are_gathered")
def duplicates_are_summed_before_they_travel(env: Env) -> dict:
    results, _ = reduced(env, few, 100, may_sum=True)
    for indices, _ in results:
        assert np.count_nonzero(indices == 5) == env.num_replicas
    # Twelve times the same row: summed it is one, and one row is gathered.
    rows: Rows = lambda rank: [3] * 12  # noqa: E731
    results, run = reduced(env, rows, 6, may_sum=True)
    check(env, rows, 6, results)
    assert run == {"all_gather"}
    return {}


@sparse_case("sparse: replicas that touched no row, some or all")
@same_as("few_rows_are_gathered")
def replicas_without_rows(env: Env) -> dict:
    last = env.num_replicas - 1
    cases: list[Rows] = [
        lambda rank: [] if rank == last else [1, 4],
        lambda rank: [2, 2] if rank == last else [],
        lambda rank: [],
    ]
    for rows in cases:
        for may_sum in (True, False):
            for height in (6, 100):
                results, _ = reduced(env, rows, height, may_sum=may_sum)
                check(env, rows, height, results)
    return {}


@sparse_case("sparse: every dtype of values and indices, in both forms")
@same_as("embedding_with_adam")
def sparse_dtypes(env: Env) -> dict:
    for dtype, index_dtype in [
        ("float16", "int32"),
        ("float32", "int32"),
        ("float64", "int64"),
        ("bfloat16", "int64"),
    ]:
        types = {"dtype": dtype, "index_dtype": index_dtype}
        for rows, height in [(few, 100), (most, 6)]:
            results, _ = reduced(env, rows, height, may_sum=True, **types)
            check(env, rows, height, results, **types)
    return {}


@sparse_case("sparse: slices that do not say how large their table is")
@same_as("embedding_with_adam")
def slices_without_a_dense_shape(env: Env) -> dict:
    for may_sum in (True, False):
        results, run = reduced(env, most, None, may_sum=may_sum)
        check(env, most, 6, results)
        assert run == {"all_gather"}
    return {}


def embedding_model(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    """Token 0 and others occur several times in a batch, some never."""
    model = keras.Sequential(
        [
            keras.Input((common.LENGTH,), dtype="int32"),
            keras.layers.Embedding(40, 4, name="embedding"),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )
    return common.compiled(model, optimizer)


@case("sparse: an Embedding trained with Adam equals one device")
def embedding_with_adam(env: Env) -> dict:
    return common.train(
        env, lambda: embedding_model(keras.optimizers.Adam(0.01)), *common.token_data()
    )


@case("sparse: an Embedding trained with SGD equals one device")
@same_as("embedding_with_adam")
def embedding_with_sgd(env: Env) -> dict:
    """SGD is linear, so that rows are summed before they travel."""
    with env.scope():
        model = embedding_model(keras.optimizers.SGD(0.5))
        before = env.weights(model)
    x, y = common.token_data()
    history = common.fit(model, x, y)
    after = env.weights(model)
    (path,) = [path for path in after if "embedding" in path]
    changed = np.any(after[path] != before[path], axis=1)
    assert set(np.flatnonzero(changed)) <= set(np.unique(x)), "only rows touched"
    assert changed.any()
    return {"history": history, "weights": after}


class Positions(keras.layers.Layer):
    """Adds what depends on the place of a token, in every way that there is."""

    def __init__(self) -> None:
        super().__init__()
        kinds = "static", "dynamic", "captured", "tiled", "first"
        self.tables = {
            kind: keras.layers.Embedding(160, 4, name=kind) for kind in kinds
        }
        for table in self.tables.values():
            table.build(None)
        # Too long for TensorFlow to put it into the graph as a constant.
        self.places = tf.range(150)

    def call(self, inputs: typing.Any) -> typing.Any:
        shape = tf.shape(inputs)
        places = {
            "static": keras.ops.arange(common.LENGTH)[None],
            "dynamic": tf.range(shape[1]),
            # On one device as many rows as there are tokens, or samples.
            "tiled": tf.tile(tf.range(shape[1])[None], [shape[0], 1]),
            "first": tf.zeros([shape[0], 1], tf.int32),
        }
        captured = self.tables["captured"](self.places)[: common.LENGTH]
        found = [self.tables[kind](place) for kind, place in places.items()]
        return inputs + captured + tf.add_n([f + tf.zeros_like(inputs) for f in found])


def positional() -> tuple:
    """Tokens and their places: rows that come once, and rows that come often."""
    inputs = keras.Input((None,), dtype="int32")
    h = Positions()(keras.layers.Embedding(common.NUM_TOKENS, 4)(inputs))
    h = keras.layers.Dense(4, activation="tanh")(h)
    h = keras.layers.GlobalAveragePooling1D()(h)
    return keras.Model(inputs, keras.layers.Dense(1)(h)), common.tokens(17)


def of_features() -> tuple:
    """Sparse features, none at all in some samples."""
    inputs = keras.Input((20,), sparse=True)
    h = keras.layers.Dense(4, activation="tanh")(inputs)
    x = np.random.default_rng(0).normal(size=(17, 20))
    x[np.random.default_rng(1).random(x.shape) < 0.8] = 0
    x[3] = 0
    return keras.Model(inputs, keras.layers.Dense(1)(h)), x


def rows_that_come_once(env: Env, dtype: str) -> dict:
    """History and weights, with optimizers that look at each row by itself."""
    results = {}
    y = common.targets(common.features(17)).astype(dtype)
    pairs = [(positional, keras.optimizers.Lamb), (of_features, keras.optimizers.Adam)]
    for build, kind in pairs:
        with precision(dtype), env.scope():
            model, x = build()
            common.compiled(model, kind(0.01))
            if build is of_features:
                x = tf.sparse.from_dense(x.astype(dtype))
            # The last of three batches leaves one replica without samples.
            history = common.fit(model, x, y, epochs=2)
        results[build.__name__] = {"history": history, "weights": env.weights(model)}
    return results


@case("sparse: rows that one device has once are added up")
@same_as("embedding_with_adam")
def rows_that_one_device_has_once(env: Env) -> dict:
    return rows_that_come_once(env, "float32")


@case(
    "sparse: rows that one device has once are added up, float64",
    tol=1e-9,
    skip={"*/history/*": "metrics are float32"},
)
@same_as("embedding_with_adam")
def rows_that_one_device_has_once_in_float64(env: Env) -> dict:
    return rows_that_come_once(env, "float64")
