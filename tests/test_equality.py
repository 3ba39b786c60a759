"""Every set-up gives the history and the weights of one device."""

from __future__ import annotations

import pytest

from harness.pool import ClusterPool
from harness.registry import Case

CASE_MODULES = ("equality",)


@pytest.mark.core
def test_history_and_weights_match_one_device(
    clusters: ClusterPool, case: Case, setup_name: str
):
    clusters.check(case, setup_name)
