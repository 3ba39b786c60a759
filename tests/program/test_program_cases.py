"""Layers, states and steps of one's own, each equal to one device."""

from __future__ import annotations

from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = (
    "program.cases_layers",
    "program.cases_state",
    "program.cases_steps",
)


def test_program_case(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
