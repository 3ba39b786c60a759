"""Eager steps on every set-up against one device."""

from __future__ import annotations

from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = ("program.cases_eager",)


def test_eager_step(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
