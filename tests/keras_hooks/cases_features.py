"""Features: what is added to training by hooks, and the core does not know."""

from __future__ import annotations

import collections
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as
from tests.reduction import cases_plans as plans
from tfdp.callbacks.bases import OptimizerCallback
from tfdp.ground._compat import tf_distribute
from tfdp.ground.base import feature
from tfdp.ground.base.feature import Feature, register, registered, unregister
from tfdp.training.keras_hooks.worker_callbacks import callback_list
from tfdp.training.step.step import StepFeature


# That of CONTRIBUTING.md, to the letter.
class GradientNorm(StepFeature):
    measures_norm = True

    def __init__(self, make_variable):
        self.norm = make_variable(shape=(), dtype="float32", name="norm")

    @property
    def variables(self):
        return [self.norm]

    def examine(self, step, totals, divisor, statistics):
        part = tf_distribute.local_part(self.norm)
        part.assign(tf.sqrt(statistics.squared_norm()), read_value=False)


class LogNorm(OptimizerCallback):
    """Switches the feature on, and logs what it measures."""

    def enable_feature(self, optimizer):
        optimizer.features.install(GradientNorm)

    def on_epoch_end(self, epoch, logs=None):
        found = self.optimizer.features.installed[GradientNorm]
        logs["norm"] = float(found.norm.numpy())


@case("a feature of ten lines in the step")
def a_feature_in_the_step_sees_the_gradient_of_the_global_batch(env: Env) -> dict:
    return {"norm": _norm_of_first_update(env)}


@case("a step without features has no operation of theirs", compare=False)
def features_that_are_off_leave_no_operation(env: Env) -> dict:
    steps = []
    for features in (registered(), ()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(feature, "_registered", list(features))
            with env.scope():
                model = common.compiled(common.mlp())
            common.fit(model, *common.regression_data())
        graph = plans.step_of(model.train_function).graph.as_graph_def()
        functions = (function.node_def for function in graph.library.function)
        nodes = itertools.chain(graph.node, *functions)
        steps.append(collections.Counter(node.op for node in nodes))
    assert steps[0] == steps[1]
    return {}


@case("a feature in the step of sharded gradients")
@same_as("a_feature_in_the_step_sees_the_gradient_of_the_global_batch")
def a_feature_sees_gradients_that_are_accumulated_and_sharded(env: Env) -> dict:
    return {
        "norm": _norm_of_first_update(env, accumulation_steps=2, sharding="gradients")
    }


def _norm_of_first_update(env: Env, accumulation_steps: int = 1, **options) -> list:
    x, y = common.regression_data()
    settings = {"accumulation_steps": accumulation_steps, **options}

    def new_model() -> keras.Model:
        optimizer = tfdp.DistributedOptimizer(_sgd(), **settings)
        return common.compiled(common.mlp(), optimizer)

    model = common.build_in_scope(env, new_model)
    size = len(x) // accumulation_steps
    given = {"batch_size": size, "epochs": 1, "verbose": 0, "shuffle": False}
    model.fit(x, y, **given)  # traces a step without the feature
    first = [np.array(v) for v in model.trainable_variables]
    history = model.fit(x, y, callbacks=[LogNorm()], **given).history
    last = [np.array(v) for v in model.trainable_variables]
    moved = sum(np.sum((a - b) ** 2) for a, b in zip(first, last, strict=True))
    np.testing.assert_allclose(history["norm"][0], np.sqrt(moved) / RATE, rtol=1e-4)
    return history["norm"]


RATE = 0.01


def _sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(RATE)


class Recorder(Feature):
    """Keeps the hooks that were called."""

    def __init__(self):
        self.called: list[str] = []

    def before_loop(self, model):
        self.called.append("before")

    def choose_callbacks(self, fit):
        self.called.append("choose")
        given = callback_list(fit.arguments["callbacks"])
        fit.arguments["callbacks"] = [*given, Fails()]

    def after_fit(self, fit):
        self.called.append("after")


class Fails(keras.callbacks.Callback):
    """Ends training with an error."""

    def on_epoch_end(self, epoch, logs=None):
        raise KeyError("enough")


@case("a feature around a loop", compare=False)
def a_feature_acts_before_and_after_a_fit_also_one_that_fails(env: Env) -> dict:
    if env.strategy is None:
        return {}
    model = common.build_in_scope(env, lambda: common.compiled(common.mlp()))
    x, y = common.regression_data()
    recorder = register(Recorder())
    try:
        model.fit(x, y, verbose=0)
    except KeyError:
        recorder.called.append("failed")
    finally:
        unregister(recorder)
    model.evaluate(x, y, verbose=0)
    assert recorder.called == ["before", "choose", "after", "failed"]
    return {}
