"""`jit_compile=True` under several replicas, against one device without XLA."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness import forks
from tests.harness.pool import ClusterPool
from tests.harness.registry import Case
from tfdp.ground._compat import xla_lowering
from tfdp.ground.base import xla

CASE_MODULES = ("strategy.cases_compiled",)
DEADLINE_SECONDS = 120


def test_compiled_step(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)


def convolution(width: int) -> Callable:
    """A convolution that needs an image of about its width at least."""
    return lambda x: tf.nn.conv1d(x, tf.zeros((width, 1, 1)), 1, "VALID")


@pytest.mark.parametrize(
    ("width", "expected"), [(3, [16]), (20, [16, 96]), (500, [16, 96, 224, 512])]
)
def test_sizes_are_tried_until_a_function_can_do_with_one(width, expected):
    assert sizes_tried(convolution(width)) == expected


def test_for_an_operation_that_xla_lacks_no_other_size_is_tried():
    with mock.patch.object(xla_lowering, "lower", wraps=xla_lowering.lower) as lower:
        with pytest.raises(xla.CannotCompileError, match="AsString"):
            check(tf.strings.as_string)
        assert lower.call_count == 1
        with pytest.raises(xla.CannotCompileError, match="negative"):
            check(convolution(600))


def check(function: Callable) -> None:
    concrete = xla.trace(function, (tf.TensorSpec((1, None, 1)),))
    xla.check(concrete, "/device:CPU:0")


def sizes_tried(function: Callable) -> list[int]:
    with mock.patch.object(xla_lowering, "lower", wraps=xla_lowering.lower) as lower:
        check(function)
    return [call.args[1][0].shape[1] for call in lower.call_args_list]


def fit_that_dumps(folder: str) -> None:
    """In a process of its own: XLA writes down what it compiles."""
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    strategy = tfdp.MirroredStrategy(tfdp.testing.logical_cpus(2))
    with strategy.scope():
        # Statistics of each replica's rows are averaged after the compiled part.
        layers = [keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,)), *layers])
        model.compile("sgd", "mse", jit_compile=True)
    x = np.ones((22, 3), "float32")
    # Batches of 8, 8 and 6 rows, three times.
    model.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0)


@pytest.mark.full
@pytest.mark.processes
def test_a_last_batch_of_another_size_is_compiled_once_more(tmp_path: Path):
    start = forks.Start(fit_that_dumps, arguments={"folder": str(tmp_path)})
    (answer,) = forks.run([start], DEADLINE_SECONDS)
    assert answer.text == ""
    names = [path.name for path in tmp_path.glob("*before_optimizations.txt")]
    # Each replica's function, for batches of two sizes.
    assert sum("compiled_" in name for name in names) == 4, names


def test_a_tf_function_around_a_step_is_traced_without_a_word(caplog):
    """AutoGraph warns of what it cannot read."""
    strategy = tfdp.MirroredStrategy(["/cpu:0"])

    @tf.function
    def step():
        return strategy.run(tf.zeros, args=([2],))

    step()
    assert not caplog.records
