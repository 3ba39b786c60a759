"""Local steps on every set-up, and what a user sees of bad arguments."""

from __future__ import annotations

from typing import Any

import pytest

import tfdp
from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = ("local_steps.cases_local_sgd",)


def test_local_steps(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"sync_every": 0}, "sync_every"),
        ({"sync_every": True}, "sync_every"),
        ({"sync_every": 2.5}, "sync_every"),
        ({"start_step": -1}, "start_step"),
        ({"start_step": "3"}, "start_step"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], name: str):
    with pytest.raises(ValueError, match=f"`{name}` must be an integer of at least"):
        tfdp.callbacks.LocalSGD(**arguments)
