"""Batches of every kind give the results of one device."""

from __future__ import annotations

from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = ("program.cases_batches",)


def test_batch_is_that_of_one_device(
    clusters: ClusterPool, case: Case, setup_name: str
):
    clusters.check(case, setup_name)
