"""Losses, metrics and replicas without rows, as one device has them."""

from __future__ import annotations

from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = (
    "program.cases_coupled_losses",
    "program.cases_keras_losses",
    "program.cases_program_metrics",
    "program.cases_empty_replicas",
    "program.cases_collectives",
)


def test_program_is_that_of_one_device(
    clusters: ClusterPool, case: Case, setup_name: str
):
    clusters.check(case, setup_name)
