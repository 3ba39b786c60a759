"""Every optimizer of Keras with every option gives the result of one device.

This is the part of the matrix that covers each optimizer, and each option on every
set-up; `tools/exactness` runs the whole of it.
"""

from __future__ import annotations

import pytest

from harness.pool import ClusterPool
from harness.registry import Case, load_cases

CASE_MODULES = ("exactness",)
BUGS = load_cases(("planted_bugs",))


def test_matches_one_device(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)


@pytest.mark.parametrize("name", BUGS)
def test_matrix(clusters: ClusterPool, name: str):
    with pytest.raises(AssertionError, match="differs from one device"):
        clusters.check(BUGS[name], "mirrored")


def test_matrix_has_every_optimizer_of_keras():
    case = load_cases(("exactness",))
    assert case
