"""Every algorithm and compression trains as one device does, and shows in the plan."""

from __future__ import annotations

from harness.pool import ClusterPool
from harness.registry import Case

CASE_MODULES = ("routes",)


def test_route(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
