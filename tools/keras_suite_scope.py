"""Part of `tools/keras_suite --full`: Keras's tests inside a strategy's scope."""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from pathlib import Path
from typing import Any

_TRAINER = "trainer_test.py::TestTrainer::"
_ON_NAN = "terminate_on_nan_test.py::TerminateOnNaNTest::"
_ONE_ROW = "asks for batches of one row, which two replicas cannot divide"

# Tests that pass without a strategy and not under tfdp. The reasons stand in
# docs/reports/keras_suite.md.
EXPECTED = {
    _TRAINER + "test_callbacks_can_update_state_at_batch_boundary": _ONE_ROW,
    _TRAINER + "test_loss_scaling_prevents_underflow": _ONE_ROW,
    _TRAINER + "test_retracing": _ONE_ROW,
    _ON_NAN + "test_raise_error_terminate_stops_on_later_batch": _ONE_ROW,
    _ON_NAN + "test_terminate_on_nan_graceful_stop": _ONE_ROW,
    _ON_NAN + "test_terminate_on_nan_raise_error_raises_error": _ONE_ROW,
}

# A test with a strategy of its own resets TensorFlow's devices.
OWN_STRATEGY = "test_swap_ema_weights_with_tf_distribute"
_FOLDERS = ("callbacks", "metrics", "losses")
_TRAINS = re.compile(
    r"\.(fit|evaluate|predict|train_on_batch|test_on_batch|predict_on_batch)\("
)


def find_tests(source: Path) -> list[Path]:
    """The files whose tests train, evaluate or predict.

    Args:
        source: Path of `keras/src`.
    """
    paths = [source / "trainers" / "trainer_test.py"]
    for folder in _FOLDERS:
        for path in sorted((source / folder).glob("*_test.py")):
            if _TRAINS.search(path.read_text("utf-8")):
                paths.append(path)
    return paths


def prepare(*, with_strategy: bool) -> None:
    """Prepare this process for Keras's tests.

    Args:
        with_strategy: Bool, whether the tests run in the scope of a
            `tf.distribute.MirroredStrategy` over two CPUs, one for all of them.
    """
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    two = [tf.config.LogicalDeviceConfiguration() for _ in range(2)]
    tf.config.set_logical_device_configuration(cpu, two)
    _stand_in_for_missing_modules()
    if with_strategy:
        _enter_scope_in_each_test()


def _enter_scope_in_each_test() -> None:
    """Enter a scope at the end of `setUp`.

    Keras's `setUp` resets the default graph, which holds the scopes in force.
    """
    import tensorflow as tf
    from keras.src import testing  # noqa: TID251

    original = testing.TestCase.setUp
    # One, since stock ones in a process collide: tensorflow issue 61314.
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    def set_up(test: Any) -> None:
        original(test)
        scope = strategy.scope()
        scope.__enter__()

        def leave() -> None:
            # A test that clears the session has left it already.
            if tf.distribute.has_strategy():
                scope.__exit__(None, None, None)

        test.addCleanup(leave)

    testing.TestCase.setUp = set_up


def _stand_in_for_missing_modules() -> None:
    """Stand in for JAX and the helpers of Keras's repository, which files import."""
    import keras  # noqa: F401, it would take a stand-in for JAX itself

    if importlib.util.find_spec("jax") is None:
        sys.modules["jax"] = types.ModuleType("jax")
    helpers: Any = types.ModuleType("conftest")
    helpers.skip_if_backend = lambda *_: lambda test: test
    sys.modules["conftest"] = helpers
