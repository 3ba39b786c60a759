"""Optimizer state that is shared out trains, and is saved, as on one device."""

from __future__ import annotations

from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = (
    "sharding.cases_sharded",
    "sharding.cases_corners",
    "sharding.cases_optimizers",
    "sharding.cases_plans",
    "sharding.cases_files",
    "sharding.cases_stage_3",
)


def test_sharded(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
