"""Local steps on every set-up, and what a user sees of bad arguments."""

from __future__ import annotations

from typing import Any

import keras
import pytest

import tfdp
from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = ("local_steps.cases_local_sgd", "local_steps.cases_diloco")


def test_local_steps(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"sync_every": 0}, "`sync_every` must be an integer of at least 1"),
        ({"sync_every": True}, "`sync_every` must be an integer of at least 1"),
        ({"start_step": -1}, "`start_step` must be an integer of at least 0"),
        ({"start_step": "3"}, "`start_step` must be an integer of at least 0"),
    ],
)
def test_bad_arguments_of_local_sgd_are_named(arguments: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text):
        tfdp.callbacks.LocalSGD(**arguments)


def built() -> keras.optimizers.Optimizer:
    optimizer = keras.optimizers.SGD(0.7)
    optimizer.build([keras.Variable([1.0])])
    return optimizer


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"sync_every": 2.5}, "`sync_every` must be an integer of at least 1"),
        ({"scope": "host"}, '`scope` must be "node" or "replica"'),
        ({"fragments": 0}, "`fragments` must be an integer of at least 1"),
        ({"sync_every": 2, "fragments": 3}, "`fragments` must be at most `sync_every`"),
        ({"outer_optimizer": "sgd"}, "`outer_optimizer` must be a Keras optimizer"),
        (
            {
                "outer_optimizer": keras.optimizers.LossScaleOptimizer(
                    keras.optimizers.SGD()
                )
            },
            "and no wrapper of others",
        ),
        ({"outer_optimizer": built()}, "has been built for other variables already"),
    ],
)
def test_bad_arguments_of_diloco_are_named(arguments: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text):
        tfdp.callbacks.DiLoCo(**arguments)


def test_more_fragments_than_variables_are_refused():
    options = tfdp.callbacks.DiLoCo(8, fragments=3).options
    assert options.fragments_of([1, 1, 9]) == [[0], [1], [2]]
    with pytest.raises(ValueError, match="at most the number of trained variables"):
        options.fragments_of([5, 5])
