"""Bad input of the optimizer and its callbacks: one sentence that says what to do."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import keras
import numpy as np
import pytest

import tfdp
from tests.harness.pool import ClusterPool
from tests.harness.registry import load_cases
from tests.harness.tiers import full
from tfdp.ground._compat import optimizer_views
from tfdp.ground.plans.sharding import ShardingOptions

WITHIN_SECONDS = 10.0
CASES = load_cases(("optimizer.cases_bad_input",))
optimizers = keras.optimizers
Optimizer, callbacks = tfdp.DistributedOptimizer, tfdp.callbacks


def check(text: str, *parts: str) -> None:
    """Short, on one line, and it says what is to be said."""
    assert "\n" not in text
    assert len(text) < 300
    for part in parts:
        assert part in text, text


def refused(action: Callable[[], object], *parts: str) -> None:
    with pytest.raises(ValueError, match=re.escape(parts[0])) as caught:
        action()
    check(str(caught.value), *parts)


def sgd(**options) -> optimizers.Optimizer:
    return optimizers.SGD(0.1, **options)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "4", None])
def test_accumulation_steps_that_are_no_positive_integer_are_refused(steps):
    expected = (
        "must be an integer of at least 1",
        f"Received: accumulation_steps={steps!r}",
    )
    refused(lambda: Optimizer(sgd(), accumulation_steps=steps), *expected)
    optimizer = Optimizer(sgd())
    refused(lambda: setattr(optimizer, "accumulation_steps", steps), *expected)


@pytest.mark.parametrize("scale", ["static", 0, -2.0, math.nan, math.inf, True, [1.0]])
def test_loss_scale_that_is_no_positive_number_is_refused(scale):
    expected = "positive number", f"Received: loss_scale={scale!r}"
    refused(lambda: Optimizer(sgd(), loss_scale=scale), *expected)


class Halving(optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        super().apply([0.5 * g for g in grads], trainable_variables)


def test_a_scaled_loss_with_an_apply_of_the_users_own_is_refused():
    weight = keras.Variable([1.0])
    optimizer = Optimizer(Halving(0.1), loss_scale=2.0)
    update = lambda: optimizer.apply([np.float32([1.0])], [weight])  # noqa: E731
    refused(update, "`Halving` overrides `apply`", "Override `update_step`")
    assert weight.numpy() == 1.0


@pytest.mark.parametrize("name", ["initial_scale", "min_scale"])
@pytest.mark.parametrize("scale", [0, -1.0, math.nan, math.inf, "big", None])
def test_scale_of_loss_scaling_that_is_not_positive_is_refused(name, scale):
    refused(
        lambda: callbacks.LossScaling(**{name: scale}),
        "must be a positive number",
        f"Received: {name}={scale!r}",
    )


@pytest.mark.parametrize("steps", [0, -1, 1.5, None, True])
def test_growth_steps_that_are_no_positive_integer_are_refused(steps):
    refused(
        lambda: callbacks.LossScaling(growth_steps=steps),
        "must be an integer of at least 1",
        f"Received: growth_steps={steps!r}",
    )


def test_smallest_scale_above_the_first_is_refused():
    refused(
        lambda: callbacks.LossScaling(2.0, min_scale=4.0),
        "`min_scale` must not be above `initial_scale`",
        "min_scale=4.0",
    )


@pytest.mark.parametrize("sharding", ["zero", 1, True, None])
def test_sharding_that_is_unknown_is_refused(sharding):
    expected = "`sharding` must be one of", f"Received: sharding={sharding!r}"
    refused(lambda: Optimizer(sgd(), sharding=sharding), *expected)


@pytest.mark.parametrize("scope", ["host", "ALL", None, 2])
def test_shard_scope_that_is_unknown_is_refused(scope):
    expected = (
        '`shard_scope` must be "all" or "node"',
        f"Received: shard_scope={scope!r}",
    )
    refused(lambda: Optimizer(sgd(), shard_scope=scope), *expected)
    refused(lambda: callbacks.ShardedOptimizer(shard_scope=scope), *expected)


@pytest.mark.parametrize("stage", [0, 4, -1, 1.5, True, "1", None])
def test_stage_of_sharding_that_is_not_one_to_three_is_refused(stage):
    refused(
        lambda: callbacks.ShardedOptimizer(stage),
        "`stage` must be 1, 2 or 3",
        f"Received: stage={stage!r}",
    )


def test_sharding_twice_in_different_ways_is_refused():
    optimizer = Optimizer(sgd(), sharding="optimizer")
    optimizer.shard(ShardingOptions("optimizer", "all"))
    for names in ("gradients", "all"), ("optimizer", "node"), ("none", "all"):
        refused(
            lambda n=names: optimizer.shard(ShardingOptions(*n)),
            "The optimizer is already sharded",
            'sharding="optimizer", shard_scope="all"',
            f'Received: sharding="{names[0]}", shard_scope="{names[1]}"',
        )
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    refused(
        lambda: callbacks.ShardedOptimizer(2).set_model(model),
        "The optimizer is already sharded",
    )


def test_units_are_the_old_name_of_gather_groups():
    for kind in (Optimizer, callbacks.ShardedOptimizer):
        given = (sgd(),) if kind is Optimizer else (3,)
        sharded = {"sharding": "parameters"} if kind is Optimizer else {}
        with pytest.warns(UserWarning, match="`units` is deprecated"):
            old = kind(*given, units=["dense"], **sharded)
        new = kind(*given, gather_groups=["dense"], **sharded)
        with pytest.raises(ValueError, match="Give `gather_groups` alone"):
            kind(*given, units=["dense"], gather_groups=["dense"], **sharded)
        settings = [
            each.get_config() if kind is Optimizer else each.settings
            for each in (old, new)
        ]
        assert settings[0]["gather_groups"] == ["dense"]
        assert settings[0]["gather_groups"] == settings[1]["gather_groups"]


def test_options_of_units_are_checked():
    for options, text in (
        ({"gather_groups": "dense"}, "`gather_groups` must be a list of names"),
        ({"gather_groups": [3]}, "`gather_groups` must be a list of names"),
        ({"reshard_after_forward": "all"}, "`reshard_after_forward` must be one of"),
        ({"prefetch": -1}, "`prefetch` must be an integer of at least 0"),
        ({"prefetch": True}, "`prefetch` must be an integer of at least 0"),
        (
            {"gather_compression": "int4"},
            '`gather_compression` must be `None` or "int8"',
        ),
    ):
        ((name, value),) = options.items()
        received = f"Received: {name}={value!r}"
        refused(
            lambda o=options: Optimizer(sgd(), sharding="parameters", **o),
            text,
            received,
        )
        refused(lambda o=options: callbacks.ShardedOptimizer(3, **o), text, received)
    refused(
        lambda: callbacks.ShardedOptimizer(2, prefetch=2),
        "need sharded parameters. Set",
        "prefetch=2",
    )
    for sharding in ("none", "optimizer", "gradients"):
        refused(
            lambda s=sharding: Optimizer(sgd(), sharding=s, gather_compression="int8"),
            "`gather_compression` is for sharded parameters, stage 3",
            f"Received: gather_compression='int8', sharding={sharding!r}",
        )


def test_sharding_on_one_device_changes_nothing():
    optimizer = Optimizer(sgd(), sharding="gradients", accumulation_steps=2)
    optimizer.build([keras.Variable(np.zeros(2, "float32"))])
    assert not optimizer.is_sharded


def test_wrapping_twice_is_refused():
    wrapped = Optimizer(sgd())
    scaled = optimizers.LossScaleOptimizer(wrapped)
    for optimizer in wrapped, scaled:
        refused(
            lambda o=optimizer: Optimizer(o),
            "is a `DistributedOptimizer` already",
            "where it is made",
        )


@pytest.mark.parametrize("optimizer", ["adam", None, optimizers.SGD])
def test_wrapping_what_is_no_optimizer_is_refused(optimizer):
    refused(lambda: Optimizer(optimizer), "must be a Keras optimizer", "Received: ")


class Warmed(optimizers.SGD):
    """A user's optimizer whose `get_config` is missing."""

    def __init__(self, rate: float, steps: int) -> None:
        super().__init__(rate)
        self.steps = steps


def test_optimizer_that_cannot_be_cloned_is_refused():
    refused(
        lambda: optimizer_views.plain_clone(Warmed(0.1, 3)),
        "`Warmed` cannot be created from its config, which sharding needs. Write",
    )


def test_number_of_micro_batches_given_to_both_places_is_refused():
    refused(
        lambda: Optimizer(sgd(gradient_accumulation_steps=2), accumulation_steps=4),
        "Give the number of micro-batches once",
        "accumulation_steps=4",
        "gradient_accumulation_steps=2",
    )


@pytest.mark.skipif(
    not hasattr(optimizers, "MultiOptimizer"), reason="this Keras has none"
)
def test_parts_that_accumulate_differently_are_refused():
    chosen = {"kernel": sgd(gradient_accumulation_steps=2)}
    multi = optimizers.MultiOptimizer(optimizers.OptimizerMap(sgd(), chosen))
    refused(
        lambda: Optimizer(multi),
        "must have the same `gradient_accumulation_steps`",
        "[1, 2]",
    )


@pytest.mark.parametrize(
    "steps", [0, -1, 2.5, True, "4", None, {}, {0: 0}, {0: 2, -1: 3}, {0.5: 2}]
)
def test_schedule_of_micro_batches_that_is_no_schedule_is_refused(steps):
    refused(lambda: callbacks.GradientAccumulation(steps), "Received: ")


def test_unknown_flush_is_refused():
    refused(
        lambda: callbacks.GradientAccumulation(4, flush="batch"),
        '`flush` must be `None` or "epoch"',
        "Received: flush='batch'",
    )


@pytest.mark.parametrize("name", ["epochs", "steps", "initial_factor"])
@pytest.mark.parametrize("value", [0, -1, "5", True])
def test_warmup_whose_length_or_factor_is_not_positive_is_refused(name, value):
    what = "an integer of at least 1" if name == "steps" else "a positive number"
    refused(
        lambda: callbacks.LearningRateWarmup(**{name: value}),
        f"`{name}` must be {what}",
        f"Received: {name}={value!r}",
    )


def test_warmup_with_both_lengths_is_refused():
    refused(
        lambda: callbacks.LearningRateWarmup(epochs=5, steps=100),
        "Give `epochs` or `steps`, not both",
    )


@pytest.mark.parametrize("smoothing", [1, 1.5, -0.1, math.nan, "0.9"])
def test_smoothing_outside_its_range_is_refused(smoothing):
    refused(lambda: callbacks.GradientNoiseScale(smoothing), "from 0 to below 1")


def test_noise_scale_on_one_device_is_refused():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callback = callbacks.GradientNoiseScale()
    refused(lambda: callback.set_model(model), "of several replicas")


def test_apply_with_too_few_gradients_or_without_variables_is_refused():
    variables = [keras.Variable(np.zeros(2, "float32")) for _ in range(2)]
    gradients = [np.zeros(2, "float32")]
    refused(lambda: Optimizer(sgd()).apply(gradients), "build the optimizer")
    optimizer = Optimizer(sgd())
    refused(lambda: optimizer.apply(gradients, variables), "1 gradient for 2 variables")


def test_callback_on_a_model_that_is_not_compiled_is_refused_on_one_device():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    callback = callbacks.LossScaling()
    refused(lambda: callback.set_model(model), "`model.compile(optimizer=...)` first")


# On both strategies, and on every worker.

SCOPE = "outside `strategy.scope()`. Create a new one, inside the scope."
COMPILE = "Call `model.compile(optimizer=...)` first."
EXPECTED = {
    "wrapped, built outside the scope": SCOPE,
    "compiled, built outside the scope": SCOPE,
    "accumulation, not compiled": f"`GradientAccumulation` needs a model.*{COMPILE}",
    "scaling, not compiled": f"`LossScaling` needs a model.*{COMPILE}",
    "warmup, not compiled": f"`LearningRateWarmup` needs a model.*{COMPILE}",
    "noise, not compiled": f"`GradientNoiseScale` needs a model.*{COMPILE}",
    "sharding, not compiled": f"`ShardedOptimizer` needs a model.*{COMPILE}",
    "sharded, clips by itself": "overrides `_clip_gradients`.*Override `update_step`",
    "sharded, with state": "overrides `apply` and `build`.*Override `update_step`",
    "sharded, draws": "its `update_step` draws random numbers.*Train without sharding",
    "a class": "Received: the class `ConsistencyCheck`",
    "apply outside `run`": "given to `strategy.run`",
    "apply outside the scope": "given to `strategy.run`",
    "warmup of unknown length": "`LearningRateWarmup(steps=...)`",
}


def errors(clusters: ClusterPool, name: str, setup_name: str) -> list[dict[str, str]]:
    """The texts by name on each worker, all raised as `ValueError` and in time."""
    workers = []
    for results in clusters.run(CASES[name], setup_name):
        names = {key.split("/")[1] for key in results}
        texts = {}
        for what in names:
            got = {key: results[f"local/{what}/{key}"] for key in _KEYS}
            assert got["type"] == "ValueError", (what, got)
            assert got["seconds"] < WITHIN_SECONDS
            texts[what] = str(got["text"])
        workers.append(texts)
    return workers


_KEYS = "type", "text", "seconds"


@pytest.mark.parametrize(
    "setup_name", [full("mirrored"), full("two_workers"), "two_by_two"]
)
def test_wrong_uses_under_a_strategy_are_refused_by_every_worker(clusters, setup_name):
    for texts in errors(clusters, "wrong_uses_of_the_optimizer", setup_name):
        assert sorted(texts) == sorted(EXPECTED)
        for what, text in texts.items():
            check(text, *EXPECTED[what].split(".*"))


def test_callback_under_another_strategy_says_which_is_needed(clusters):
    (texts,) = errors(clusters, "callback_under_a_stock_strategy", "mirrored")
    assert len(texts) == 2
    for text in texts.values():
        check(
            text,
            "use `tfdp.MirroredStrategy`",
            "Received: tensorflow.python.distribute",
        )


def test_two_callbacks_that_change_the_same_and_classes_are_refused():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    kinds = (
        callbacks.GradientAccumulation,
        callbacks.GradientNoiseScale,
        callbacks.LearningRateWarmup,
        callbacks.LossScaling,
        callbacks.SpikeGuard,
    )
    for kind in kinds:
        text = f"Give `fit` one `tfdp.callbacks.{kind.__name__}`. Received: 2"
        refused(lambda k=kind: model.fit(np.zeros((2, 2)), callbacks=[k(), k()]), text)
    for kind in callbacks.ConsistencyCheck, callbacks.BackupAndRestore:
        text = f"Received: the class `{kind.__name__}`"
        refused(lambda k=kind: model.fit(np.zeros((2, 2)), callbacks=[k]), text)


@pytest.mark.parametrize("strategy", [tfdp.MirroredStrategy, tfdp.auto_strategy])
def test_options_that_are_no_options_are_refused(strategy):
    refused(
        lambda: strategy(communication="ring"),
        "`communication` must be a `tfdp.CommunicationOptions` or None.",
        "Received: communication='ring'",
    )


def test_numbers_of_batches_in_two_places_are_refused():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(Optimizer(sgd(), accumulation_steps=3), "mse")
    for steps in (2, {0: 2, 5: 4}):
        callback = callbacks.GradientAccumulation(steps)
        refused(lambda c=callback: c.set_model(model), "in one place", "steps=")
    # The same number, as a file that is loaded may hold it, is no contradiction.
    callbacks.GradientAccumulation({0: 3, 5: 4}).set_model(model)
    callbacks.GradientAccumulation(2).set_model(model)
