"""Accumulation, loss scaling and warmup against plain Keras or NumPy."""

from __future__ import annotations

from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = (
    "step.cases_accumulation",
    "step.cases_end_of_data",
    "step.cases_loss_scale",
    "step.cases_order",
    "step.cases_warmup",
)


def test_stage_of_the_step(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
