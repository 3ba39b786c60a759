"""All-reduce algorithms add up what a plain sum does, on 2, 3, 4, 6 and 8 replicas."""

from __future__ import annotations

import pytest

from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = ("collectives.cases_adasum", "collectives.cases_algorithms")


@pytest.mark.core
def test_algorithm(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
