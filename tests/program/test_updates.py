"""Updates within a program, case by case."""

from __future__ import annotations

from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = ("program.cases_updates",)


def test_updates_case(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
