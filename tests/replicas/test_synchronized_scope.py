"""Leaving a scope: the same variables on all workers, or one sentence."""

from __future__ import annotations

from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = ("replicas.cases_scopes",)


def test_scope(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
