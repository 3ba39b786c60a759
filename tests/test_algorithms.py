"""All-reduce algorithms add up what a plain sum does, on 2, 3, 4, 6 and 8 replicas."""

from __future__ import annotations

import pytest

from harness.pool import ClusterPool
from harness.registry import Case

CASE_MODULES = ("algorithms",)


@pytest.mark.core
def test_algorithm(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
