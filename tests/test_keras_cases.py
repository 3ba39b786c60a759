"""Keras features, case by case, on every set-up against one device."""

from __future__ import annotations

from harness.pool import ClusterPool
from harness.registry import Case

CASE_MODULES = (
    "optimizers",
    "clipping",
    "losses",
    "scalar_losses",
    "several_outputs",
    "recurrent",
    "normalization",
    "randomness",
    "inputs",
    "structures",
    "batches",
    "uneven",
    "steps",
    "loops",
    "metrics",
    "callbacks",
    "validation",
    "prediction",
    "saving",
    "guides",
    "sharding",
)


def test_keras_case(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
