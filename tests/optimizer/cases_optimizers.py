"""Every optimizer of Keras, on dense and on sparse gradients, and its options."""

from __future__ import annotations

import functools

import keras
import numpy as np

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env
from tfdp.ground._compat import keras_optimizer

optimizers = keras.optimizers


def token_model() -> keras.Model:
    """Returns a model with an Embedding and two dense kernels."""
    return keras.Sequential(
        [
            keras.Input((common.LENGTH,), dtype="int32"),
            keras.layers.Embedding(common.NUM_TOKENS, 3),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(3, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )


def train_tokens(env: Env, optimizer, build_first: bool = False) -> dict:
    """Trains the model on tokens; returns history, weights and iterations."""
    with env.scope():
        model = common.compiled(token_model(), optimizer())
        if build_first:
            model.optimizer.build(model.trainable_variables)
    history = common.fit(model, *common.token_data())
    return {
        "history": history,
        "weights": env.weights(model),
        "iterations": model.optimizer.iterations.numpy(),
    }


def _register(name: str, optimizer, covers: str, **options) -> None:
    def function(env: Env) -> dict:
        return train_tokens(env, optimizer)

    registry.register(name, function, covers, **options)


EVERY = {
    "sgd_with_momentum": functools.partial(optimizers.SGD, 0.1, momentum=0.9),
    "sgd_with_decay": functools.partial(optimizers.SGD, 0.1, weight_decay=0.01),
    "rmsprop": functools.partial(optimizers.RMSprop, 0.01),
    "adam": functools.partial(optimizers.Adam, 0.01),
    "adamw": functools.partial(optimizers.AdamW, 0.01),
    "adadelta": functools.partial(optimizers.Adadelta, 1.0),
    "adagrad": functools.partial(optimizers.Adagrad, 0.1),
    "adamax": functools.partial(optimizers.Adamax, 0.01),
    "adafactor": functools.partial(optimizers.Adafactor, 0.01),
    "nadam": functools.partial(optimizers.Nadam, 0.01),
    "ftrl": functools.partial(optimizers.Ftrl, 0.1),
    "lion": functools.partial(optimizers.Lion, 0.01),
    "lamb": functools.partial(optimizers.Lamb, 0.01),
    "muon": functools.partial(optimizers.Muon, 0.01),
}

for _name, _optimizer in EVERY.items():
    _register(
        f"optimizer_{_name}",
        _optimizer,
        "Plain training with every optimizer; Embedding with every optimizer",
        tol=5e-5 if _name == "ftrl" else 1e-5,
        same_as="embedding_with_adam",
    )

if hasattr(optimizers, "ScheduleFreeAdamW"):

    @registry.case("Plain training with every optimizer (of newer Keras)")
    @registry.same_as("embedding_with_adam")
    def optimizer_schedule_free_adamw(env: Env) -> dict:
        # Built within `fit` on one device, Keras starts its slots from zeros and
        # not from the variables.
        optimizer = functools.partial(optimizers.ScheduleFreeAdamW, 0.01)
        return train_tokens(env, optimizer, build_first=True)


_register(
    "ema_without_overwrite",
    functools.partial(
        optimizers.SGD, 0.1, momentum=0.9, use_ema=True, ema_momentum=0.8
    ),
    "EMA without overwrite",
    same_as="ema_overwrite_frequency",
)
_OVERWRITING = functools.partial(
    optimizers.SGD,
    0.1,
    momentum=0.9,
    use_ema=True,
    ema_momentum=0.8,
    ema_overwrite_frequency=3,
)
_ACCUMULATING = functools.partial(optimizers.AdamW, 0.01, gradient_accumulation_steps=2)
_register(
    "ema_overwrite_frequency_of_embedding",
    _OVERWRITING,
    "Crash: `use_ema` with `ema_overwrite_frequency`, and an Embedding",
    same_as="ema_overwrite_frequency",
)
_register(
    "gradient_accumulation_steps_of_embedding",
    _ACCUMULATING,
    "Crash: `gradient_accumulation_steps`, and an Embedding",
    same_as="gradient_accumulation_steps",
)


def _train_dense(env: Env, optimizer) -> dict:
    def build():
        return common.compiled(common.mlp(), optimizer())

    return common.train(env, build, *common.regression_data())


@registry.case("Crash: `use_ema` with `ema_overwrite_frequency`")
def ema_overwrite_frequency(env: Env) -> dict:
    return _train_dense(env, _OVERWRITING)


@registry.case("Crash: `gradient_accumulation_steps`")
def gradient_accumulation_steps(env: Env) -> dict:
    return _train_dense(env, _ACCUMULATING)


@registry.case("`loss_scale_factor`")
def loss_scale_factor(env: Env) -> dict:
    # On dense gradients: Keras cannot unscale those of an Embedding.
    scaled = functools.partial(optimizers.Adam, 0.01, loss_scale_factor=128.0)
    return _train_dense(env, scaled)


@registry.case("Learning-rate schedules")
@registry.same_as("warmup_multiplies_a_schedule")
def learning_rate_schedules(env: Env) -> dict:
    schedules = optimizers.schedules
    chosen = {
        "exponential": schedules.ExponentialDecay(0.1, 4, 0.5, staircase=True),
        "cosine": schedules.CosineDecay(
            0.0, 9, warmup_target=0.1, warmup_steps=3, alpha=0.1
        ),
    }
    return {
        name: train_tokens(env, functools.partial(optimizers.SGD, schedule))
        for name, schedule in chosen.items()
    }


@registry.case("Keras's accumulation with a schedule, which counts batches there")
def schedule_of_accumulated_batches(env: Env) -> dict:
    """It still does where Keras's optimizer is wrapped, and in what is saved."""
    schedule = optimizers.schedules.CosineDecay(0.1, 12, warmup_steps=2)
    with env.scope():
        adam = optimizers.Adam(schedule, gradient_accumulation_steps=2)
        model = common.compiled(token_model(), adam)
    extras = [tfdp.callbacks.ShardedOptimizer()] if env.strategy else []
    rates: list[float] = []
    read = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rates.append(
            float(model.optimizer.learning_rate)
        )
    )
    history = common.fit(model, *common.token_data(), callbacks=[*extras, read])
    path = str(env.tmp / "model.keras")
    model.save(path)
    env.wait_for_all("saved")
    saved = keras.models.load_model(path).optimizer
    assert type(keras_optimizer.rate_or_schedule(saved)) is type(schedule)
    return {
        "history": history,
        "weights": env.weights(model),
        "rates": np.array([*rates, float(saved.learning_rate)]),
        "batches": int(saved.variables[0]),
    }


@registry.case("LossScaleOptimizer without overflow")
@registry.same_as("loss_scale_optimizer_with_everything_in_float32")
def loss_scale_optimizer_without_overflow(env: Env) -> dict:
    with env.scope():
        inner = optimizers.SGD(0.1, momentum=0.9)
        optimizer = optimizers.LossScaleOptimizer(
            inner, initial_scale=16.0, dynamic_growth_steps=5
        )
        model = common.compiled(token_model(), optimizer)
    history = common.fit(model, *common.token_data())
    return {
        "history": history,
        "weights": env.weights(model),
        "scale": optimizer.dynamic_scale.numpy(),
    }
