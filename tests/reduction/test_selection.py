"""Every algorithm and compression trains as one device does, and shows in the plan."""

from __future__ import annotations

from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = ("reduction.cases_adasum", "reduction.cases_selection")


def test_route(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
