"""Keras features, case by case, on every set-up against one device."""

from __future__ import annotations

from harness.pool import ClusterPool
from harness.registry import MODULES, Case

# Modules of `cases` that other files test.
OTHERS = ("equality", "bad_input", "collectives")
CASE_MODULES = tuple(module for module in MODULES if module not in OTHERS)


def test_keras_case(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
