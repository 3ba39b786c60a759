"""Input that is wrong: each case returns what was raised, and how soon."""

from __future__ import annotations

import time
import typing

import keras
import numpy as np
import tensorflow as tf

from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case

layers = keras.layers
BOTH = ("two_workers",)


def _raised(action: typing.Callable) -> dict:
    """Runs an action that must raise; returns the type, the text, the time."""
    start = time.monotonic()
    try:
        action()
    except Exception as error:  # noqa: BLE001 its type is the result
        seconds = time.monotonic() - start
        return {
            "local": {
                "type": type(error).__name__,
                "text": str(error),
                "seconds": seconds,
            }
        }
    raise AssertionError("nothing was raised")


@case("Bad input: a model built outside the scope, fit inside it", compare=False)
def model_built_outside_the_scope(env: Env) -> dict:
    model = common.mlp()

    def action():
        with env.scope():
            common.compiled(model)
            common.fit(model, *common.regression_data())

    return _raised(action)


@case("Bad input: `batch_size` smaller than the number of replicas", compare=False)
def batch_size_smaller_than_the_replicas(env: Env) -> dict:
    with env.scope():
        model = common.compiled(common.mlp())
    data = common.regression_data()
    return _raised(lambda: common.fit(model, *data, batch_size=1))


@case("Bad input: a static batch dimension smaller than N replicas", compare=False)
def static_batch_smaller_than_the_replicas(env: Env) -> dict:
    with env.scope():
        model = common.compiled(common.mlp())
    dataset = common.batched(*common.regression_data()).unbatch()
    dataset = dataset.batch(1, drop_remainder=True)
    return _raised(lambda: common.fit(model, dataset))


@case(
    "`Dataset.shuffle` with another seed on each worker: shards overlap",
    setups=BOTH,
    compare=False,
)
def shuffled_dataset_of_other_seeds(env: Env) -> dict:
    keras.utils.set_random_seed(100 + env.rank)
    with env.scope():
        model = common.compiled(common.mlp())
    data = tf.data.Dataset.from_tensor_slices(common.regression_data())
    dataset = data.shuffle(96).batch(common.BATCH_SIZE)
    return _raised(lambda: common.fit(model, dataset))


def _different(env: Env, build: typing.Callable) -> dict:
    def action():
        with env.scope():
            model = common.compiled(build(env.rank))
        common.fit(model, *common.regression_data())

    return _raised(action)


def _stack(*chosen: layers.Layer) -> keras.Model:
    return keras.Sequential([keras.Input((common.NUM_FEATURES,)), *chosen])


@case("Bad input: models of other shapes on two workers", setups=BOTH, compare=False)
def other_shapes_on_two_workers(env: Env) -> dict:
    def build(rank):
        return _stack(
            layers.Dense(4, name="same"),
            layers.Dense(5 + rank, name="other"),
            layers.Dense(1, name="last"),
        )

    return _different(env, build)


@case("Bad input: models of another order on two workers", setups=BOTH, compare=False)
def another_order_on_two_workers(env: Env) -> dict:
    def build(rank):
        names = ["left", "right"] if rank == 0 else ["right", "left"]
        inputs = keras.Input((common.NUM_FEATURES,))
        first, second = (layers.Dense(4, name=name) for name in names)
        outputs = layers.Dense(1, name="last")(second(first(inputs)))
        return keras.Model(inputs, outputs)

    return _different(env, build)


@case("Bad input: models of another dtype on two workers", setups=BOTH, compare=False)
def another_dtype_on_two_workers(env: Env) -> dict:
    def build(rank):
        dtype = "float64" if rank else "float32"
        return _stack(
            layers.Dense(4, name="same"), layers.Dense(1, name="last", dtype=dtype)
        )

    return _different(env, build)


@case("Bad input: layers called in another order", setups=BOTH, compare=False)
def another_order_of_calls_on_two_workers(env: Env) -> dict:
    class Calls(keras.Model):
        def __init__(self, rank):
            super().__init__()
            size = common.NUM_FEATURES
            self.left = layers.Dense(size, name="left")
            self.right = layers.Dense(size, name="right")
            self.last = layers.Dense(1, name="last")
            self.left.build((None, size))
            self.right.build((None, size))
            self.order = rank

        def call(self, inputs):
            both = [self.left, self.right]
            first, second = both if self.order == 0 else both[::-1]
            return self.last(second(first(inputs)))

    return _different(env, Calls)


@case("Bad input: a model with a layer more on one worker", setups=BOTH, compare=False)
def another_layer_on_one_worker(env: Env) -> dict:
    def build(rank):
        extra = [layers.Dense(4, name="extra")] if rank else []
        return _stack(
            layers.Dense(4, name="same"), *extra, layers.Dense(1, name="last")
        )

    return _different(env, build)


def _ones(*shape: int) -> np.ndarray:
    return np.ones(shape, "float32")


def _of_unknown_rows(*batches: tuple) -> tf.data.Dataset:
    spec = tf.nest.map_structure(
        lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), batches[0]
    )
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)


def _of_equal_rows_at_first() -> tf.data.Dataset:
    good = ({"a": _ones(8, 6)}, _ones(8, 1))
    return _of_unknown_rows(good, good, ({"a": _ones(8, 6)}, _ones(7, 1)))


def _changing() -> typing.Iterator:
    for key in "aab":
        yield {key: _ones(8, 6)}, _ones(8, 1)


class First(keras.Model):
    """Looks at the first of its inputs."""

    def __init__(self):
        super().__init__()
        self.last = layers.Dense(1)

    def call(self, inputs):
        return self.last(keras.tree.flatten(inputs)[0])


# How each is given to a model: the name of a method, and the arguments.
BAD_STRUCTURES: dict[str, typing.Callable] = {
    "arrays": lambda: ("fit", {"a": _ones(8, 6), "b": _ones(6, 1)}, _ones(8, 1)),
    "arrays of predict": lambda: ("predict", {"a": _ones(8, 6), "b": _ones(6, 1)}),
    "a batch": lambda: ("train_on_batch", [_ones(8, 6)], _ones(7, 1)),
    "a dataset": lambda: (
        "fit",
        tf.data.Dataset.from_tensors((_ones(8, 6), _ones(1, 1))),
    ),
    "unknown rows": lambda: ("fit", _of_equal_rows_at_first()),
    "no list": lambda: ("fit", []),
    "no dict": lambda: ("predict", {}),
    "no tuple": lambda: ("train_on_batch", ()),
    "None": lambda: ("evaluate", None, _ones(8, 1)),
    "None in a dataset": lambda: (
        "fit",
        tf.data.Dataset.from_tensors((None, _ones(8, 1))),
    ),
    "a scalar": lambda: ("fit", [_ones(8, 6), np.float32(3)], _ones(8, 1)),
    "a generator": lambda: ("fit", _changing()),
}


@case(
    "Bad input: structures whose parts do not fit together",
    compare=False,
)
def structures_that_do_not_fit(env: Env) -> dict:
    found = {}
    for name, make in BAD_STRUCTURES.items():
        with env.scope():
            model = common.compiled(First())
        method, *data = make()
        options = {} if method == "train_on_batch" else {"verbose": 0}
        call = getattr(model, method)
        raised = _raised(lambda call=call, data=data, o=options: call(*data, **o))
        found[name] = raised["local"]
    return {"local": found}
