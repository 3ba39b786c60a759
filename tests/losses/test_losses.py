"""Losses of every form count in the global batch as on one device."""

from __future__ import annotations

from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = (
    "losses.cases_losses",
    "losses.cases_scalar_losses",
    "losses.cases_seen",
    "losses.cases_several_outputs",
    "losses.cases_weighting",
)


def test_loss_is_that_of_one_device(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
