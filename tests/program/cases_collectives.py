"""The collectives of a step: what Keras users build needs none but of its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

import tfdp
from tests.harness import common
from tests.harness.env import Env
from tests.harness.launches import launches
from tests.harness.registry import case, same_as
from tests.program.heads import with_heads
from tests.reduction.cases_plans import step_of

layers, losses, metrics = keras.layers, keras.losses, keras.metrics
NUM_ROWS = 13
Build = Callable[[], keras.Model]


def images() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.normal(size=(NUM_ROWS, 8, 8, 3)).astype("float32")


def dense() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((common.NUM_FEATURES,)),
            layers.Normalization(mean=0.0, variance=1.0),
            layers.Dense(8, activation="gelu", kernel_regularizer="l2"),
            layers.LayerNormalization(),
            layers.Dropout(0.2),
            layers.Dense(8, activation="relu", activity_regularizer="l2"),
            layers.UnitNormalization(),
            layers.Dense(3, activation="softmax"),
        ]
    )


def convolutions() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.DepthwiseConv2D(2),
            layers.GroupNormalization(2),
            layers.SeparableConv2D(4, 2),
            layers.AveragePooling2D(2),
            layers.SpatialDropout2D(0.2),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3, activation="softmax"),
        ]
    )


def augmented() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.RandomFlip(),
            layers.RandomTranslation(0.2, 0.2),
            layers.RandomRotation(0.1),
            layers.RandomContrast(0.2),
            layers.RandomZoom(0.2),
            layers.Rescaling(0.5),
            layers.Flatten(),
            layers.Dense(3, activation="softmax"),
        ]
    )


def transformer() -> keras.Model:
    inputs = keras.Input((common.LENGTH,), dtype="int32")
    x = layers.Embedding(common.NUM_TOKENS, 8)(inputs)
    attention = layers.MultiHeadAttention(2, 4, dropout=0.1)
    x = layers.LayerNormalization()(x + attention(x, x, use_causal_mask=True))
    hidden = layers.Dropout(0.1)(layers.Dense(16, activation="relu")(x))
    x = layers.LayerNormalization()(x + layers.Dense(8)(hidden))
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(3, activation="softmax")(x))


def recurrent() -> keras.Model:
    inputs = keras.Input((common.LENGTH,), dtype="int32")
    x = layers.Embedding(common.NUM_TOKENS, 4, mask_zero=True)(inputs)
    x = layers.Bidirectional(layers.GRU(4, return_sequences=True))(x)
    x = layers.LSTM(4)(x)
    return keras.Model(inputs, layers.Dense(3, activation="softmax")(x))


KINDS: dict[str, tuple[Build, Callable[[], np.ndarray]]] = {
    "dense": (dense, lambda: common.features(NUM_ROWS)),
}
MORE_KINDS: dict[str, tuple[Build, Callable[[], np.ndarray]]] = {
    "convolutions": (convolutions, images),
    "augmented": (augmented, images),
    "transformer": (transformer, lambda: common.tokens(NUM_ROWS)),
    "recurrent": (recurrent, lambda: common.tokens(NUM_ROWS)),
}

# A model without anything that could be converted, and one with a sparse gradient.
LEAST: dict[str, tuple[Build, Callable[[], np.ndarray]]] = {
    "linear": (
        lambda: keras.Sequential(
            [keras.Input((common.NUM_FEATURES,)), layers.Dense(3)]
        ),
        lambda: common.features(NUM_ROWS),
    ),
    "table": (
        lambda: keras.Sequential(
            [
                keras.Input((common.LENGTH,), dtype="int32"),
                layers.Embedding(common.NUM_TOKENS, 4),
                layers.Flatten(),
                layers.Dense(3),
            ]
        ),
        lambda: common.tokens(NUM_ROWS),
    ),
}

LOSSES: list[Any] = [
    losses.CategoricalCrossentropy(label_smoothing=0.1),
    losses.MeanSquaredError(reduction="sum"),
]
MORE_LOSSES: list[Any] = [
    losses.BinaryCrossentropy(),
    losses.CategoricalFocalCrossentropy(),
    losses.Huber(),
    losses.CosineSimilarity(),
    losses.KLDivergence(),
    losses.CategoricalHinge(),
    losses.LogCosh(),
    losses.Poisson(),
]


def few_metrics() -> list:
    return ["accuracy", metrics.AUC(num_thresholds=20)]


def many_metrics() -> list:
    return [
        *few_metrics(),
        metrics.Precision(thresholds=[0.3, 0.5]),
        metrics.Precision(top_k=2, name="top"),
        metrics.F1Score(),
        metrics.TopKCategoricalAccuracy(2),
        metrics.MeanIoU(3, sparse_y_true=False, sparse_y_pred=False),
        metrics.CosineSimilarity(),
        metrics.R2Score(),
    ]


def converting_operations(env: Env, model: keras.Model, x: Any, y: Any) -> list[str]:
    """Return the collectives of a train step but those of buckets, for each device."""
    common.fit(model, x, y, batch_size=NUM_ROWS)
    key, local = env.strategy.extended.group.key, env.setup.devices_per_worker
    found = [
        one.kind
        for one in launches(step_of(model.train_function))
        if one.group_key == key
    ]
    buckets = len(env.strategy.communication_plan(model).buckets)
    assert found.count("all_reduce") >= buckets * local, found
    for _ in range(buckets * local):
        found.remove("all_reduce")
    return found


@case("No collective but of gradients", compare=False)
@same_as("what_a_step_gathers_is_told_once")
def steps_of_common_models_convert_nothing(env: Env) -> dict:
    return check_conversions(env, KINDS, LOSSES, few_metrics)


@case(
    "No collective but of gradients, in more layers, losses and metrics", compare=False
)
@same_as("what_a_step_gathers_is_told_once")
def steps_of_more_models_convert_nothing(env: Env) -> dict:
    return check_conversions(env, MORE_KINDS, LOSSES + MORE_LOSSES, many_metrics)


def check_conversions(
    env: Env,
    kinds: Mapping[str, Any],
    chosen: Sequence[Any],
    make_metrics: Callable[[], list],
) -> dict:
    """Checks that the steps of models have the collectives of the least ones."""
    if env.is_reference:
        return {}
    y = np.eye(3, dtype="float32")[np.arange(NUM_ROWS) % 3]
    found = {}
    for name, (build, data) in (LEAST | kinds).items():
        with env.scope():
            model = build()
            model.compile(keras.optimizers.Adam(0.01), "mse")
        found[name] = converting_operations(env, model, data(), y)
        # The rows of a sparse gradient are no gather that an operation needs.
        gathers = env.strategy.communication_plan(model).gathers["fit"].gathers
        assert not gathers, (name, gathers)
    heads = [str(place) for place in range(len(chosen))]
    with env.scope():
        model = with_heads(
            heads, lambda name: layers.Dense(3, activation="softmax", name=name)
        )
        model.compile(
            keras.optimizers.SGD(0.01),
            dict(zip(heads, chosen, strict=True)),
            metrics={"0": make_metrics()},
        )
    x = common.features(NUM_ROWS)
    found["losses and metrics"] = converting_operations(
        env, model, x, dict.fromkeys(heads, y)
    )
    # The rows of a batch are counted in every step, and the rows of a sparse gradient
    # gathered; nothing else is.
    least = {name: found.pop(name) for name in LEAST}
    assert not {kind for one in least.values() for kind in one} - {"all_gather"}
    of_tokens = ("transformer", "recurrent")
    for name, collectives in found.items():
        expected = least["table" if name in of_tokens else "linear"]
        assert collectives == expected, (name, collectives, expected)
    return {}


@case(
    "Several steps an execution: what one step exchanges",
    setups=("two_workers", "two_by_two"),
    compare=False,
)
@same_as("what_a_step_gathers_is_told_once")
def several_steps_an_execution_exchange_what_one_step_does(env: Env) -> dict:
    if env.is_reference:
        return {}
    x = common.features(4 * NUM_ROWS)
    found = []
    for steps in (1, 2):
        with env.scope():
            model = LEAST["linear"][0]()
            model.compile("sgd", "mse", steps_per_execution=steps)
        common.fit(model, x, x[:, :3], batch_size=NUM_ROWS)
        exchanged = launches(step_of(model.train_function))
        found.append(sorted((one.kind, one.dtype) for one in exchanged))
    assert found[0] == found[1]
    # The gradients of one bucket, and the logs.
    assert len(found[0]) == env.setup.devices_per_worker + 1, found
    return {}


@case("Sums of micro-batches are reduced as planned before training", compare=False)
def sums_of_micro_batches_are_reduced_as_planned(env: Env) -> None:
    if env.is_reference:
        return
    with env.scope():
        model = keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                layers.Embedding(300, 300),
                layers.GlobalAveragePooling1D(),
                layers.Dense(4, dtype="bfloat16"),
                layers.Dense(300, dtype="float32"),
            ]
        )
        optimizer = tfdp.DistributedOptimizer(
            keras.optimizers.SGD(), accumulation_steps=2
        )
        model.compile(optimizer, "mse", jit_compile=False)
    planned = env.strategy.communication_plan(model)
    x, y = np.zeros((32, 5), "int32"), np.zeros((32, 300), "float32")
    common.fit(model, x, y, batch_size=16)
    traced = env.strategy.communication_plan(model)
    assert (planned.traced, traced.traced) == (False, True)
    assert planned.buckets == traced.buckets, (planned.buckets, traced.buckets)
    assert {bucket.dtype for bucket in traced.buckets} == {"float32"}
    assert planned.sparse == traced.sparse == ()
