"""Validation, evaluation, and several calls of `fit`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as


def _build() -> keras.Model:
    return common.compiled(common.mlp(), metrics=["mae"])


@case("`validation_data`, `validation_freq`")
def validation_data(env: Env) -> dict:
    x, y = common.regression_data(32)
    held_out = common.regression_data(20, seed=1)
    model = common.build_in_scope(env, _build)
    history = common.fit(
        model, x, y, validation_data=held_out, validation_freq=2, epochs=2
    )
    dataset = common.batched(*held_out, batch_size=4)
    more = common.fit(model, x, y, validation_data=dataset, validation_steps=3)
    return {"history": history, "more": more, "weights": env.weights(model)}


@case("`validation_split`")
@same_as("validation_data")
def validation_split(env: Env) -> dict:
    data = common.regression_data()
    return common.train(env, _build, *data, validation_split=0.25)


@case("`evaluate` (two workers: crash)")
@same_as("validation_data")
def evaluate(env: Env) -> dict:
    model = common.build_in_scope(env, _build)
    x, y = common.regression_data(37)
    weight = abs(x[:, 0])
    return {
        "arrays": model.evaluate(x, y, batch_size=8, verbose=0),
        "weighted": model.evaluate(x, y, 8, sample_weight=weight, verbose=0),
        "dataset": model.evaluate(common.batched(x, y), verbose=0),
        "steps": model.evaluate(common.batched(x, y), steps=2, verbose=0),
    }


@case("A second `fit`, without and with recompiling")
@same_as("checkpoints_at_one_path")
def second_fit(env: Env) -> dict:
    model = common.build_in_scope(env, _build)
    data = common.regression_data()
    first = common.fit(model, *data, epochs=1)
    second = common.fit(model, *data, epochs=1)
    with env.scope():
        common.compiled(model, keras.optimizers.Adam(0.01), "mae")
    third = common.fit(model, *data, epochs=2)
    return {
        "first": first,
        "second": second,
        "third": third,
        "weights": env.weights(model),
    }


@case("A layer frozen between two calls of `fit`")
@same_as("layers_frozen_between_fits_without_recompiling")
def second_fit_with_a_frozen_layer(env: Env) -> dict:
    model = common.build_in_scope(env, _build)
    data = common.regression_data()
    first = common.fit(model, *data, epochs=1)
    model.layers[0].trainable = False
    with env.scope():
        common.compiled(model, keras.optimizers.SGD(0.05))
    second = common.fit(model, *data, epochs=1)
    return {"first": first, "second": second, "weights": env.weights(model)}


class Numbered:
    """Endless batches whose targets are their number, and how many were drawn."""

    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Iterator[tuple]:
        for number in itertools.count():
            self.drawn = number + 1
            rows = np.full((common.BATCH_SIZE, 1), number / 100, "float32")
            yield common.features(common.BATCH_SIZE, number), rows

    def dataset(self) -> tf.data.Dataset:
        """A dataset that goes on where the last one to read it has stopped."""
        batches = iter(self)
        spec = tuple(
            tf.TensorSpec((None, width), tf.float32)
            for width in (common.NUM_FEATURES, 1)
        )
        return tf.data.Dataset.from_generator(
            lambda: batches, output_signature=spec
        ).prefetch(tf.data.AUTOTUNE)


class Slow(keras.callbacks.Callback):
    """Lets a pipeline read ahead as far as it wants to, before each batch is over."""

    def __init__(self, *sources: Numbered) -> None:
        super().__init__()
        self._sources = sources

    def on_train_batch_end(self, batch, logs=None):
        before: list[int] = []
        while before != (now := [source.drawn for source in self._sources]):
            before = now
            time.sleep(0.05)

    on_test_batch_end = on_train_batch_end
    on_predict_batch_end = on_train_batch_end


@case(
    "Generators that go on: nothing is drawn that one device leaves",
    # How far a pipeline reads ahead depends on the time that it has.
    side_by_side=False,
)
@same_as("generator_loses_no_batch")
def generators_are_read_as_far_as_on_one_device(env: Env) -> dict:
    model = common.build_in_scope(env, _build)
    calls = {
        "fit": lambda data, slow: (
            model.fit(
                data, epochs=2, steps_per_epoch=3, verbose=0, callbacks=[slow]
            ).history
        ),
        "evaluate": lambda data, slow: model.evaluate(
            data, steps=3, verbose=0, callbacks=[slow]
        ),
        "predict": lambda data, slow: model.predict(
            data, steps=3, verbose=0, callbacks=[slow]
        ),
    }
    results: dict = {}
    training, held_out = Numbered(), Numbered()
    results["validated"] = model.fit(
        iter(training),
        steps_per_epoch=3,
        epochs=3,
        validation_data=iter(held_out),
        validation_steps=3,
        verbose=0,
        callbacks=[Slow(training, held_out)],
    ).history
    results["drawn"] = [training.drawn, held_out.drawn]
    for name, call in calls.items():
        for kind in "generator", "dataset":
            batches = Numbered()
            data = iter(batches) if kind == "generator" else batches.dataset()
            slow = Slow(batches)
            first, drawn = call(data, slow), batches.drawn
            found = [first, drawn, call(data, slow), batches.drawn]
            results[f"{name} {kind}"] = dict(enumerate(found))
    return results | {"weights": env.weights(model)}
