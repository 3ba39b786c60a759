"""The primitives of `tfdp.collectives` give what NumPy gives, wherever they run."""

from __future__ import annotations

import pytest

from harness.pool import ClusterPool
from harness.registry import Case

CASE_MODULES = ("collectives",)


@pytest.mark.core
def test_collective(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
