"""A process that trains before it has a strategy, and in one cluster after another."""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness import common
from tests.harness.interrupted import Layout, run
from tests.harness.tf_config import cluster_configs

pytestmark = [pytest.mark.full, pytest.mark.processes]


def losses(x: Any, y: Any) -> list[float]:
    """Trains a new model under the strategy of `TF_CONFIG`."""
    with tfdp.auto_strategy().scope():
        keras.utils.set_random_seed(1)
        model = common.compiled(keras.Sequential([keras.layers.Dense(2)]))
    return common.fit(model, x, y)["loss"]


def train_in_two_clusters(
    layout: Layout, rank: int, configs: list[list[str]]
) -> dict[str, Any]:
    """Uses TensorFlow first, the first worker more than the other."""
    x = tf.Variable(common.regression_data(16)[0]) * 1.0
    y = tf.constant(common.regression_data(16)[1])
    rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    if rank == 0:
        tfdp.MirroredStrategy(["CPU:0"])
    earlier = common.compiled(keras.Sequential([keras.layers.Dense(2)]))
    earlier.fit(rows, epochs=1 + (rank == 0), verbose=0)
    # Batches of another size may give other last bits.
    predicted = [earlier.predict(source, verbose=0) for source in (x, rows)]
    found = []
    for config in configs:
        os.environ["TF_CONFIG"] = config[rank]
        found.append(losses(x, y))
        # What was created before any strategy is still of use: each worker has its own.
        for source, before in zip((x, rows), predicted, strict=True):
            again = earlier.predict(source, verbose=0)
            np.testing.assert_allclose(again, before, rtol=1e-6)
        assert sum(int(batch[0].shape[0]) for batch in rows) == len(x)
    earlier.fit(rows, verbose=0)
    assert not np.allclose(earlier.predict(x, verbose=0), predicted[0])
    return {"found": found}


def test_two_clusters_of_a_process_train_as_one_device_does_beside_an_earlier_model(
    tmp_path,
):
    configs = [cluster_configs(2), cluster_configs(2)]
    result = run(Layout(2, 1), train_in_two_clusters, tmp_path, {"configs": configs})
    assert result.codes == (0, 0), result.output[-3000:]
    (one,) = run(Layout(1, 1), train_alone, tmp_path, {}).answers
    for answer in result.answers:
        for history in answer["found"]:
            np.testing.assert_allclose(history, one["found"], rtol=1e-5)


def train_alone(layout: Layout, rank: int) -> dict[str, Any]:
    """Trains on one device."""
    keras.utils.set_random_seed(1)
    model = common.compiled(keras.Sequential([keras.layers.Dense(2)]))
    history = common.fit(model, *common.regression_data(16))
    return {"found": history["loss"]}
