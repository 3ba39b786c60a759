"""A callback or optimizer that is the first use of tfdp in a process."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest
from keras.src.utils import traceback_utils

from tests.harness import forks
from tests.harness.forks import Start
from tfdp.ground._compat import patches

DEADLINE_SECONDS = 120.0


def fit_with_a_backup(folder: str) -> list[str]:
    """Trains without a strategy; `fit` is looked up before the callback is made."""
    import keras
    import numpy as np

    import tfdp

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.fit(
        np.ones((8, 2)),
        np.ones((8, 1)),
        batch_size=4,
        verbose=0,
        callbacks=[tfdp.callbacks.BackupAndRestore(folder, delete_at_end=False)],
    )
    return os.listdir(folder)


@pytest.mark.processes
def test_a_backup_without_a_strategy_may_be_the_first_use_of_tfdp(tmp_path: Path):
    arguments = {"folder": str(tmp_path)}
    start = Start(fit_with_a_backup, arguments=arguments)
    (answer,) = forks.run([start], DEADLINE_SECONDS)
    assert (answer.error, answer.value) == ("", ["step-2"]), answer.text


def names_of_features() -> list[str]:
    from tfdp.ground.base.feature import registered

    return [type(feature).__name__ for feature in registered()]


@pytest.mark.processes
def test_features_are_there_however_tfdp_was_imported():
    (answer,) = forks.run([Start(names_of_features)], DEADLINE_SECONDS)
    assert sorted(answer.value) == [
        *(
            "BackupWorkers",
            "Elastic",
            "Islands",
            "LocalStepsFeature",
            "MicroBatchSearch",
            "Replays",
        ),
        *("SpikeGuards", "_Goodput", "_Rebalancing"),
        *("_SavesOfCallbacks", "_Tracking", "_Tuning"),
    ], answer.text


def test_a_method_of_keras_that_was_looked_up_before_calls_the_replacement():
    class Model:
        @traceback_utils.filter_traceback
        def fit(self, x):
            return [x]

    def fit(original, model, x):
        return ["replaced", *original(model, x)]

    entry = patches.Replacement(Model, "fit", fit, "Because.")
    before, model = Model().fit, Model()
    patches.replace(entry)
    patches.replace(entry)
    assert before(1) == model.fit(1) == ["replaced", 1]
    assert str(inspect.signature(Model.fit)) == "(self, x)"
