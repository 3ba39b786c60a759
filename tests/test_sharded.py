"""Optimizer state that is shared out trains, and is saved, as on one device."""

from __future__ import annotations

from harness.pool import ClusterPool
from harness.registry import Case

CASE_MODULES = (
    "sharded",
    "sharded_corners",
    "sharded_optimizers",
    "sharded_plans",
    "sharded_files",
)


def test_sharded(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
