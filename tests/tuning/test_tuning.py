"""`bucket_mb="auto"` in `fit`, on every set-up against one device."""

from __future__ import annotations

from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = ("tuning.cases_tuning",)


def test_tuning(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
