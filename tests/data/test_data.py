"""Data of every form reaches the replicas as it reaches one device."""

from __future__ import annotations

from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = (
    "data.cases_inputs",
    "data.cases_structures",
    "data.cases_batches",
    "data.cases_uneven",
    "data.cases_distribute",
    "data.cases_own_rows",
    "data.cases_wrong_data",
    "data.cases_files",
)


def test_data_is_read_as_on_one_device(
    clusters: ClusterPool, case: Case, setup_name: str
):
    clusters.check(case, setup_name)
