"""Keras features, case by case, on every set-up against one device."""

from __future__ import annotations

from harness.pool import ClusterPool
from harness.registry import MODULES, Case

CASE_MODULES = tuple(m for m in MODULES if m not in ("equality", "bad_input"))


def test_keras_case(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
