"""What docs/limits.md claims."""

from __future__ import annotations

import pytest

from harness.pool import ClusterPool
from harness.registry import Case

CASE_MODULES = ("limits",)


@pytest.mark.core
def test_limits(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
