"""`jit_compile=True`: XLA compiles each replica's part of a step, with equal results.

One device runs without XLA, so that what is compared is both.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.data.cases_distribute import Policy, with_policy
from tests.data.cases_inputs import RaggedMean
from tests.harness import common, compare, registry, results
from tests.harness.env import Env
from tfdp.ground.base import xla

case = registry.case
layers, optimizers = keras.layers, keras.optimizers
IGNORED = "`jit_compile=True` is ignored"


def _compiled(env: Env, build: Callable[[], keras.Model], **options: Any) -> Any:
    """A model that several replicas compile with XLA, and one device does not."""
    with env.scope():
        model = build()
        options = {"optimizer": None, "loss": "mse"} | options
        return common.compiled(model, jit_compile=not env.is_reference, **options)


def _trained(env: Env, model: keras.Model, *data: Any, **options: Any) -> dict:
    history = common.fit(model, *data, **options)
    if not env.is_reference:
        assert env.distribution.communication_plan(model).is_compiled
    return {"history": history, "weights": env.weights(model)}


@contextlib.contextmanager
def _told_that_fails(env: Env, loop: str, reason: str) -> Iterator[None]:
    """One sentence of several replicas says why a loop runs without XLA."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield
    sentences = [str(w.message) for w in told if IGNORED in str(w.message)]
    assert len(sentences) == (not env.is_reference), sentences
    for sentence in sentences:
        assert reason in sentence
        assert f"`{loop}` runs without XLA" in sentence


def _without(env: Env, model: keras.Model, reason: str, *data: Any) -> dict:
    """Train a model that XLA cannot compile, which one sentence says."""
    with _told_that_fails(env, "fit", reason):
        history = common.fit(model, *data)
    if not env.is_reference:
        assert not env.distribution.communication_plan(model).is_compiled
    return {"history": history, "weights": env.weights(model)}


@case(
    "`jit_compile=True`: fit with metrics, evaluate, predict, train_on_batch",
    quick_setup="mirrored",
)
def xla_in_all_loops(env: Env) -> dict:
    x, y = common.regression_data(24)  # XLA compiles each shape of a batch anew
    model = _compiled(env, common.mlp, metrics=["mae"], optimizer=optimizers.Adam(0.01))
    found = _trained(env, model, x, y, epochs=2)
    x, y = x[:8], y[:8]
    return found | {
        "evaluate": model.evaluate(x, y, batch_size=8, verbose=0),
        "predict": model.predict(x, batch_size=8, verbose=0),
        "on batch": model.train_on_batch(x, y),
        "weights": env.weights(model),
    }


@case("`jit_compile=True`: loops over batches of other shapes")
@registry.same_as("xla_in_all_loops")
def xla_of_batches_of_other_shapes(env: Env) -> dict:
    x, y = common.regression_data(28)  # the last batch has four rows
    model = _compiled(env, common.mlp, metrics=["mae"], optimizer=optimizers.Adam(0.01))
    found = _trained(env, model, x, y, epochs=2)
    return found | {
        "evaluate": model.evaluate(x, y, batch_size=8, verbose=0),
        "predict": model.predict(x, batch_size=14, verbose=0),
        "on batch": model.train_on_batch(x[:7], y[:7]),
        "weights": env.weights(model),
    }


@case("`jit_compile=True`: predict before the model is built, in the scope too")
@registry.same_as("xla_in_all_loops")
def xla_of_a_model_that_is_not_built(env: Env) -> dict:
    x, _ = common.regression_data(16)

    def build() -> keras.Model:
        ones = {"kernel_initializer": keras.initializers.Constant(0.1)}
        return keras.Sequential([layers.Dense(4, **ones), layers.Dense(1, **ones)])

    predictions = {}
    with mock.patch.object(xla, "trace", wraps=xla.trace) as trace:
        model = _compiled(env, build, optimizer="sgd")
        predictions["outside"] = model.predict(x, batch_size=6, verbose=0)
        model = _compiled(env, build, optimizer="sgd")
        predictions["on batch"] = model.predict_on_batch(x[:7])
        with env.scope():
            model = build()
            model.jit_compile = not env.is_reference
            predictions["not compiled"] = model.predict(x, batch_size=6, verbose=0)
        assert trace.called != env.is_reference
    with env.scope():
        model = build()
        model.jit_compile = False
    predictions["without XLA"] = model.predict(x, batch_size=6, verbose=0)
    return predictions


def _cnn() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3, padding="same"),
            layers.LayerNormalization(),
            layers.Activation("relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )


@case("`jit_compile=True`: images of any size, of which a small one is too small")
@registry.same_as("xla_in_all_loops")
def xla_for_images_of_unknown_size(env: Env) -> dict:
    """What XLA lacks is looked for at sizes with which the model can do."""

    def batches() -> Iterator[tuple]:
        rng = np.random.default_rng(0)
        for width in (24, 32):
            x = rng.normal(size=(8, 24, width, 3)).astype("float32")
            yield x, x.mean((1, 2, 3))[:, None]

    def build() -> keras.Model:
        x = inputs = keras.Input((None, None, 3))
        for _ in range(3):  # of 16 pixels they leave none
            x = layers.MaxPooling2D()(layers.Conv2D(2, 3)(x))
        return keras.Model(inputs, layers.Dense(1)(layers.GlobalMaxPooling2D()(x)))

    shapes = (None, None, None, 3), (None, 1)
    data = tf.data.Dataset.from_generator(
        batches, output_signature=tuple(map(tf.TensorSpec, shapes))
    )
    return _trained(env, _compiled(env, build), data)


@case("`jit_compile=True`: a CNN with accumulation, loss scaling, sharded gradients")
@registry.same_as("xla_in_all_loops")
def xla_with_accumulation_scaling_and_shards(env: Env) -> dict:
    # The last of 14 batches has one row: pooling and all else see an empty one too.
    num = 13 * common.BATCH_SIZE + 1
    x = np.random.default_rng(0).normal(size=(num, 8, 8, 3)).astype("float32")
    y = common.labels(x.reshape(num, -1))
    optimizer = optimizers.SGD(
        0.05,
        momentum=0.9,
        clipnorm=1.0,
        gradient_accumulation_steps=2 if env.is_reference else None,
    )
    with env.scope():
        if not env.is_reference:
            optimizer = tfdp.DistributedOptimizer(
                optimizer, accumulation_steps=2, loss_scale=8.0, sharding="gradients"
            )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = _compiled(env, _cnn, optimizer=optimizer, loss=loss, metrics=["accuracy"])
    return _trained(env, model, x, y)


@case("`jit_compile=True`: sharded optimizer, several steps in one execution")
@registry.same_as("xla_in_all_loops")
def xla_with_a_sharded_optimizer_and_steps_per_execution(env: Env) -> dict:
    optimizer: Any = optimizers.AdamW(0.01)
    with env.scope():
        if not env.is_reference:
            optimizer = tfdp.DistributedOptimizer(optimizer, sharding="optimizer")
    model = _compiled(env, common.mlp, optimizer=optimizer, steps_per_execution=3)
    return _trained(env, model, *common.regression_data(60), epochs=2)


class _Penalty(layers.Layer):
    def call(self, x):
        self.add_loss(1e-2 * keras.ops.mean(keras.ops.square(x)))
        return x


def _with_state() -> keras.Model:
    """Moving statistics, which are those of one device only if synchronized."""
    return keras.Sequential(
        [
            keras.Input((common.NUM_FEATURES,)),
            layers.Dense(8, use_bias=False),
            layers.BatchNormalization(momentum=0.8),
            _Penalty(),
            layers.Dense(1, kernel_regularizer="l2"),
        ]
    )


@case(
    "`jit_compile=True`: statistics, losses added, EMA, clipping, uneven workers",
    setups=("two_workers", "two_by_two"),
    compare=False,
)
@registry.same_as("xla_in_all_loops")
def xla_with_state_and_uneven_workers(env: Env) -> dict:
    """Compared with the same workers without XLA."""
    # One has batches of 8, 8 and 8 rows, the other of 8, of one, and of none.
    x, y = common.regression_data((24, 9)[env.rank], seed=env.rank)
    data = with_policy(common.batched(x, y), Policy.OFF)
    found = []
    for is_compiled in (True, False):
        keras.utils.set_random_seed(1)
        keras.backend.clear_session()  # for equal names
        ema = {"use_ema": True, "ema_overwrite_frequency": 2}
        adam = optimizers.Adam(0.01, global_clipnorm=0.5, **ema)
        model = _compiled(env, _with_state, optimizer=adam, metrics=["mae"])
        model.jit_compile = is_compiled
        with warnings.catch_warnings(record=True) as told:  # of the lengths
            warnings.simplefilter("always")
            history = common.fit(model, data)
        state = env.read([*model.weights, *model.optimizer.variables])
        found.append(results.flatten_results({"history": history, "state": state}))
        plan = env.distribution.communication_plan(model)
        assert plan.is_compiled == is_compiled, [str(w.message) for w in told]
    compare.assert_equal_results(*found)
    return {}


def _mixed(env: Env, policy: str, optimizer: keras.Optimizer) -> dict:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = _compiled(env, common.mlp, optimizer=optimizer)
        return _trained(env, model, *common.regression_data())
    finally:
        keras.config.set_dtype_policy(before)


@case("`jit_compile=True`: `mixed_float16` and its loss scaling", tol=4e-3)
@registry.same_as("xla_in_all_loops")
def xla_with_mixed_float16(env: Env) -> dict:
    # By the default scale the gradients of one device overflow, those of a part do not.
    scaled = optimizers.LossScaleOptimizer(optimizers.Adam(0.01), initial_scale=256.0)
    return _mixed(env, "mixed_float16", scaled)


# XLA keeps in float32 what the kernels round to 8 bits, so that plain Keras differs by
# as much with and without it.
@case("`jit_compile=True`: `mixed_bfloat16`", tol=3e-2)
@registry.same_as("xla_in_all_loops")
def xla_with_mixed_bfloat16(env: Env) -> dict:
    return _mixed(env, "mixed_bfloat16", optimizers.Adam(0.01))


class MaskOfOnes(keras.Model):
    """Predicts what its Dropout makes of ones."""

    def predict_step(self, data):
        return self.layers[1](tf.ones_like(data), training=True)


@case(
    "`jit_compile=True`: Dropout's masks differ by replica, its state is one device's"
)
@registry.same_as("xla_in_all_loops")
def xla_with_dropout(env: Env) -> dict:
    def build() -> keras.Model:
        inputs = keras.Input((common.NUM_FEATURES,))
        outputs = layers.Dense(1)(layers.Dropout(0.5, seed=3)(inputs))
        return MaskOfOnes(inputs, outputs)

    x, y = common.regression_data(48)
    model = _compiled(env, build)
    _trained(env, model, x, y)
    masks = model.predict(x, batch_size=24, verbose=0)
    parts = masks.reshape(2 * env.num_replicas, -1)  # of a replica in a step
    assert set(np.unique(masks)) == {0.0, 2.0}
    assert len(np.unique(parts, axis=0)) == len(parts), "two masks are the same"
    return {"seeds": env.read(model.non_trainable_variables)}


@case("`jit_compile=True`: gradients of an Embedding, a masked LSTM")
@registry.same_as("xla_in_all_loops")
def xla_with_rows_and_a_mask(env: Env) -> dict:
    def build() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((common.LENGTH,), dtype="int32"),
                layers.Embedding(common.NUM_TOKENS, 4, mask_zero=True),
                layers.LSTM(4),
                layers.Dense(1),
            ]
        )

    model = _compiled(env, build, optimizer=optimizers.Adam(0.01))
    callbacks: list = []
    if not env.is_reference:  # it adds what XLA lacks to a step, outside of this part
        callbacks = [tfdp.callbacks.CommunicationMonitor(env.tmp / "logs", every=2)]
    return _trained(env, model, *common.token_data(), callbacks=callbacks)


def _wide() -> keras.Model:
    return common.mlp(units=6000)  # 12,000 weights on each of four replicas


@case("`jit_compile=True`: the update of large variables")
@registry.same_as("xla_in_all_loops")
def xla_for_the_update(env: Env) -> dict:
    return _with_an_update(env, "none")


@case("`jit_compile=True`: the update of large variables that are sharded")
@registry.same_as("xla_in_all_loops")
def xla_for_the_update_of_slices(env: Env) -> dict:
    return _with_an_update(env, "optimizer")


def _with_an_update(env: Env, sharding: str) -> dict:
    calls = []
    original = xla.run

    def counted(*args: Any) -> Any:
        calls.append(args)
        return original(*args)

    optimizer: Any = optimizers.AdamW(0.01, epsilon=0.1, clipnorm=1.0)
    with env.scope():
        if not env.is_reference:
            optimizer = tfdp.DistributedOptimizer(optimizer, sharding=sharding)
    keras.utils.set_random_seed(1)
    model = _compiled(env, _wide, optimizer=optimizer)
    with mock.patch.object(xla, "run", counted):
        found = _trained(env, model, *common.regression_data(40))
    assert env.is_reference or calls
    return found


class OwnStep(keras.Model):
    """A step of the user's own, which splits into gradients and `apply`."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            loss += 1e-3 * tf.add_n([tf.nn.l2_loss(w) for w in self.trainable_weights])
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


def _own_step(kind: type[keras.Model]) -> keras.Model:
    plain = common.mlp()
    return kind(plain.inputs, plain.outputs)


@case(
    "`jit_compile=True`: a `train_step` of the user's own",
    quick_setup="two_workers",
)
def xla_with_a_step_of_the_users_own(env: Env) -> dict:
    model = _compiled(env, lambda: _own_step(OwnStep))
    return _trained(env, model, *common.regression_data(92))


class UsesUpdated(OwnStep):
    def train_step(self, data):
        logs = super().train_step(data)
        return logs | {"kernel": tf.reduce_sum(self.trainable_weights[0])}


@case("`jit_compile=True`: a step that uses what its update has changed is left alone")
@registry.same_as("xla_not_where_it_lacks_an_operation")
def xla_not_where_a_step_uses_updated_weights(env: Env) -> dict:
    model = _compiled(env, lambda: _own_step(UsesUpdated))
    reason = "its `train_step` uses a variable after the update that changes it"
    return _without(env, model, reason, *common.regression_data(24))


class _Words(layers.Layer):
    def call(self, x):
        return tf.strings.to_number(tf.strings.as_string(tf.stop_gradient(x))) + x


@case(
    "`jit_compile=True`: an operation that XLA lacks is named",
    quick_setup="two_by_two",
)
def xla_not_where_it_lacks_an_operation(env: Env) -> dict:
    def build() -> keras.Model:
        inputs = keras.Input((common.NUM_FEATURES,))
        return keras.Model(inputs, layers.Dense(1)(_Words()(inputs)))

    model = _compiled(env, build)
    reason = "XLA lacks the operation `AsString`"
    return _without(env, model, reason, *common.regression_data(24))


class _Numbers(layers.Layer):
    def call(self, x):
        return tf.strings.to_number(x)


@case("`jit_compile=True`: strings and ragged rows, which XLA lacks")
@registry.same_as("xla_not_where_it_lacks_an_operation")
def xla_not_with_strings_or_ragged_rows(env: Env) -> dict:
    def build(inputs: Any, layer: layers.Layer) -> keras.Model:
        return keras.Model(inputs, layers.Dense(1)(layer(inputs)))

    ids, y = common.token_data(24)
    of_strings = keras.Input((common.LENGTH,), dtype="string")
    model = _compiled(env, lambda: build(of_strings, _Numbers()))
    data = common.batched(ids.astype(str), y)
    strings = _without(env, model, "a batch has strings", data)
    of_ragged = keras.Input((None,), dtype="int32", ragged=True)
    model = _compiled(env, lambda: build(of_ragged, RaggedMean()))
    data = common.batched(tf.RaggedTensor.from_tensor(ids, padding=0), y)
    return {
        "strings": strings,
        "ragged": _without(env, model, "a batch has a `RaggedTensor`", data),
    }


class _WordsOutsideTraining(_Words):
    def call(self, x, training=None):
        return x if training else super().call(x)


@case("`jit_compile=True`: what XLA lacks in `predict` leaves training compiled")
@registry.same_as("xla_not_where_it_lacks_an_operation")
def xla_in_fit_where_predict_lacks_an_operation(env: Env) -> dict:
    def build() -> keras.Model:
        inputs = keras.Input((common.NUM_FEATURES,))
        return keras.Model(inputs, layers.Dense(1)(_WordsOutsideTraining()(inputs)))

    x, y = common.regression_data(24)
    model = _compiled(env, build)
    found = _trained(env, model, x, y)
    with _told_that_fails(env, "predict", "`AsString`"):
        found["predict"] = model.predict(x, verbose=0)
    with _told_that_fails(env, "evaluate", "`AsString`"):
        found["evaluate"] = model.evaluate(x, y, verbose=0)
    assert model.predict(x, verbose=0).shape == (24, 1)  # without a word
    if not env.is_reference:
        assert "after one XLA cluster" in str(
            env.distribution.communication_plan(model)
        )
    return found


@case("`jit_compile=True`: synchronized BatchNormalization has collectives of its own")
@registry.same_as("xla_not_where_it_lacks_an_operation")
def xla_not_with_collectives_in_the_model(env: Env) -> dict:
    def build() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((common.NUM_FEATURES,)),
                layers.BatchNormalization(synchronized=True),
                layers.Dense(1),
            ]
        )

    reason = "a collective other than those of the gradients"
    return _without(env, _compiled(env, build), reason, *common.regression_data(24))
