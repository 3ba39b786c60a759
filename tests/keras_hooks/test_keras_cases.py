"""Keras features, case by case, on every set-up against one device."""

from __future__ import annotations

import inspect

from tests.harness.commands import ROOT
from tests.harness.pool import ClusterPool
from tests.harness.registry import Case
from tests.keras_hooks import cases_features

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


def test_the_feature_that_contributors_read_is_the_one_that_is_run():
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert inspect.getsource(cases_features.GradientNorm) in page


def test_keras_case(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
