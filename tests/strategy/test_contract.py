"""tfdp's strategies keep what TensorFlow promises of its own.

What is not called of TensorFlow's `strategy_test_lib`, and why, is listed in
`cases_contract.py`. The mixins for one device and for remote workers are for
other kinds of strategies.
"""

from __future__ import annotations

import pytest

from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = ("strategy.cases_contract",)


@pytest.mark.core
def test_contract(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
