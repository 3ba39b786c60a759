"""Local steps on every set-up, and what a user sees of bad arguments."""

from __future__ import annotations

from typing import Any

import keras
import pytest

import tfdp
from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = (
    "local_steps.cases_local_sgd",
    "local_steps.cases_diloco",
    "local_steps.cases_exchanges",
    "local_steps.cases_syncs",
    "local_steps.cases_alone",
)


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
        ({"delay": -1}, "`delay` must be an integer of at least 0"),
        (
            {"sync_every": 10, "fragments": 3, "delay": 3},
            "`delay` must be less than `sync_every / fragments`",
        ),
        ({"delay": 1, "mixing": 1.5}, "`mixing` must be a number from 0 to 1"),
        ({"delay": 1, "mixing": "1"}, "`mixing` must be a number from 0 to 1"),
        ({"min_participants": 0, "delay": 1}, "`min_participants` must be an integer"),
        ({"min_participants": 1}, "`min_participants` needs a `delay` of at least 1"),
        (
            {"min_participants": 1, "delay": 1, "compression": "int8"},
            "is for exchanges of one fragment that is not compressed",
        ),
        (
            {"min_participants": 1, "delay": 1, "patience_seconds": -1},
            "`patience_seconds` must be a number of seconds",
        ),
        ({"compression": "int3"}, "`compression` must be one of"),
        ({"compression": {"outer": "int8"}}, "`compression` of `DiLoCo` applies"),
        ({"outer_optimizer": "sgd"}, "`outer_optimizer` must be a Keras optimizer"),
        (
            {
                "outer_optimizer": keras.optimizers.LossScaleOptimizer(
                    keras.optimizers.SGD()
                )
            },
            "not a wrapper of others",
        ),
        ({"outer_optimizer": built()}, "has been built for other variables already"),
        (
            {"outer_optimizer": keras.optimizers.SGD(0.7, use_ema=True)},
            "makes one update for each exchange.* Remove `use_ema`",
        ),
    ],
)
def test_bad_arguments_of_diloco_are_named(arguments: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text):
        tfdp.callbacks.DiLoCo(**arguments)


def test_what_is_of_late_outer_steps_only_is_ignored_aloud():
    with pytest.warns(
        UserWarning, match="have an effect only with a `delay`, and are ignored"
    ):
        tfdp.callbacks.DiLoCo(scale_by_staleness=True)


def test_more_fragments_than_variables_are_refused():
    options = tfdp.callbacks.DiLoCo(8, fragments=3).options
    assert options.fragments_of([1, 1, 9]) == [[0], [1], [2]]
    with pytest.raises(ValueError, match="at most the number of trained variables"):
        options.fragments_of([5, 5])
