"""What docs/limits.md claims."""

from __future__ import annotations

import pytest

from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = ("docs.cases_limits",)


@pytest.mark.core
def test_limits(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
