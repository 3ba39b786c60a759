"""Losses of Keras with reductions, weights and masks, on rows that do not divide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.exactness.cases_exactness import precision
from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as
from tests.program.heads import (
    BATCH_ROWS,
    MORE_ROWS,
    NUM_ROWS,
    features,
    labels,
    train_heads,
)

layers, losses, ops = keras.layers, keras.losses, keras.ops
_CASE: dict[str, Any] = {"tol": 1e-9, "deadline_seconds": 300.0}

OF_KERAS: dict[str, Callable[..., Any]] = {
    "mse": losses.MeanSquaredError,
    "mae": losses.MeanAbsoluteError,
    "mape": losses.MeanAbsolutePercentageError,
    "msle": losses.MeanSquaredLogarithmicError,
    "huber": losses.Huber,
    "log_cosh": losses.LogCosh,
    "cosine": losses.CosineSimilarity,
    "poisson": losses.Poisson,
    "kl": losses.KLDivergence,
    "hinge": losses.Hinge,
    "squared_hinge": losses.SquaredHinge,
    "categorical_hinge": losses.CategoricalHinge,
    "binary": losses.BinaryCrossentropy,
    "binary_focal": losses.BinaryFocalCrossentropy,
    "categorical": losses.CategoricalCrossentropy,
    "focal": losses.CategoricalFocalCrossentropy,
    "smoothed": lambda **options: losses.CategoricalCrossentropy(
        label_smoothing=0.1, **options
    ),
    "dice": losses.Dice,
    "tversky": losses.Tversky,
    "dice_of_columns": lambda **options: losses.Dice(axis=0, **options),
    "tversky_of_columns": lambda **options: losses.Tversky(
        alpha=0.3, beta=0.7, axis=0, **options
    ),
}


def with_reductions(*names: str) -> dict[str, keras.losses.Loss]:
    """Return losses of Keras with every other reduction."""
    return {
        f"{name}_{reduction}": OF_KERAS[name](reduction=reduction)
        for name in names
        for reduction in ("sum", "mean", "mean_with_sample_weight")
    }


@case("Losses of Keras, as they are and with other reductions", **_CASE)
@same_as("losses_that_couple_rows")
def losses_of_keras(env: Env) -> dict:
    with precision("float64"):
        chosen = {name: make() for name, make in OF_KERAS.items()}
        chosen |= with_reductions("mse", "huber", "categorical", "dice")
        weights = {name: 0.5 + 0.1 * place for place, name in enumerate(chosen)}
        return train_heads(
            env, chosen, targets=labels, rate=0.005, loss_weights=weights
        )


@case("Losses of Keras with weights of samples and classes", **_CASE)
@same_as("sample_weight")
def losses_of_keras_with_weights(env: Env) -> dict:
    results: dict[str, Any] = {}
    with precision("float64"):
        chosen: dict[str, Any] = {
            **with_reductions("mse", "categorical"),
            "number": lambda y, p: ops.mean(ops.square(y - p)),
            "total": lambda y, p: ops.sum(ops.square(y - p), axis=-1),
        }
        weights = dict.fromkeys(chosen, np.linspace(0.0, 2.0, NUM_ROWS))
        results["samples"] = train_heads(
            env,
            chosen,
            targets=labels,
            rate=0.005,
            fit_options={"sample_weight": weights},
            weighted_metrics={"mse_mean": ["mae"], "categorical_mean": ["accuracy"]},
        )
        x = features()

        def build() -> keras.Model:
            model = common.mlp(outputs=3)
            loss = losses.SparseCategoricalCrossentropy(from_logits=True)
            return common.compiled(model, loss=loss, weighted_metrics=["accuracy"])

        results["classes"] = common.train(
            env,
            build,
            x,
            common.labels(x),
            class_weight={0: 0.5, 1: 1.0, 2: 3.0},
            batch_size=BATCH_ROWS,
        )
    return results


# Images.


def segmentation_losses() -> dict[str, Any]:
    return {
        "dice": losses.Dice(axis=(0, 1, 2)),
        "dice_of_each": losses.Dice(axis=(1, 2, 3)),
        "dice_of_all": losses.Dice(),
        "tversky": losses.Tversky(axis=(0, 1, 2)),
        "dice_summed": losses.Dice(axis=(1, 2), reduction="sum"),
        "binary": losses.BinaryCrossentropy(),
        "edges": lambda y, p: ops.mean(
            tf.abs(tf.image.sobel_edges(y) - tf.image.sobel_edges(p))
        ),
        "variation": lambda y, p: (
            ops.mean(ops.square(y - p))
            + 1e-3 * tf.reduce_sum(tf.image.total_variation(p))
        ),
        # TensorFlow computes it in float32: the mean of all images would be rounded.
        "similarity": lambda y, p: (
            1
            - tf.reduce_mean(tf.cast(tf.image.ssim(y, p, 1.0, filter_size=3), p.dtype))
        ),
    }


@case("Dice and Tversky over a batch of images", **_CASE)
@same_as("losses_that_couple_rows")
def losses_of_segmentation(env: Env) -> dict:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_ROWS, 6, 6, 2))
    y = (x[..., :1] + 0.5 * rng.normal(size=(NUM_ROWS, 6, 6, 1)) > 0.4).astype(float)

    def build() -> keras.Model:
        inputs = keras.Input((6, 6, 2))
        h = layers.Conv2D(4, 3, padding="same", activation="tanh")(inputs)
        outputs = {
            name: layers.Conv2D(1, 1, activation="sigmoid", name=name)(h)
            for name in chosen
        }
        model = keras.Model(inputs, outputs)
        return common.compiled(model, keras.optimizers.SGD(0.05), chosen)

    with precision("float64"):
        chosen = segmentation_losses()
        data = x, dict.fromkeys(chosen, y)
        return common.train(
            env, build, *data, batch_size=BATCH_ROWS, epochs=2, validation_data=data
        )


# Sequences.


def masked_translation(y: Any, p: Any) -> Any:
    """The loss of TensorFlow's translation tutorials: the mean over real tokens."""
    each = losses.sparse_categorical_crossentropy(y, p, from_logits=True)
    mask = tf.cast(y != 0, each.dtype)
    return tf.reduce_sum(each * mask) / tf.reduce_sum(mask)


def masked_accuracy(y: Any, p: Any) -> Any:
    hits = tf.cast(tf.argmax(p, -1), tf.int64) == tf.cast(y, tf.int64)
    mask = tf.cast(y != 0, p.dtype)
    return tf.reduce_sum(tf.cast(hits, p.dtype) * mask) / tf.reduce_sum(mask)


def tokens() -> tuple[np.ndarray, np.ndarray]:
    x = common.tokens(NUM_ROWS)
    return x, np.roll(x, -1, axis=1)


def token_model(mask_zero: bool) -> keras.Model:
    inputs = keras.Input((common.LENGTH,), dtype="int32")
    h = layers.Embedding(common.NUM_TOKENS, 4, mask_zero=mask_zero)(inputs)
    return keras.Model(inputs, layers.Dense(common.NUM_TOKENS)(h))


def each_token(reduction: str) -> keras.losses.Loss:
    return losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def scalar_of_tokens(y: Any, p: Any) -> Any:
    """One number, which Keras multiplies by the mask."""
    return ops.mean(losses.sparse_categorical_crossentropy(y, p, from_logits=True))


@case("Losses of sequences with and without Keras's mask", **_CASE)
@same_as("unequal_shares_with_masked_mean_accumulated")
def losses_of_masked_sequences(env: Env) -> dict:
    results = {}
    x, y = tokens()
    with precision("float64"):
        chosen: dict[str, tuple[Any, bool]] = {
            "translation": (masked_translation, False),
            "masked_translation": (masked_translation, True),
            "scalar": (scalar_of_tokens, True),
            "sum": (each_token("sum"), True),
            "mean": (each_token("sum_over_batch_size"), True),
            "mean_of_real": (each_token("mean_with_sample_weight"), True),
        }
        for name, (loss, has_mask) in chosen.items():

            def build(loss: Any = loss, has_mask: bool = has_mask) -> keras.Model:
                model = token_model(has_mask)
                rate = keras.optimizers.SGD(0.02)
                # Keras multiplies by its mask only what has a number for each token.
                metrics = ["accuracy"] if has_mask else ["accuracy", masked_accuracy]
                return common.compiled(model, rate, loss, metrics=metrics)

            results[name] = common.train(
                env, build, x, y, batch_size=BATCH_ROWS, validation_data=(x, y)
            )
    return results


def connectionist(y: Any, p: Any) -> Any:
    """CTC of the whole length, with labels of different lengths."""
    lengths = ops.sum(ops.cast(y != 0, "int32"), axis=-1)
    steps = ops.full_like(lengths, ops.shape(p)[1])
    return ops.ctc_loss(ops.cast(y, "int32"), p, lengths, steps, mask_index=0)


@case("CTC, with a replica that has no rows")
@same_as("losses_that_couple_rows")
def losses_of_unaligned_sequences(env: Env) -> dict:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_ROWS, 8, 4)).astype("float32")
    y = rng.integers(1, 5, size=(NUM_ROWS, 3)).astype("int32")
    y[::3, 2] = 0
    chosen: dict[str, Any] = {"keras": losses.CTC(), "own": connectionist}

    def build() -> keras.Model:
        inputs = keras.Input((8, 4))
        h = layers.Dense(8, activation="tanh")(inputs)
        outputs = {name: layers.Dense(6, name=name)(h) for name in chosen}
        model = keras.Model(inputs, outputs)
        return common.compiled(model, keras.optimizers.SGD(0.01), chosen)

    data = x, dict.fromkeys(chosen, y)
    return common.train(
        env, build, *data, batch_size=BATCH_ROWS, epochs=2, validation_data=data
    )


# What a model adds, or computes itself.


class Penalties(layers.Layer):
    """Adds means, sums and statistics of its input to the loss."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * ops.mean(ops.square(inputs)))
        self.add_loss(0.01 * ops.sum(ops.abs(inputs)))
        self.add_loss(0.1 * ops.sum(ops.var(inputs, axis=0)))
        means = ops.mean(ops.sigmoid(inputs), axis=0)
        self.add_loss(ops.sum(0.3 * ops.log(0.3 / means)))
        self.add_loss(0.1 * ops.mean(ops.matmul(inputs, ops.transpose(inputs))))
        return inputs


class OwnLoss(keras.Model):
    """Overrides `compute_loss`, and has no loss in `compile`."""

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        del sample_weight, training
        gap = ops.mean(ops.square(y["own"] - y_pred["own"]), axis=0)
        return ops.sqrt(ops.sum(gap)) + ops.sum(self.losses) + 0.1 * ops.var(x)


@case("`add_loss`, activity regularizers and `compute_loss`", **_CASE)
@same_as("add_loss")
def losses_that_models_compute(env: Env) -> dict:
    return _with_own_losses(env, OwnLoss, None)


@case("`add_loss` and activity regularizers beside a loss of `compile`", **_CASE)
@same_as("add_loss")
def losses_that_models_add(env: Env) -> dict:
    return _with_own_losses(env, keras.Model, "mse")


def _with_own_losses(env: Env, kind: type, loss: Any) -> dict:
    """Trains a model that adds losses to that of `compile`, or to its own."""

    def activity(values: Any) -> Any:
        return 0.1 * ops.mean(ops.abs(values)) + 0.1 * ops.max(values)

    def parts() -> tuple[Any, Any]:
        inputs = keras.Input((common.NUM_FEATURES,))
        dense = layers.Dense(4, activation="tanh", activity_regularizer=activity)
        h = Penalties()(dense(inputs))
        return inputs, {"own": layers.Dense(3, name="own")(h)}

    def build() -> keras.Model:
        return common.compiled(kind(*parts()), keras.optimizers.SGD(0.02), loss)

    x = features()
    y = {"own": labels(x)}
    with precision("float64"):
        return common.train(
            env, build, x, y, batch_size=MORE_ROWS, epochs=2, validation_data=(x, y)
        )
