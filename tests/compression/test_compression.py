"""Compressed sums are those of their definition, on every set-up."""

from __future__ import annotations

from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = ("compression.cases_sums", "compression.cases_training")


def test_compression(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
