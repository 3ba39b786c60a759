"""The primitives of collectives give what NumPy gives, wherever they run."""

from __future__ import annotations

import pytest

from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = ("collectives.cases_primitives",)


@pytest.mark.core
def test_collective(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
