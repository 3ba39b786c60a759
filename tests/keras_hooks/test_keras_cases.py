"""Keras features, case by case, on every set-up against one device."""

from __future__ import annotations

from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = (
    "keras_hooks.cases_recurrent",
    "keras_hooks.cases_normalization",
    "keras_hooks.cases_randomness",
    "keras_hooks.cases_steps",
    "keras_hooks.cases_loops",
    "keras_hooks.cases_metrics",
    "keras_hooks.cases_logs",
    "keras_hooks.cases_callbacks",
    "keras_hooks.cases_features",
    "keras_hooks.cases_validation",
    "keras_hooks.cases_prediction",
    "keras_hooks.cases_saving",
    "keras_hooks.cases_guides",
    "keras_hooks.cases_interchange",
)


def test_keras_case(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
