"""Single-batch methods, loops of one's own and custom train steps."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as

BATCH = common.BATCH_SIZE
MIRRORED, WORKERS = ("mirrored",), ("two_workers",)


@case("`train_on_batch`, `test_on_batch` (two workers: crash)")
def train_and_test_on_batch(env: Env) -> dict:
    model = common.build_in_scope(
        env, lambda: common.compiled(common.mlp(), metrics=["mae"])
    )
    x, y = common.regression_data()
    trained = [
        model.train_on_batch(x[i : i + BATCH], y[i : i + BATCH])
        for i in range(0, 4 * BATCH, BATCH)
    ]
    return {
        "trained": trained,
        "tested": model.test_on_batch(x[:BATCH], y[:BATCH]),
        "dict": model.test_on_batch(x[:BATCH], y[:BATCH], return_dict=True),
        "weights": env.weights(model),
    }


@case("`train_on_batch` with `sample_weight`, after batches without")
@same_as("train_and_test_on_batch")
def train_on_batches_with_and_without_weights(env: Env) -> dict:
    model = common.build_in_scope(
        env, lambda: common.compiled(common.mlp(), metrics=["mae"])
    )
    x, y = common.regression_data(BATCH)
    weight = np.linspace(0, 2, BATCH).astype("float32")
    return {
        "trained": model.train_on_batch(x, y),
        "tested": model.test_on_batch(x, y),
        "weighted": model.train_on_batch(x, y, sample_weight=weight),
        "again": model.train_on_batch(x, y),
        "weights": env.weights(model),
    }


def _loop(env: Env, build_first: bool, in_function: bool, tokens: bool = False):
    """Trains by a loop of its own over a distributed dataset."""
    strategy = env.distribution
    with env.scope():
        model = _embedding_model() if tokens else common.mlp()
        optimizer = keras.optimizers.Adam(0.01)
        if build_first:
            optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            per_sample = keras.losses.mean_squared_error(y, model(x, training=True))
            loss = tf.reduce_sum(per_sample) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function
    def one_step(batch):
        return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

    @tf.function
    def one_epoch(dataset):
        total = 0.0
        for batch in dataset:
            losses = strategy.run(step, args=batch)
            total += strategy.reduce("SUM", losses, axis=None)
        return total

    data = common.token_data() if tokens else common.regression_data()
    dataset = strategy.experimental_distribute_dataset(common.batched(*data))
    losses = []
    for _ in range(2 if in_function else 1):
        if in_function:
            losses.append(one_epoch(dataset).numpy())
        else:
            losses.append(sum(one_step(batch).numpy() for batch in dataset))
    return {
        "losses": losses,
        "weights": env.weights(model),
        "iterations": optimizer.iterations.numpy(),
    }


def _embedding_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((common.LENGTH,), dtype="int32"),
            keras.layers.Embedding(common.NUM_TOKENS, 2),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )


@case("A custom loop whose optimizer was built beforehand")
@same_as("average_loss_of_the_global_batch")
def loop_with_an_optimizer_built_beforehand(env: Env) -> dict:
    return _loop(env, build_first=True, in_function=False)


@case("Crash: a custom loop whose optimizer builds lazily inside `strategy.run`")
@same_as("loop_scales_accumulates_and_clips")
def loop_with_an_optimizer_built_lazily(env: Env) -> dict:
    return _loop(env, build_first=False, in_function=False)


@case("Crash: a custom loop over a distributed dataset inside tf.function")
@same_as("average_loss_of_the_global_batch")
def loop_inside_a_function(env: Env) -> dict:
    return _loop(env, build_first=True, in_function=True)


@case("A custom loop with an Embedding")
@same_as("average_loss_of_the_global_batch")
def loop_with_an_embedding(env: Env) -> dict:
    return _loop(env, build_first=True, in_function=False, tokens=True)


def _outside_of_run(env: Env, optimizer, decorate=lambda step: step) -> dict:
    """Trains by a step that no `strategy.run` calls; it builds the optimizer."""
    with env.scope():
        model = _embedding_model()
    x, y = common.token_data(BATCH)

    @decorate
    def step():
        with tf.GradientTape() as tape:
            loss = keras.losses.MeanSquaredError()(y, model(x, training=True))
        variables = model.trainable_variables
        pairs = zip(tape.gradient(loss, variables), variables, strict=True)
        optimizer.apply_gradients(pairs)
        return loss

    losses = [step().numpy() for _ in range(3)]
    return {
        "losses": losses,
        "weights": env.weights(model),
        "slots": dict(enumerate(env.read(optimizer.variables).values())),
    }


def _scaled() -> keras.optimizers.Optimizer:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))


def _averaged() -> keras.optimizers.Optimizer:
    return keras.optimizers.AdamW(0.1, weight_decay=0.1, use_ema=True)


@case("A loop without `strategy.run` trains the copies of a process", setups=MIRRORED)
def loop_outside_of_run(env: Env) -> dict:
    with env.scope():
        averaged = _averaged()
    return {
        "function": _outside_of_run(env, averaged, tf.function),
        "optimizer from outside": _outside_of_run(env, _scaled()),
    }


@case("A loop without `strategy.run`, all of it in the scope", setups=MIRRORED)
def loop_in_scope(env: Env) -> dict:
    with env.scope():
        return {
            "function": _outside_of_run(env, _averaged(), tf.function),
            "scaled loss": _outside_of_run(env, _scaled()),
        }


@case("`keras.utils.clear_session` in the scope", setups=MIRRORED)
def session_cleared_in_scope(env: Env) -> dict:
    with env.scope():
        keras.utils.clear_session()
        model = common.compiled(common.mlp())
    if env.strategy is not None:
        assert model.distribute_strategy is env.strategy
    x, y = common.regression_data(BATCH)
    return {"loss": model.train_on_batch(x, y), "weights": env.weights(model)}


@case("A loop without `strategy.run` on workers", setups=WORKERS, compare=False)
def loop_outside_of_run_on_workers(env: Env) -> dict:
    for optimizer in (_scaled(), _averaged()):
        for scope in (contextlib.nullcontext, env.scope):
            error = pytest.raises(
                ValueError, match=r"applied outside of `strategy\.run`"
            )
            with error, scope():
                _outside_of_run(env, optimizer)
    variables = common.mlp().trainable_variables
    with env.scope(), pytest.raises(ValueError, match="was created outside"):
        _averaged().apply([tf.ones_like(v) for v in variables], variables)
    return {}


@case("An update in a `merge_call` of `strategy.run`")
def update_in_merge_call(env: Env) -> dict:
    with env.scope():
        model, optimizer = common.mlp(), keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    x, y = (part[:BATCH] for part in common.regression_data())

    def update(strategy, *gradients) -> None:
        totals = [strategy.reduce("SUM", each, axis=None) for each in gradients]
        means = [total / env.num_replicas for total in totals]
        optimizer.apply(means, model.trainable_variables)

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - model(x)))
        gradients = tape.gradient(loss, model.trainable_variables)
        tf.distribute.get_replica_context().merge_call(update, args=tuple(gradients))

    strategy = env.strategy or tf.distribute.get_strategy()
    for _ in range(3):
        strategy.run(step)
    return {"weights": env.weights(model)}


class Lazy(keras.Model):
    """A model whose layers its first call builds."""

    def __init__(self, initializer):
        super().__init__()
        self.hidden = keras.layers.Dense(
            4, activation="tanh", kernel_initializer=initializer
        )
        self.head = keras.layers.Dense(1, kernel_initializer=initializer)

    def call(self, inputs):
        return self.head(self.hidden(inputs))


def _first_step_builds(
    env: Env, make_optimizer, initializer, in_function: bool
) -> dict:
    """Trains by a loop whose first step builds the model and the optimizer."""
    strategy = env.distribution
    keras.utils.set_random_seed(5)
    with env.scope():
        model, optimizer = Lazy(initializer()), make_optimizer()

    def step(x, y):
        with tf.GradientTape() as tape:
            squares = tf.square(y - model(x, training=True))
            loss = tf.reduce_sum(squares) / BATCH
            scaled = optimizer.scale_loss(loss)
        variables = model.trainable_variables
        pairs = zip(tape.gradient(scaled, variables), variables, strict=True)
        optimizer.apply_gradients(pairs)
        return loss

    def one_step(batch):
        return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

    if in_function:
        one_step = tf.function(one_step)
    data = common.batched(*common.regression_data(4 * BATCH))
    dataset = strategy.experimental_distribute_dataset(data)
    losses = [one_step(batch).numpy() for batch in dataset]
    return {"losses": losses, "weights": env.weights(model)}


INITIALIZERS = {
    "no seed": lambda: "glorot_uniform",
    "a seed": lambda: keras.initializers.GlorotUniform(seed=3),
    "a generator": lambda: keras.initializers.GlorotUniform(
        seed=keras.random.SeedGenerator(3)
    ),
}


@case("Wrong weights: a model that the first step builds")
@same_as("loop_scales_accumulates_and_clips")
def loop_whose_first_step_builds_the_model(env: Env) -> dict:
    def adam():
        return keras.optimizers.Adam(0.01)

    results = {
        name: _first_step_builds(env, adam, make, in_function=False)
        for name, make in INITIALIZERS.items()
    }
    make = INITIALIZERS["no seed"]
    results["traced"] = _first_step_builds(env, adam, make, in_function=True)
    results["policy"] = _policy_in_a_step(env)
    return results


@case("Wrong weights: `fit` in several threads at once")
def loops_in_threads(env: Env) -> dict:
    data = common.regression_data()

    def build():
        inputs = keras.Input((common.NUM_FEATURES,))
        x = keras.layers.BatchNormalization(synchronized=True)(inputs)
        outputs = keras.layers.Dense(1)(keras.layers.Dropout(0.2)(x))
        return common.compiled(keras.Model(inputs, outputs))

    models = [common.build_in_scope(env, build) for _ in range(3)]
    if env.setup.num_workers > 1:
        other = common.build_in_scope(env, lambda: common.compiled(common.mlp()))
        _predict_in_a_thread_is_refused(other, data)

    def train(model):
        history = common.fit(model, *data, validation_data=data)
        return {"history": history, "rows": model.predict(data[0], verbose=0)}

    num_threads = 3 if env.setup.num_workers == 1 else 1
    with concurrent.futures.ThreadPoolExecutor(num_threads) as threads:
        results = list(threads.map(train, models))
    return {
        str(index): result | {"weights": env.weights(model)}
        for index, (model, result) in enumerate(zip(models, results, strict=True))
    }


def _predict_in_a_thread_is_refused(model: keras.Model, data: tuple) -> None:
    """On several workers, whose threads would run in different orders."""

    def predict(epoch, logs):
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            told = "`predict` was called while another thread of this worker runs `fit`"
            with pytest.raises(RuntimeError, match=told):
                threads.submit(model.predict, data[0], verbose=0).result()

    callback = keras.callbacks.LambdaCallback(on_epoch_end=predict)
    common.fit(model, *data, epochs=1, callbacks=[callback])


def _policy_in_a_step(env: Env) -> str:
    """The policy of the layers that a step creates, which Keras keeps by thread."""
    strategy = env.distribution
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        names = strategy.run(lambda: keras.config.dtype_policy().name)
    finally:
        keras.config.set_dtype_policy("float32")
    (name,) = set(strategy.experimental_local_results(names))
    return name


@case("Wrong weights: optimizers that the first step builds")
@same_as("loop_scales_accumulates_and_clips")
def loop_whose_first_step_builds_the_optimizer(env: Env) -> dict:
    def accumulating():
        return keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)

    def wrapped():
        if env.is_reference:
            return accumulating()
        inner = keras.optimizers.Adam(0.01)
        return tfdp.DistributedOptimizer(inner, accumulation_steps=2)

    def schedule_free():
        return keras.optimizers.ScheduleFreeAdamW(0.01)

    def scaled():
        return keras.optimizers.LossScaleOptimizer(schedule_free())

    makes = [accumulating, wrapped]
    if hasattr(keras.optimizers, "ScheduleFreeAdamW"):
        makes += [schedule_free, scaled]
    make_weights = INITIALIZERS["no seed"]
    results = {
        make.__name__: _first_step_builds(env, make, make_weights, in_function=False)
        for make in makes
    }
    # Not ScheduleFreeAdamW: traced, plain Keras starts its slots from zeros, not from
    # the weights, and so does a worker of one device.
    results["traced"] = _first_step_builds(
        env, accumulating, make_weights, in_function=True
    )
    return results


@case("Wrong weights: a replica traces a step again, and calls layers in another order")
def loop_in_which_the_order_of_layers_depends_on_the_size(env: Env) -> dict:
    with env.scope():
        model = keras.Sequential([keras.Input((3,)), *map(keras.layers.Dense, [3, 3])])
        optimizer = keras.optimizers.SGD(0.1)
    x = np.random.default_rng(0).normal(size=(BATCH + 1, 3)).astype("float32")

    def step(rows):
        order = 1 if rows.shape[0] == 0 else -1
        with tf.GradientTape() as tape:
            outputs = [tf.square(layer(rows)) for layer in model.layers[::order]]
            loss = sum(tf.reduce_sum(each) for each in outputs) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return tf.distribute.get_replica_context().all_reduce("SUM", gradients)

    run = tf.function(functools.partial(env.distribution.run, step))
    data = tf.data.Dataset.from_tensor_slices(x).batch(BATCH)
    for batch in env.distribution.experimental_distribute_dataset(data):
        totals = run(args=(batch,))
    local = env.distribution.experimental_local_results
    sums = {str(i): local(total)[-1] for i, total in enumerate(totals)}
    return {"weights": env.weights(model), "sums": sums}


@case("Crash: convolutions on replicas without samples, in a custom loop")
def loop_over_images_with_a_tiny_batch(env: Env) -> dict:
    """Convolutions and pooling, eagerly and in a function that knows the sizes."""
    layers = keras.layers
    x = np.random.default_rng(0).normal(size=(BATCH + 1, 6, 6, 2)).astype("float32")
    dataset = env.distribution.experimental_distribute_dataset(
        common.batched(x, x.mean(axis=(1, 2, 3))[:, None])
    )
    results = {}
    for name, decorate in {"traced": tf.function, "eager": lambda step: step}.items():
        with env.scope():
            model = keras.Sequential(
                [
                    keras.Input((6, 6, 2)),
                    layers.Conv2D(3, 3, activation="tanh"),
                    layers.MaxPooling2D(2),
                    layers.Conv2DTranspose(2, 3),
                    layers.Flatten(),
                    layers.Dense(1),
                ]
            )
            optimizer = keras.optimizers.SGD(0.1)

        def step(x, y, model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(y - model(x, training=True))) / BATCH
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)

        run = decorate(functools.partial(env.distribution.run, step))
        for batch in dataset:
            run(args=batch)
        results[name] = env.weights(model)
    return results


@case("TensorFlow's errors of mixed strategies", compare=False)
def what_was_made_outside_the_scope_is_named(env: Env) -> dict:
    """In a step and before it; what `build` can move into the scope, it moves."""
    for model_outside in (True, False):
        outside = common.mlp()
        optimizer = keras.optimizers.Adam(0.01)
        with env.scope():
            model = outside if model_outside else common.mlp()
            if model_outside:
                optimizer = keras.optimizers.Adam(0.01)

        def step(model=model, optimizer=optimizer):
            variables = model.trainable_variables
            optimizer.apply([tf.ones(v.shape) for v in variables], variables)

        what = "variable .*/kernel'" if model_outside else "optimizer 'adam"
        for run in (env.strategy.run, tf.function(env.strategy.run)):
            with pytest.raises(ValueError, match=f"The {what}.* was created outside"):
                run(step)
        if model_outside:
            with env.scope(), pytest.raises(ValueError, match=what):
                optimizer.build(model.trainable_variables)
        else:
            with env.scope():
                optimizer.build(model.trainable_variables)
            tf.function(env.strategy.run)(step)
            assert optimizer.iterations.numpy() == 1
    return {}


@case(
    "A hang: an optimizer built in a nested function",
    compare=False,
)
def optimizer_that_a_nested_function_would_build_is_named(env: Env) -> dict:
    if env.is_reference:
        return {}
    with env.scope():
        model, optimizer = common.mlp(), keras.optimizers.Adam(0.01)

    @tf.function
    def update():
        variables = model.trainable_variables
        optimizer.apply([tf.ones(v.shape) for v in variables], variables)

    with pytest.raises(ValueError, match="Build it before, in the scope"):
        tf.function(lambda: env.strategy.run(lambda: update()))()
    with env.scope():
        optimizer.build(model.trainable_variables)
    tf.function(lambda: env.strategy.run(lambda: update()))()
    assert optimizer.iterations.numpy() == 1
    return {}


@case("Crash: compile outside the scope (mixing strategies)")
def compile_outside_the_scope(env: Env) -> dict:
    built = {name: _built_outside(env, name) for name in ("train", "test")}
    return _compiled_outside(env)[1] | {"built outside": built}


def _built_outside(env: Env, name: str) -> dict:
    """Trains a model whose layers create their weights in a call outside the scope."""
    with env.scope():
        layers = [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
        model = common.compiled(keras.Sequential(layers), keras.optimizers.Adam(0.01))
    x, y = common.regression_data()
    model(x[:2])
    results = {"before": model.predict(x, verbose=0)}
    warning = pytest.warns(UserWarning, match="have created weights outside")
    with contextlib.nullcontext() if env.is_reference else warning:
        results["loss"] = getattr(model, f"{name}_on_batch")(x[:6], y[:6])
    results["evaluated"] = model.evaluate(x, y, verbose=0)
    results["history"] = common.fit(model, x, y)
    return results | {"after": model.predict(x, verbose=0)}


@case("The same, and `evaluate` afterwards")
@same_as("compile_outside_the_scope")
def evaluate_what_was_compiled_outside_the_scope(env: Env) -> dict:
    model, results = _compiled_outside(env)
    data = common.regression_data()
    return results | {"evaluate": model.evaluate(*data, batch_size=8, verbose=0)}


def _compiled_outside(env: Env) -> tuple[keras.Model, dict]:
    with env.scope():
        model = common.mlp()
    common.compiled(model, keras.optimizers.Adam(0.01), metrics=["mae"])
    history = common.fit(model, *common.regression_data())
    return model, {"history": history, "weights": env.weights(model)}


class CustomStep(keras.Model):
    """A model with the `train_step` of Keras's guide."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(4, activation="tanh")
        self.head = keras.layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="own_loss")

    def call(self, inputs):
        return self.head(self.hidden(inputs))

    @property
    def metrics(self):
        return [self.tracker, *super().metrics]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            # Keras scales what `compute_loss` returns by the number of replicas.
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.tracker.update_state(keras.losses.mean_squared_error(y, y_pred))
        for metric in self.metrics:
            if metric.name not in ("loss", "own_loss"):
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics if m.name != "loss"}


class OwnLossStep(CustomStep):
    """The same with a loss of its own, scaled by the number of replicas."""

    def train_step(self, data):
        x, y = data
        replicas = self.distribute_strategy.num_replicas_in_sync
        with tf.GradientTape() as tape:
            per_sample = keras.losses.mean_squared_error(y, self(x, training=True))
            loss = tf.reduce_mean(per_sample) / replicas
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.tracker.update_state(per_sample)
        return {"own_loss": self.tracker.result()}


@case("Wrong numbers: a custom `train_step`, written the right way")
@same_as("compute_loss_overridden")
def custom_train_step(env: Env) -> dict:
    def build():
        return common.compiled(CustomStep(), metrics=["mae"])

    return common.train(env, build, *common.regression_data())


@case("Wrong numbers: a `train_step` with its own loss, written the right way")
@same_as("gan_with_two_optimizers")
def custom_train_step_with_its_own_loss(env: Env) -> dict:
    def build():
        return common.compiled(OwnLossStep(), loss=None)

    return common.train(env, build, *common.regression_data())


class Gan(keras.Model):
    """A generator and a discriminator, each with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(common.NUM_FEATURES)]
        )
        self.discriminator = keras.Sequential(
            [
                keras.Input((common.NUM_FEATURES,)),
                keras.layers.Dense(3, activation="tanh"),
                keras.layers.Dense(1),
            ]
        )
        self.trackers = {
            name: keras.metrics.Mean(name=name) for name in ("d_loss", "g_loss")
        }

    def call(self, inputs):
        return self.generator(inputs)

    @property
    def metrics(self):
        return list(self.trackers.values())

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def _entropy(self, real: float, logits):
        return keras.losses.binary_crossentropy(
            tf.fill(tf.shape(logits), real), logits, from_logits=True
        )

    def _minimize(self, name, losses_of, optimizer, variables):
        replicas = self.distribute_strategy.num_replicas_in_sync
        with tf.GradientTape() as tape:
            per_sample = losses_of()
            loss = tf.reduce_mean(per_sample) / replicas
        optimizer.apply(tape.gradient(loss, variables), variables)
        self.trackers[name].update_state(per_sample)

    def train_step(self, data):
        noise, images = data

        def d_losses():
            real = self._entropy(1.0, self.discriminator(images))
            fake = self.discriminator(self.generator(noise))
            return real + self._entropy(0.0, fake)

        def g_losses():
            fake = self.discriminator(self.generator(noise))
            return self._entropy(1.0, fake)

        d, g = self.discriminator, self.generator
        self._minimize("d_loss", d_losses, self.d_optimizer, d.trainable_variables)
        self._minimize("g_loss", g_losses, self.g_optimizer, g.trainable_variables)
        return {name: m.result() for name, m in self.trackers.items()}


@case("Wrong numbers: a GAN with two optimizers, written the right way")
def gan_with_two_optimizers(env: Env) -> dict:
    with env.scope():
        model = Gan()
        model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02))
    images = common.features()
    noise = images[::-1, :2].copy()
    history = common.fit(model, noise, images)
    return {
        "history": history,
        "generator": env.weights(model.generator),
        "discriminator": env.weights(model.discriminator),
    }


@case("Two strategies in one process do not collide")
@same_as("two_strategies_reduce_in_one_function")
def two_strategies_train_by_turns(env: Env) -> dict:
    models = []
    for strategy in env.strategy, env.new_strategy():
        with strategy.scope() if strategy else env.scope():
            keras.utils.set_random_seed(5)
            models.append(common.compiled(common.mlp(), metrics=["mae"]))
    histories = {}
    for turn in range(2):
        for index, model in enumerate(models):
            data = common.regression_data(32, seed=index)
            histories[f"{turn}/{index}"] = common.fit(model, *data, epochs=1)
    weights = {f"{i}": _read(model) for i, model in enumerate(models)}
    return {"histories": histories, "weights": weights}


def _read(model: keras.Model) -> dict:
    # The paths of the second model have other numbers.
    return {f"{i}": w.numpy() for i, w in enumerate(model.weights)}


class TwoOptimizers(keras.Model):
    """Trains a layer by an optimizer of its own, and never by `self.optimizer`."""

    def __init__(self, optimizer):
        super().__init__()
        self.head = keras.layers.Dense(1)
        self.head.build((None, common.NUM_FEATURES))
        self.own = optimizer

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self.head(x)))
        variables = self.trainable_variables
        self.own.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}

    def test_step(self, data):
        x, y = data
        return {"loss": tf.reduce_mean(tf.square(y - self.head(x)))}


@case("Sharded parameters, and another optimizer", setups=MIRRORED, compare=False)
def parameters_sharded_beside_a_plain_optimizer(env: Env) -> dict:
    with env.scope():
        model = TwoOptimizers(keras.optimizers.SGD(0.1))
        model.compile("sgd")
    x, y = common.regression_data(BATCH)
    options = {"callbacks": [tfdp.callbacks.ShardedOptimizer(3)], "verbose": 0}
    with (
        pytest.warns(UserWarning, match="applies only to"),
        pytest.raises(ValueError, match="sharded by another optimizer"),
    ):
        model.fit(x, y, validation_data=(x, y), epochs=2, **options)
    return {}
