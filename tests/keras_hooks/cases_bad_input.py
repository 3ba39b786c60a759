"""Input that is wrong: each case returns what was raised, and how soon."""

from __future__ import annotations

import time
import typing
import warnings

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.data.cases_distribute import Policy, with_policy
from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case

layers = keras.layers
# The set-up on which `test_bad_input.py` runs them in the quick tier.
TWO: dict[str, typing.Any] = {"compare": False, "quick_setup": "two_workers"}


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


def _warned(actions: dict[str, typing.Callable]) -> dict:
    """Runs actions; returns what each warns of at a line of this file."""
    texts = {}
    for name, action in actions.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            action()
        own = [w for w in caught if w.filename == __file__]
        texts[name] = " | ".join(f"{w.message}" for w in own)
    return {"local": texts}


@case(
    "Mistakes that train on less, or apart: a warning at the user's line",
    **TWO,
)
def silent_mistakes(env: Env) -> dict:
    with env.scope():
        model = common.compiled(common.mlp())
    outside = common.compiled(common.mlp())
    x, y = common.regression_data(16)
    whole = tf.data.Dataset.from_tensor_slices((x, y))
    own = whole.shard(2, env.rank).batch(4)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )

    def fit(data: tf.data.Dataset, fitted: keras.Model = model) -> typing.Callable:
        return lambda: fitted.fit(data, verbose=0)

    return _warned(
        {
            "shards": fit(own),
            "the same shard": fit(whole.shard(2, 0).batch(4)),
            "shards, not divided": fit(own.with_options(options)),
            "outside": fit(whole.batch(4), outside),
            "outside again": fit(whole.batch(4), outside),
            "outside by hand": lambda: common.compiled(common.mlp()).train_on_batch(
                x, y
            ),
        }
    )


@case("Bad input: a model built outside the scope, fit inside it", **TWO)
def model_built_outside_the_scope(env: Env) -> dict:
    model = common.mlp()

    def action():
        with env.scope():
            common.compiled(model)
            common.fit(model, *common.regression_data())

    return _raised(action)


@case("Bad input: `batch_size` smaller than the number of replicas", **TWO)
def batch_size_smaller_than_the_replicas(env: Env) -> dict:
    with env.scope():
        model = common.compiled(common.mlp())
    data = common.regression_data()
    return _raised(lambda: common.fit(model, *data, batch_size=1))


@case("Bad input: a static batch dimension smaller than N replicas", **TWO)
def static_batch_smaller_than_the_replicas(env: Env) -> dict:
    with env.scope():
        model = common.compiled(common.mlp())
    dataset = common.batched(*common.regression_data()).unbatch()
    dataset = dataset.batch(1, drop_remainder=True)
    return _raised(lambda: common.fit(model, dataset))


class OwnFunctions(keras.Model):
    """Makes functions that call a step directly, on a batch that is not divided."""

    def make_train_function(self, force=False):
        if self.train_function is None or force:
            step = tf.function(self.train_step)
            self.train_function = lambda iterator: step(next(iterator))

    def make_test_function(self, force=False):
        if self.test_function is None or force:
            step = tf.function(self.test_step)
            self.test_function = lambda iterator: step(next(iterator))

    def make_predict_function(self, force=False):
        if self.predict_function is None or force:
            step = tf.function(self.predict_step)
            self.predict_function = lambda batches: step(batches[0])


class WrappedFunctions(keras.Model):
    """Wraps the functions that Keras makes, which divide a batch."""

    def make_predict_function(self, force=False):
        if self.predict_function is None or force:
            super().make_predict_function(force)
            predict = self.predict_function
            self.predict_function = lambda batches: 2 * predict(batches)


@case("Bad input: functions of a step that use one replica of a worker", **TWO)
def own_functions_of_a_step(env: Env) -> dict:
    x, y = common.regression_data()
    with env.scope():
        own, wrapped = (
            common.compiled(kind(i := keras.Input(x.shape[1:]), layers.Dense(1)(i)))
            for kind in (OwnFunctions, WrappedFunctions)
        )
    loops = {
        "train": lambda: common.fit(own, x, y),
        "test": lambda: own.evaluate(x, verbose=0),
        "predict": lambda: own.predict(x, verbose=0),
    }
    before = env.weights(own)
    texts = {name: _raised(loop)["local"] for name, loop in loops.items()}
    after = env.weights(own)
    moved = any((before[name] != after[name]).any() for name in before)
    num_rows = len(wrapped.predict(x, verbose=0))
    return {"local": texts, "moved": moved, "is_whole": num_rows == len(x)}


@case(
    "`Dataset.shuffle` with another seed on each worker: shards overlap",
    **TWO,
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


@case("Bad input: models of other shapes on two workers", **TWO)
def other_shapes_on_two_workers(env: Env) -> dict:
    def build(rank):
        return _stack(
            layers.Dense(4, name="same"),
            layers.Dense(5 + rank, name="other"),
            layers.Dense(1, name="last"),
        )

    return _different(env, build)


@case("Bad input: models of another order on two workers", **TWO)
def another_order_on_two_workers(env: Env) -> dict:
    def build(rank):
        names = ["left", "right"] if rank == 0 else ["right", "left"]
        inputs = keras.Input((common.NUM_FEATURES,))
        first, second = (layers.Dense(4, name=name) for name in names)
        outputs = layers.Dense(1, name="last")(second(first(inputs)))
        return keras.Model(inputs, outputs)

    return _different(env, build)


@case("Bad input: models of another dtype on two workers", **TWO)
def another_dtype_on_two_workers(env: Env) -> dict:
    def build(rank):
        dtype = "float64" if rank else "float32"
        return _stack(
            layers.Dense(4, name="same"), layers.Dense(1, name="last", dtype=dtype)
        )

    return _different(env, build)


@case("Bad input: layers called in another order", **TWO)
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


@case("Bad input: a model with a layer more on one worker", **TWO)
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
        tf.data.Dataset.from_tensors((_ones(8, 6), tf.sparse.from_dense(_ones(1, 1)))),
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
    **TWO,
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


X, Y = common.regression_data(16)


def _validated(rank: int) -> dict:
    return {"validation_data": (X[: 8 + rank], Y[: 8 + rank])}


WEIGHTS = np.linspace(0, 1, 16, dtype="float32")
CLASSES = (Y > 0).astype("int32")


def _order(rank: int) -> np.ndarray:
    """What `np.random.permutation` without a seed gives on each worker."""
    return np.random.RandomState(rank).permutation(16)


def _sliced(*arrays: typing.Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays)


def _files(*names: str) -> tf.data.Dataset:
    return tf.data.TextLineDataset(list(names)).batch(8)


def _generated(x: np.ndarray, y: np.ndarray) -> typing.Iterator:
    for start in range(0, 16, 8):
        yield x[start : start + 8], y[start : start + 8]


class Batches(keras.utils.PyDataset):
    """Batches of arrays."""

    def __init__(self, *arrays: np.ndarray) -> None:
        super().__init__()
        self.arrays = arrays

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple:
        return tuple(array[8 * index : 8 * index + 8] for array in self.arrays)


# What each worker calls: the method of a model, its arguments, and those of `compile`.
DIFFERENT_CALLS: dict[str, typing.Callable[[int], tuple]] = {
    "steps of fit": lambda r: ("fit", (X, Y), {}, {"steps_per_execution": 1 + r}),
    "steps of evaluate": lambda r: (
        "evaluate",
        (X, Y),
        {},
        {"steps_per_execution": 2 - r},
    ),
    "steps of predict": lambda r: ("predict", (X,), {}, {"steps_per_execution": 1 + r}),
    "eager": lambda r: ("fit", (X, Y), {}, {"run_eagerly": bool(r)}),
    "XLA": lambda r: ("evaluate", (X, Y), {}, {"jit_compile": not r}),
    "epochs": lambda r: ("fit", (X, Y), {"epochs": 2 + r}, {}),
    "first epoch": lambda r: ("fit", (X, Y), {"initial_epoch": r}, {}),
    "steps of an epoch": lambda r: (
        "fit",
        (X, Y),
        {"steps_per_epoch": [2, None][r]},
        {},
    ),
    "steps of prediction": lambda r: ("predict", (X,), {"steps": 1 + r}, {}),
    "validation": lambda r: ("fit", (X, Y), [{}, _validated(0)][r], {}),
    "when to validate": lambda r: ("fit", (X, Y), {"validation_freq": 1 + r}, {}),
    "rows": lambda r: ("fit", (X[: 16 - 8 * r], Y[: 16 - 8 * r]), {}, {}),
    "rows of evaluate": lambda r: ("evaluate", (X[r:], Y[r:]), {}, {}),
    "rows of predict": lambda r: ("predict", (X[: 16 - 8 * r],), {}, {}),
    "rows of validation": lambda r: ("fit", (X, Y), _validated(r), {}),
    "batch size": lambda r: ("predict", (X,), {"batch_size": 4 + 4 * r}, {}),
    "dtype": lambda r: ("fit", (X, Y.astype(["float32", "int32"][r])), {}, {}),
    "shape": lambda r: ("fit", (X, [Y, Y[:, 0]][r]), {}, {}),
    "weights": lambda r: ("fit", (X, Y), {"sample_weight": [None, Y[:, 0]][r]}, {}),
    "weights of classes": lambda r: (
        "fit",
        (X, (Y > 0).astype("int32")),
        {"class_weight": {0: 1.0, 1: 2.0 + r}},
        {},
    ),
    "order of rows": lambda r: ("fit", (X[_order(r)], Y[_order(r)]), {}, {}),
    "values of evaluate": lambda r: ("evaluate", (X, Y + r), {}, {}),
    "values of predict": lambda r: ("predict", ([X, X[:, ::-1]][r],), {}, {}),
    "values of weights": lambda r: (
        "fit",
        (X, Y),
        {"sample_weight": [WEIGHTS, WEIGHTS[::-1]][r]},
        {},
    ),
    "order of validation": lambda r: (
        "fit",
        (X, Y),
        {"validation_data": (X, Y[_order(r)])},
        {},
    ),
    "order of a dataset": lambda r: (
        "evaluate",
        (_sliced(X[_order(r)], Y[_order(r)]).batch(8),),
        {},
        {},
    ),
    "validation by a dataset": lambda r: (
        "fit",
        (X, Y),
        {"validation_data": _sliced(X, Y[_order(r)]).batch(8)},
        {},
    ),
    "order of files": lambda r: (
        "predict",
        (_files(*[f"/of{r}/{name}" for name in ["ab", "ba"][r]]),),
        {},
        {},
    ),
    "order of shards": lambda r: (
        "fit",
        (with_policy(_files(*["ab", "ba"][r]), Policy.FILE),),
        {},
        {},
    ),
    "order of a generator": lambda r: (
        "fit",
        (_generated(X, CLASSES[_order(r)]),),
        {},
        {},
    ),
    "order of a PyDataset": lambda r: (
        "evaluate",
        (Batches(X[_order(r)], np.eye(2, dtype="float32")[CLASSES[_order(r), 0]]),),
        {},
        {},
    ),
    "train_on_batch": lambda r: ("train_on_batch", (X[r:], Y[r:]), {}, {}),
    "test_on_batch": lambda r: ("test_on_batch", (X, [Y, Y[:, 0]][r]), {}, {}),
    "predict_on_batch": lambda r: ("predict_on_batch", (X[r:],), {}, {}),
    "order of a batch": lambda r: ("train_on_batch", (X[_order(r)], Y), {}, {}),
    "optimizer": lambda r: (
        "fit",
        (X, Y),
        {},
        {"optimizer": keras.optimizers.Adam(clipnorm=[1.0, None][r])},
    ),
    "optimizer of a batch": lambda r: (
        "train_on_batch",
        (X[:8], Y[:8]),
        {},
        {"optimizer": keras.optimizers.SGD(momentum=0.5 * r)},
    ),
    "loss": lambda r: ("evaluate", (X, Y), {}, {"loss": ["mse", "mae"][r]}),
    "callback": lambda r: (
        "fit",
        (X, Y),
        {"callbacks": [tfdp.callbacks.GradientAccumulation(steps=2 + r)]},
        {},
    ),
    "callback of Keras": lambda r: (
        "fit",
        (X, Y),
        {"callbacks": [keras.callbacks.ReduceLROnPlateau("loss")][r:]},
        {},
    ),
}

# What a process sets by one function for all of its models: that function, what each
# worker gives it, and what is there before.
DIFFERENT_PROCESSES: dict[str, tuple[str, typing.Callable, list, typing.Any]] = {
    "eager functions": ("fit", tf.config.run_functions_eagerly, [False, True], False),
    "limit of epochs": ("fit", keras.config.set_max_epochs, [2, 1], None),
    "limit of steps": ("evaluate", keras.config.set_max_steps_per_epoch, [1, 2], None),
}


class SetRate(keras.callbacks.Callback):
    """Sets the learning rate at the end of each epoch."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.5**epoch


def _assigned_on_one_worker(env: Env) -> dict:
    """What loops raise after one worker has assigned something, and not the other."""

    def build() -> keras.Model:
        model = common.compiled(common.mlp(), keras.optimizers.Adam(0.01))
        before = model.get_weights()
        if env.rank == 0:
            # Leaving the scope gives these values to the other worker.
            model.set_weights([weight + 1 for weight in before])
        return model

    def raised(method: str, callbacks: list | None = None) -> dict:
        data = (X,) if method == "predict" else (X, Y)
        options: dict = {"callbacks": callbacks} if callbacks else {}
        if not method.endswith("on_batch"):
            options["verbose"] = 0
        found = _raised(lambda: getattr(model, method)(*data, **options))
        return {**found["local"], "method": method}

    with env.scope():
        model = build()
    weights = model.get_weights()
    if env.rank == 0:
        # Another state for a moment, as to save it, and the common state again.
        model.set_weights([weight + 1 for weight in weights])
        model.set_weights(weights)
    model.evaluate(X, Y, verbose=0)
    found = {}
    if env.rank == 0:
        model.set_weights([weight + 1 for weight in weights])
    for method in ("fit", "evaluate", "predict", "train_on_batch"):
        found[f"assigned before {method}"] = raised(method)
    model.set_weights(weights)
    common.fit(model, X, Y)
    if env.rank == 1:
        model.optimizer.learning_rate = 0.02
    found["rate before fit"] = raised("fit")
    # Evaluation does not depend on it.
    model.evaluate(X, Y, verbose=0)
    model.optimizer.learning_rate = 0.01
    common.fit(model, X, Y)
    found["rate within fit"] = raised("fit", [SetRate()][env.rank :])
    return found


@case(
    "Bad input: workers that call or compile a model differently",
    **TWO,
)
def different_calls(env: Env) -> dict:
    found = {}
    with env.scope():
        model = common.mlp()
    for name, make in DIFFERENT_CALLS.items():
        with env.scope():
            method, data, options, how = make(env.rank)
            common.compiled(model, **how)
        if not method.endswith("on_batch"):
            options = {"verbose": 0, **options}
        call = getattr(model, method)
        raised = _raised(lambda call=call, data=data, o=options: call(*data, **o))
        found[name] = {**raised["local"], "method": method}

    for name, (method, change, values, before) in DIFFERENT_PROCESSES.items():
        with env.scope():
            common.compiled(model)
        options = {"epochs": 3} if method == "fit" else {}
        call = getattr(model, method)
        change(values[env.rank])
        try:
            raised = _raised(lambda c=call, o=options: c(X, Y, verbose=0, **o))
        finally:
            change(before)
        found[name] = {**raised["local"], "method": method}

    def activation():
        with env.scope():
            model = _stack(layers.Dense(4, activation=["relu", "tanh"][env.rank]))
        model.predict(X, verbose=0)

    def called_outside():
        with env.scope():
            model = common.compiled(First())
        if env.rank == 0:
            model(X)
        common.fit(model, X, Y)

    def later():
        with env.scope():
            model = common.compiled(common.mlp())
        # The second size is new to one worker only.
        for rows in (16, 8, 16 - 4 * env.rank, 8):
            model.train_on_batch(X[:rows], Y[:rows])

    found |= _assigned_on_one_worker(env)
    found["a later batch"] = {**_raised(later)["local"], "method": "train_on_batch"}
    found["activation"] = {**_raised(activation)["local"], "method": "predict"}
    found["called outside"] = {**_raised(called_outside)["local"], "method": "fit"}
    return {"local": found}


def _topics(env: Env, action: typing.Callable) -> list[str]:
    """The topics of the messages between workers that an action costs."""
    group = env.strategy.extended.worker_group
    original, topics = group.all_gather, []

    def all_gather(topic: str, *args: typing.Any, **options: typing.Any) -> list[str]:
        topics.append(topic)
        return original(topic, *args, **options)

    group.all_gather = all_gather
    try:
        action()
    finally:
        del group.all_gather
    return topics


@case("Messages between workers before a loop and in it", **TWO)
def messages_of_loops(env: Env) -> dict:
    with env.scope():
        model = common.compiled(common.mlp())

    def fit() -> None:
        common.fit(model, X, Y, epochs=2, validation_data=(X, Y))

    def batch(rows: int) -> None:
        for _ in range(3):
            model.train_on_batch(X[:rows], Y[:rows])

    def evaluate_assigned() -> None:
        model.set_weights([weight + 1 for weight in model.get_weights()])
        model.evaluate(X, Y, verbose=0)

    fit()
    return {
        "fit": _topics(env, fit),
        "evaluate what all have assigned": _topics(env, evaluate_assigned),
        "evaluate": _topics(env, lambda: model.evaluate(X, Y, verbose=0)),
        "predict": _topics(env, lambda: model.predict(X, verbose=0)),
        "predict again": _topics(env, lambda: model.predict(X, verbose=0)),
        "batch": _topics(env, lambda: batch(8)),
        "batch again": _topics(env, lambda: batch(8)),
        "batch of another size": _topics(env, lambda: batch(6)),
    }
