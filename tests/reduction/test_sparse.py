"""Sparse gradients arrive as one device has them, by the cheaper way."""

from __future__ import annotations

import pytest

from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = ("reduction.cases_sparse",)


@pytest.mark.core
def test_sparse(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
