"""What a step gathers is told, compared between workers and refused where asked."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as
from tfdp.training.program import checks

layers = keras.layers
WIDTH = 300


@contextlib.contextmanager
def options(env: Env, **changes: object) -> Iterator[None]:
    """Change options of the strategy that all cases share."""
    if env.strategy is None:
        yield
        return
    extended = env.strategy.extended
    before = extended.options
    extended.options = dataclasses.replace(before, **changes)
    try:
        yield
    finally:
        extended.options = before


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Collect what tfdp logs."""
    texts: list[str] = []

    class Collects(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    handler = Collects()
    logging.getLogger("tfdp").addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger("tfdp").removeHandler(handler)


def _normalized(between: keras.layers.Layer) -> keras.Model:
    """Local normalization, with a mask from padding and, after a layer, without one."""
    tokens = keras.Input((common.LENGTH,), dtype="int32")
    h = layers.Embedding(common.NUM_TOKENS, 4, mask_zero=True)(tokens)
    h = layers.BatchNormalization(momentum=0.8)(h)
    # What is linear would leave no gradient to the first normalization's offset.
    h = between(layers.Activation("tanh")(h))
    h = layers.BatchNormalization(momentum=0.8)(h)
    return keras.Model(tokens, layers.Dense(1)(h))


@case("An option makes each BatchNormalization global")
def an_option_makes_each_batch_normalization_global(env: Env) -> dict:
    # The last batch has one row, so that only one replica has any.
    x, y = common.token_data(2 * common.BATCH_SIZE + 1)
    with options(env, sync_batch_norm=True):
        return common.train(
            env,
            lambda: common.compiled(_normalized(layers.GlobalAveragePooling1D())),
            x,
            y,
            epochs=2,
        )


class Singular(keras.Model):
    """A loss of singular values, which couple all rows of a batch."""

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        return tf.reduce_sum(tf.linalg.svd(y_pred, compute_uv=False)) / 100.0


def _singular() -> keras.Model:
    inputs = keras.Input((common.NUM_FEATURES,))
    model = Singular(inputs, layers.Dense(WIDTH)(inputs))
    model.compile(keras.optimizers.SGD(0.01))
    return model


@case("What a step gathers is told once, with the line and its bytes", compare=False)
def what_a_step_gathers_is_told_once(env: Env) -> None:
    x, y = common.regression_data()
    with logged() as told, warnings.catch_warnings():
        warnings.simplefilter("error")
        model = common.build_in_scope(env, _singular)
        common.fit(model, x, y)
        common.fit(model, x, y)
    assert len(told) == env.is_chief, told
    num_bytes = common.BATCH_SIZE * WIDTH * 4
    line = "tf.reduce_sum(tf.linalg.svd(y_pred, compute_uv=False))"
    plan = str(env.strategy.communication_plan(model))
    for text in (*told, plan):
        assert f"{num_bytes:,} bytes for `Svd` ({__file__}:" in text, text
        assert line in text, text
    assert "Gathered in a step of `fit`" in plan, plan


@case("A step that gathers nothing is not told of", compare=False)
@same_as("what_a_step_gathers_is_told_once")
def a_step_that_gathers_nothing_is_not_told_of(env: Env) -> None:
    x, y = common.token_data()
    with logged() as told, options(env, gathers="error", sync_batch_norm=True):
        model = common.build_in_scope(
            env, lambda: common.compiled(_normalized(layers.LSTM(4)))
        )
        common.fit(model, x, y)
        model.evaluate(x, y, verbose=0)
        model.predict(x, verbose=0)
    assert not told, told


@case("An option refuses gathers, before a weight moves", compare=False)
def an_option_refuses_gathers(env: Env) -> None:
    x, y = common.regression_data()
    model = common.build_in_scope(env, _singular)
    before = [np.array(weight) for weight in model.get_weights()]
    with options(env, gathers="error"):
        text = _error(lambda: common.fit(model, x, y))
    assert '`CommunicationOptions(gathers="error")` forbids gathers' in text, text
    assert f"for `Svd` ({__file__}:" in text, text
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@case(
    "A gather larger than the memory of one worker is refused",
    compare=False,
    quick_setup="two_by_two",
)
def a_gather_that_does_not_fit_in_memory_is_refused(env: Env) -> None:
    x, y = common.regression_data()
    model = common.build_in_scope(env, _singular)
    original = checks.available_bytes
    # The last worker has little: all refuse.
    is_last = env.rank == env.setup.num_workers - 1
    checks.available_bytes = lambda _: 1000 if is_last else 2**40
    try:
        text = _error(lambda: common.fit(model, x, y))
    finally:
        checks.available_bytes = original
    assert "cannot gather" in text, text
    assert f"for `Svd` ({__file__}:" in text, text
    assert "but has 1,000 bytes free" in text, text


@case(
    "Workers whose steps differ: the first operation that differs, on each",
    setups=("two_workers",),
    compare=False,
)
def workers_whose_steps_differ_are_told(env: Env) -> None:
    class Differs(keras.Model):
        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            if env.rank:  # as Python's `random` might choose
                return tf.reduce_max(tf.sort(y_pred, axis=0)[-1])
            return tf.reduce_sum(tf.linalg.svd(y_pred, compute_uv=False))

    def build() -> keras.Model:
        inputs = keras.Input((common.NUM_FEATURES,))
        model = Differs(inputs, layers.Dense(3)(inputs))
        model.compile("sgd")
        return model

    x, y = common.regression_data()
    model = common.build_in_scope(env, build)
    text = _error(lambda: common.fit(model, x, y))
    assert "Workers would hang in the first step of `fit`" in text, text
    assert f"`Svd` ({__file__}:" in text.partition(" on worker 0")[0], text
    assert f"{__file__}:" in text.partition(" on worker 0")[2], text

    class Drawn(keras.Model):
        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            if not env.rank:
                tf.print("what is printed may differ", output_stream="file:///dev/null")
            return tf.reduce_mean(y_pred) * (1.5 + env.rank)

    def build_drawn() -> keras.Model:
        inputs = keras.Input((common.NUM_FEATURES,))
        model = Drawn(inputs, layers.Dense(3)(inputs))
        model.compile("sgd")
        return model

    model = common.build_in_scope(env, build_drawn)
    text = _error(lambda: common.fit(model, x, y))
    assert "Workers would compute different things in the first step of `fit`" in text
    for rank in range(2):
        assert f"on worker {rank}" in text, text
    assert text.count(f"`Const` ({__file__}:") == 2, text


@case("A loss divided by the number of replicas: a warning", compare=False)
def a_loss_divided_by_the_number_of_replicas_is_warned_of(env: Env) -> None:
    replicas = env.strategy.num_replicas_in_sync
    scale = float(replicas)
    literal = {2: lambda loss: loss / 2, 4: lambda loss: loss / 4}[env.num_replicas]

    def warned(reduce: object) -> list[str]:
        def loss(y, prediction):
            return reduce(tf.reduce_mean(tf.square(y - prediction)))

        def build() -> keras.Model:
            model = common.mlp()
            model.compile("sgd", loss)
            return model

        model = common.build_in_scope(env, build)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # As many rows on each replica as there are replicas.
            rows = env.num_replicas**2
            x, y = common.regression_data(rows)
            model.fit(x, y, batch_size=rows, verbose=0)
        return [str(w.message) for w in caught if "A loss is divided" in str(w.message)]

    (text,) = warned(lambda loss: loss / replicas)
    assert f"{__file__}:" in text, text
    assert "loss / replicas" in text, text
    assert not warned(lambda loss: loss)
    assert not warned(literal)
    assert not warned(lambda loss: loss / scale)
    in_step = env.strategy
    assert not warned(lambda loss: loss / in_step.num_replicas_in_sync)


def _error(action: object) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was raised")
