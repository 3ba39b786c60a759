"""Configs of workers are compared without what may differ between them."""

from __future__ import annotations

import json
import typing
import warnings

import keras
import numpy as np
import pytest

import tfdp
from tests.harness import common
from tfdp.communication.coordination.facts import describe_difference, digest
from tfdp.training.keras_hooks.configs import configs_of

layers = keras.layers


def _model(*hidden: layers.Layer, **options: typing.Any) -> keras.Model:
    chosen = hidden or (layers.Dense(4, activation="tanh"),)
    inputs = keras.Input((common.NUM_FEATURES,))
    model = keras.Sequential([inputs, *chosen, layers.Dense(1)])
    return common.compiled(model, **options)


def _difference(*models: keras.Model, name: str = "fit", callbacks=((), ())) -> str:
    found = [
        configs_of(name, model, list(given))
        for model, given in zip(models, callbacks, strict=True)
    ]
    text = describe_difference(dict(enumerate(found)))
    assert (digest(found[0]) == digest(found[1])) == (not text)
    assert json.loads(json.dumps(found)) == found
    return text


class Scaled(layers.Layer):
    """Has a config of its own."""

    def __init__(self, factor: float, **options: typing.Any):
        super().__init__(**options)
        self.factor = factor

    def call(self, inputs):
        return inputs * self.factor

    def get_config(self):
        return {**super().get_config(), "factor": self.factor}


class Located(layers.Layer):
    """Has no config of its own, but arguments that Keras would make one of."""

    def __init__(self, folder: str):
        super().__init__()
        self.folder = folder

    def call(self, inputs):
        return inputs


class LocatedModel(keras.Model):
    """A model that is told its worker's folder."""

    def __init__(self, folder: str):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs)


def _adam(**options: typing.Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(**options)


def _huber(delta: float) -> keras.losses.Loss:
    return keras.losses.Huber(delta=delta)


def _connected(value: int) -> keras.Model:
    inputs = keras.Input((3,))
    first = layers.Dense(3)(inputs)
    second = layers.Dense(3)(first)
    outputs = layers.Add()([second, (first, second)[value]])
    return common.compiled(keras.Model(inputs, outputs))


DIFFERENT = {
    "activation": (
        lambda v: _model(layers.Dense(4, activation=("relu", "tanh")[v])),
        "model/dense/config/activation: 'relu' on worker 0, 'tanh' on worker 1",
    ),
    "policy": (
        lambda v: _model(layers.Dense(4, dtype=("float32", "mixed_bfloat16")[v])),
        "model/dense/dtype: 'float32' on worker 0, 'mixed_bfloat16' on worker 1",
    ),
    "layer": (
        lambda v: _model(layers.Dense(4), *[layers.Dropout(0.5)] * v),
        "model/dropout: nothing on worker 0, {'class_name': 'Dropout'",
    ),
    "own layer": (
        lambda v: _model(Scaled(1.0 + v)),
        "model/scaled/config/factor: 1.0 on worker 0, 2.0 on worker 1",
    ),
    "connections": (
        _connected,
        "inputs/add/0/1: 'dense' on worker 0, 'dense#2' on worker 1",
    ),
    "clipnorm": (
        lambda v: _model(optimizer=_adam(clipnorm=(1.0, None)[v])),
        "optimizer/config/clipnorm: 1.0 on worker 0, None on worker 1",
    ),
    "optimizer": (
        lambda v: _model(optimizer=(_adam, keras.optimizers.SGD)[v]()),
        "optimizer/class_name: 'Adam' on worker 0, 'SGD' on worker 1",
    ),
    "schedule": (
        lambda v: _model(
            optimizer=_adam(
                learning_rate=keras.optimizers.schedules.CosineDecay(0.1, 10 + v)
            )
        ),
        "optimizer/config/learning_rate/config/decay_steps: 10 on worker 0, 11 on",
    ),
    "accumulation": (
        lambda v: _model(
            optimizer=tfdp.DistributedOptimizer(_adam(), accumulation_steps=1 + v)
        ),
        "optimizer/config/accumulation_steps: 1 on worker 0, 2 on worker 1",
    ),
    "loss": (
        lambda v: _model(loss=("mse", "mae")[v]),
        "loss: 'mse' on worker 0, 'mae' on worker 1",
    ),
    "setting of a loss": (
        lambda v: _model(loss=_huber(1.0 + v)),
        "loss/config/delta: 1.0 on worker 0, 2.0 on worker 1",
    ),
    "metrics": (
        lambda v: _model(metrics=["mae", "mse"][: 1 + v]),
        "metrics/1: nothing on worker 0, 'mse' on worker 1",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_difference_that_changes_training_is_named_by_its_path(name):
    make, expected = DIFFERENT[name]
    assert _difference(make(0), make(1)).startswith(expected)


def _number(y_true: typing.Any, y_pred: typing.Any) -> typing.Any:
    return keras.ops.mean((y_true - y_pred) ** 2)


def _first_use(value: int) -> None:
    """Counts up Keras's names, as a worker does that has made another model."""
    if value:
        _model()
        layers.Dropout(0.1)


def _after_another(value: int) -> keras.Model:
    _first_use(value)
    return _model(
        layers.Dense(4), layers.Dense(4), layers.Dropout(0.1), metrics=["mae"]
    )


def _of_output(value: int) -> keras.Model:
    _first_use(value)
    inputs = keras.Input((3,))
    model = keras.Model(inputs, layers.Dense(1)(inputs))
    return common.compiled(model, loss={model.output_names[0]: "mse"})


def _with_another_rate(value: int) -> keras.Model:
    model = _model(optimizer=_adam(learning_rate=0.1))
    model.optimizer.learning_rate = 0.1 + value
    return model


def _built(value: int) -> keras.Model:
    model = common.compiled(keras.Sequential([layers.Dense(2), layers.Dense(1)]))
    model(np.ones((3 + value, 2), "float32"))
    return model


ALIKE: dict[str, typing.Callable[[int], keras.Model]] = {
    "names that Keras counts up": _after_another,
    "names of outputs": _of_output,
    "learning rates in variables": _with_another_rate,
    "seeds": lambda v: _model(
        layers.Dropout(0.5, seed=v),
        layers.Dense(4, kernel_initializer=keras.initializers.HeNormal(seed=v)),
    ),
    "names of a worker": lambda v: _model(optimizer=_adam(name=f"adam of {v}")),
    "lambdas": lambda v: _model(
        (layers.Lambda(lambda x: x), layers.Lambda(lambda x: x))[v],
        layers.Dense(3, activation=(lambda x: x, lambda x: x)[v]),
        loss=(lambda a, b: _number(a, b), lambda a, b: _number(a, b))[v],
    ),
    "arguments of a layer without a config": lambda v: _model(Located(f"on-{v}a")),
    "arguments of a model": lambda v: common.compiled(LocatedModel(f"on-{v}a")),
    "shapes of batches": _built,
    "values of an embedding": lambda v: common.compiled(
        keras.Sequential(
            [
                layers.Embedding(
                    40,
                    30,
                    embeddings_initializer=keras.initializers.Constant(
                        np.full((40, 30), v, "float32")
                    ),
                )
            ]
        )
    ),
    "not compiled": lambda v: common.mlp(),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_may_differ_between_workers_raises_no_alarm(name):
    make = ALIKE[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _difference(make(0), make(1)) == ""


def test_training_changes_nothing_that_is_compared():
    models = _model(optimizer=_adam()), _model(optimizer=_adam())
    models[0].fit(*common.regression_data(8), verbose=0)
    assert _difference(*models) == ""


def test_prediction_does_not_ask_how_a_model_was_compiled():
    models = _model(loss="mse"), _model(loss="mae")
    assert _difference(*models, name="predict") == ""
    assert _difference(*models, name="evaluate").startswith("loss")


def test_settings_of_callbacks_are_compared_but_no_paths():
    model = _model()
    callbacks = tfdp.callbacks
    paths = [[callbacks.CommunicationMonitor(path)] for path in "ab"]
    assert _difference(model, model, callbacks=paths) == ""
    steps = [[callbacks.GradientAccumulation(steps={0: n})] for n in (2, 4)]
    expected = "callbacks/0/steps/0: 2 on worker 0, 4 on worker 1"
    assert _difference(model, model, callbacks=steps) == expected
    scales = [[callbacks.LossScaling(growth_steps=n)] for n in (2, 4)]
    expected = "callbacks/0/scaling/growth_steps: 2 on worker 0, 4 on worker 1"
    assert _difference(model, model, callbacks=scales) == expected


def test_settings_of_kerass_callbacks_that_act_on_training_are_compared():
    model = _model()
    kinds = keras.callbacks
    plateaus = [[kinds.ReduceLROnPlateau(factor=f, verbose=1)] for f in (0.5, 0.1)]
    expected = "callbacks/0/factor: 0.5 on worker 0, 0.1 on worker 1"
    assert _difference(model, model, callbacks=plateaus) == expected
    rates = [[kinds.LearningRateScheduler(lambda epoch: 0.1)] for _ in range(2)]
    assert _difference(model, model, callbacks=rates) == ""
    stopping = [kinds.EarlyStopping("loss")], [kinds.CSVLogger("log")]
    assert _difference(model, model, callbacks=stopping) == ""
    best = [kinds.EarlyStopping("loss", restore_best_weights=True)]
    expected = "callbacks/0: {'class_name': 'EarlyStopping'"
    assert _difference(model, model, callbacks=(best, [])).startswith(expected)


def test_every_callback_says_which_of_its_settings_are_compared():
    for name in tfdp.callbacks.__all__:
        assert hasattr(getattr(tfdp.callbacks, name), "compared"), name
