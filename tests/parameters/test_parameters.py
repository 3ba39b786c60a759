"""Sharded parameters train, travel and are saved as they should be."""

from __future__ import annotations

from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = (
    "parameters.cases_parameters",
    "parameters.cases_deferred",
    "parameters.cases_quantized_gathers",
    "parameters.cases_units",
    "parameters.cases_user_code",
    "parameters.cases_assignments",
)


def test_parameters(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
