"""`jit_compile=True` under several replicas, against one device without XLA."""

from __future__ import annotations

from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = ("strategy.cases_compiled",)


def test_compiled_step(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
