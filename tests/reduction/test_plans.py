"""What the plan says is what the traced step does."""

from __future__ import annotations

import pytest

from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = ("reduction.cases_plans",)


@pytest.mark.core
def test_plan(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
