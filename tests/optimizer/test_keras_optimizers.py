"""Keras's optimizers and their options train as on one device."""

from __future__ import annotations

from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = ("optimizer.cases_optimizers", "optimizer.cases_clipping")


def test_optimizer_of_keras(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
