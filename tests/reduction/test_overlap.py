"""Communication overlaps the backward pass; steps cost no new traces."""

from __future__ import annotations

import pytest

from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = ("reduction.cases_overlap",)


@pytest.mark.slow
def test_overlap(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
