"""TensorFlow's own tests of what a strategy promises, on tfdp's strategies.

`strategy_test_lib` in TensorFlow's wheel holds them as mixins, whose methods its
tests of each strategy call. The arguments below are those that TensorFlow gives
for `MirroredStrategy` on two devices.
"""

from __future__ import annotations

import collections.abc
import io
import unittest

import tensorflow as tf
from tensorflow.python.distribute import strategy_test_lib as lib

import tfdp
from tests.harness.env import Env
from tests.harness.registry import register

DEVICES = ["CPU:0", "CPU:1"]
Action = collections.abc.Callable[[unittest.TestCase, tf.distribute.Strategy], None]

# Methods of the mixins that are not called, each with the reason.
SKIPPED = {
    "_test_minimize_loss_graph": "graph mode of TensorFlow 1; Keras 3 has none",
    "_test_global_step_update": "uses get_variable of TensorFlow 1, not in eager mode",
    "_test_numpy_dataset": "skips itself: strategies of TensorFlow 1 only",
    "_test_input_fn_iterator": "the helper of _test_input_fn_iterable in graph mode",
    "_test_collective_comms": "the helper of _test_all_reduce_*",
    "_test_collective_comms_gradients": "the helper of _test_all_reduce_*",
    "_test_collective_comms_gradient_tape": "the helper of _test_all_reduce_*",
}
REPLICA_METHODS = (
    "_test_run",
    "_test_all_reduce_sum",
    "_test_all_reduce_sum_gradients",
    "_test_all_reduce_sum_gradient_tape",
    "_test_all_reduce_mean",
    "_test_all_reduce_mean_gradients",
    "_test_all_reduce_mean_gradient_tape",
)
# These two skip themselves in eager mode outside of tf.function.
ONLY_IN_FUNCTION = (
    "_test_all_reduce_sum_gradients",
    "_test_all_reduce_mean_gradients",
)
SIMPLE_METHODS = (
    "_test_minimize_loss_eager",
    "_test_summary_for_replica_zero_only",
    "_test_replica_id",
    "_test_call_and_merge_exceptions",
    "_test_trainable_variable",
)


class Contract(lib.DistributionTestBase, lib.TwoDeviceDistributionTestBase):
    """The mixins for strategies on two devices."""

    def runTest(self) -> None:
        """The name that unittest wants; `run_action` is what runs."""

    def iterable(self, strategy: tf.distribute.Strategy) -> None:
        """As TensorFlow tests `distribute_datasets_from_function`."""
        input_fn = self._input_fn_to_test_input_context(
            lambda: tf.data.Dataset.range(10),
            expected_num_replicas_in_sync=2,
            expected_num_input_pipelines=1,
            expected_input_pipeline_id=0,
        )
        pairs = [[i, i + 1] for i in range(0, 10, 2)]
        # The input context counts the calls of the function, from 0 on.
        self._test_input_fn_iterable(strategy, input_fn, pairs)


def actions() -> dict[str, Action]:
    """What to call on a test case and a strategy, by name."""
    found: dict[str, Action] = {}
    for name in SIMPLE_METHODS:
        found[name] = lambda test, strategy, name=name: getattr(test, name)(strategy)
    for name in REPLICA_METHODS:
        for in_function in (False, True):
            if in_function or name not in ONLY_IN_FUNCTION:
                suffix = "_in_function" if in_function else ""
                found[name + suffix] = (
                    lambda test, strategy, name=name, in_function=in_function: getattr(
                        test, name
                    )(strategy, run_in_function=in_function)
                )
    found["_test_input_fn_iterable"] = lambda test, strategy: test.iterable(strategy)
    return found


def mirrored(env: Env) -> tf.distribute.Strategy:
    return env.new_strategy()


def multi_worker_alone(env: Env) -> tf.distribute.Strategy:
    """The strategy of many workers where there is one, on two devices."""
    if env.flavor == "stock":
        return env.new_strategy()
    return tfdp.MultiWorkerMirroredStrategy(devices=DEVICES)


def run_action(env: Env, make: collections.abc.Callable, action: Action) -> dict:
    """Runs one method as unittest does, with set-up and clean-up."""
    strategy = make(env)
    assert strategy.num_replicas_in_sync == 2

    class Case(Contract):
        def runTest(self) -> None:
            action(self, strategy)

    stream = io.StringIO()
    result = unittest.TextTestRunner(stream).run(Case())
    assert result.wasSuccessful(), stream.getvalue()
    assert not result.skipped, result.skipped
    return {}


def name_of(action_name: str, make: collections.abc.Callable) -> str:
    return f"contract{action_name.removeprefix('_test')}_{make.__name__}"


# Sums and means are reduced in one way, by both strategies, in a function and eagerly:
# in the quick tier one stands for others.
REPRESENTATIVES = {
    "_test_all_reduce_sum_gradient_tape": "_test_all_reduce_sum_gradient_tape",
    "_test_all_reduce_sum_gradients": "_test_all_reduce_sum_gradients",
    "_test_all_reduce_mean_gradient_tape": "_test_all_reduce_sum_gradient_tape",
    "_test_all_reduce_mean_gradients": "_test_all_reduce_sum_gradients",
    "_test_all_reduce_mean": "_test_all_reduce_mean",
}


def same_as(action_name: str, make: collections.abc.Callable) -> str:
    """The case that the quick tier runs for this one, or `""`."""
    method = action_name.removesuffix("_in_function")
    if method not in REPRESENTATIVES:
        return ""
    name = name_of(action_name, make)
    other = name_of(REPRESENTATIVES[method] + "_in_function", mirrored)
    return "" if name == other else other


for action_name, chosen in actions().items():
    for make_strategy in (mirrored, multi_worker_alone):

        def function(env: Env, make=make_strategy, action=chosen) -> dict:
            return run_action(env, make, action)

        register(
            name_of(action_name, make_strategy),
            function,
            f"TensorFlow's contract: {action_name}",
            same_as=same_as(action_name, make_strategy),
            setups=("mirrored",),
            compare=False,
        )


def methods_of_the_mixins_are_called_or_skipped(env: Env) -> dict:
    """A later TensorFlow may have more of them."""
    there = {name for name in dir(Contract) if name.startswith("_test_")}
    called = {name.removesuffix("_in_function") for name in actions()}
    assert there - called == set(SKIPPED)
    assert not called - there
    return {}


register(
    "methods_of_the_mixins_are_called_or_skipped",
    methods_of_the_mixins_are_called_or_skipped,
    "TensorFlow's contract: every method is accounted for",
    setups=("mirrored",),
    compare=False,
)
