"""Every set-up gives the history and the weights of one device."""

from __future__ import annotations

import pytest

from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = ("exactness.cases_equality",)


@pytest.mark.core
def test_history_and_weights_match_one_device(
    clusters: ClusterPool, case: Case, setup_name: str
):
    clusters.check(case, setup_name)
