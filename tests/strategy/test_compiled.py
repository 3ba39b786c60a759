"""`jit_compile=True` under several replicas, against one device without XLA."""

from __future__ import annotations

import os
from pathlib import Path

import keras
import numpy as np
import pytest

import tfdp
from tests.harness import forks
from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = ("strategy.cases_compiled",)
DEADLINE_SECONDS = 120


def test_compiled_step(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)


def fit_that_dumps(folder: str) -> None:
    """In a process of its own: XLA writes down what it compiles."""
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    strategy = tfdp.MirroredStrategy(tfdp.testing.logical_cpus(2))
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=True)
    x = np.ones((22, 3), "float32")
    # Batches of 8, 8 and 6 rows, three times.
    model.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0)


@pytest.mark.processes
def test_a_last_batch_of_another_size_is_compiled_once_more(tmp_path: Path):
    start = forks.Start(fit_that_dumps, arguments={"folder": str(tmp_path)})
    (answer,) = forks.run([start], DEADLINE_SECONDS)
    assert answer.text == ""
    names = [path.name for path in tmp_path.glob("*before_optimizations.txt")]
    # Each replica's function, for batches of two sizes.
    assert sum("compiled_" in name for name in names) == 4, names
