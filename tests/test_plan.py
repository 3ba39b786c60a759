"""What the plan says is what the traced step does."""

from __future__ import annotations

import pytest

from harness.pool import ClusterPool
from harness.registry import Case

CASE_MODULES = ("plans",)


@pytest.mark.core
def test_plan(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
