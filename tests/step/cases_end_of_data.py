"""The end of data of unknown length, which plain Keras finds by a step without data.

What needs no gradients happens in that step on one device: the counter, weight decay,
Nadam's product of momenta, the end of an accumulation.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import keras
import tensorflow as tf

import tfdp
from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as

optimizers = keras.optimizers


def _data(num_samples: int = 40) -> tf.data.Dataset:
    """5 batches, whose number nobody knows."""
    return common.batched(*common.regression_data(num_samples)).filter(lambda *_: True)


def _train(env: Env, optimizer, epochs: int = 3, steps=None, **compile_options) -> dict:
    def build():
        return common.compiled(common.mlp(), optimizer(), **compile_options)

    counted = []
    model = common.build_in_scope(env, build)

    def count(epoch, logs):
        counted.append(int(model.optimizer.iterations.numpy()))

    callback = keras.callbacks.LambdaCallback(on_epoch_end=count)
    options = {} if steps is None else {"steps_per_epoch": steps}
    history = common.fit(model, _data(), epochs=epochs, callbacks=[callback], **options)
    return {"history": history, "counted": counted, "weights": env.weights(model)}


def adamw(**options) -> keras.optimizers.Optimizer:
    return optimizers.AdamW(0.01, weight_decay=0.1, **options)


def nadam() -> keras.optimizers.Optimizer:
    return optimizers.Nadam(0.01, weight_decay=0.1)


@case("Wrong numbers: the counter at the end of data")
def the_end_of_data_counts_as_in_keras(env: Env) -> dict:
    results = {
        "adamw": _train(env, adamw),
        "means": _means_of_static_rows(env),
        "draws": _train_with_draws(env),
    }
    assert results["adamw"]["counted"] == [6, 12, 18]
    return results


class Noise(keras.layers.Layer):
    """Adds random numbers with and without a seed, in evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, inputs):
        for seed in (self.seeds, self.seeds, None):
            inputs += keras.random.normal(keras.ops.shape(inputs), seed=seed)
        return inputs


def _train_with_draws(env: Env) -> dict:
    """Trains and evaluates on data of unknown length; Keras's last steps draw, too."""

    def build():
        layers = [keras.layers.Dropout(0.3), Noise(), keras.layers.Dense(1)]
        inputs = keras.Input((common.NUM_FEATURES,))
        return common.compiled(keras.Sequential([inputs, *layers]), "sgd")

    model = common.build_in_scope(env, build)
    history = common.fit(model, _data(), epochs=3, validation_data=_data(24))
    return {"history": history, "weights": env.weights(model)}


def _means_of_static_rows(env: Env) -> dict:
    """Evaluates batches whose shape has the number of rows."""
    model = common.build_in_scope(env, lambda: common.compiled(common.mlp(), "sgd"))
    data = _data().unbatch().batch(common.BATCH_SIZE, drop_remainder=True)
    if env.is_reference:
        # Without it, plain Keras divides the loss by the rows of one batch too many.
        data = data.apply(tf.data.experimental.assert_cardinality(5))
    return model.evaluate(data, verbose=0, return_dict=True)


@case("Wrong numbers: the counter at the end of data, other optimizers")
@same_as("the_end_of_data_counts_as_in_keras")
def the_end_of_data_of_other_optimizers(env: Env) -> dict:
    def decaying():
        rate = optimizers.schedules.CosineDecay(0.05, 30)
        return optimizers.SGD(rate, momentum=0.9)

    def averaged():
        return adamw(use_ema=True, ema_overwrite_frequency=4)

    def scaled():
        return optimizers.LossScaleOptimizer(adamw())

    return {
        "schedule": _train(env, decaying),
        # The second step without data would be an update of this one.
        "accumulation": _train(env, lambda: adamw(gradient_accumulation_steps=4)),
        "nadam": _train(env, nadam),
        "averages": _train(env, averaged),
        "scaled": _train(env, scaled),
    }


@case("Wrong numbers: the counter at the end of data, loops of other lengths")
@same_as("the_end_of_data_counts_as_in_keras")
def the_end_of_data_is_found_in_any_loop(env: Env) -> dict:
    return {
        "fewer steps": _train(env, adamw, steps=3),
        "as many steps": _train(env, adamw, steps=5),
        "more steps": _train(env, adamw, steps=7),
        "several at once": _train(env, adamw, steps_per_execution=2),
        "eager": _train(env, adamw, run_eagerly=True),
    }


@case("Wrong numbers: the counter at the end of data, `DistributedOptimizer`")
@same_as("the_end_of_data_counts_as_in_keras")
def the_end_of_data_of_sharded_state(env: Env) -> dict:
    def wrapped(optimizer, **options):
        return lambda: tfdp.DistributedOptimizer(optimizer(), **options)

    results = {
        "accumulation": _train(env, wrapped(adamw, accumulation_steps=3)),
        "scaled": _train(env, wrapped(adamw, loss_scale=8.0)),
    }
    for stage in ("none", "optimizer", "parameters"):
        results[stage] = _train(env, wrapped(nadam, sharding=stage))
    return results


@case("Wrong numbers: the counter at the end of data, against plain Keras")
@same_as("the_end_of_data_counts_as_in_keras")
def the_end_of_data_of_a_wrapped_optimizer(env: Env) -> dict:
    def optimizer():
        inner = nadam()
        return inner if env.is_reference else tfdp.DistributedOptimizer(inner)

    return _train(env, optimizer)


class Counting(keras.layers.Layer):
    """Counts its calls, and follows the mean of its input."""

    def __init__(self):
        super().__init__()
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.mean = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs):
        self.calls.assign_add(1.0)
        self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(inputs))
        return inputs


class Drawing(keras.layers.Layer):
    """Adds numbers of TensorFlow's generators, as many for each batch."""

    def __init__(self, draw: Callable[[list[int]], tf.Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def call(self, inputs):
        return inputs + self.draw([inputs.shape[-1]])


@case("A change of a variable that no data is needed for", compare=False)
def changes_without_data_are_told_of(env: Env) -> dict:
    with env.scope():
        generator = tf.random.Generator.from_seed(3)
    kinds = {
        "'counting": Counting,
        "the generator of 'sequential": lambda: Drawing(tf.random.normal),
        "the generator of '": lambda: Drawing(generator.normal),
    }
    for begin, make in kinds.items():
        (sentence,) = _told_of_the_end(env, make)
        told = f"The data of unknown length has ended, and {begin}"
        assert sentence.startswith(told), sentence
    return {}


@case("A change of a layer of Keras that no data is needed for", compare=False)
@same_as("changes_without_data_are_told_of")
def changes_of_layers_of_keras_without_data_are_told_of(env: Env) -> dict:
    def spectral():
        return keras.layers.SpectralNormalization(keras.layers.Dense(4))

    (of_spectral,) = _told_of_the_end(env, spectral)
    assert "vector_u' keeps its value" in of_spectral, of_spectral
    assert not _told_of_the_end(env, keras.layers.BatchNormalization)
    return {}


def _told_of_the_end(env: Env, make: Callable[[], keras.layers.Layer]) -> list[str]:
    """What is said when data of unknown length has ended, of a model with a layer."""
    with env.scope():
        layers = [keras.layers.Dense(4), make(), keras.layers.Dense(1)]
        model = common.compiled(keras.Sequential(layers))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        common.fit(model, _data(), epochs=2)
    return [str(w.message) for w in found if "of unknown length" in str(w.message)]
