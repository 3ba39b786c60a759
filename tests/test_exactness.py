"""Every optimizer of Keras with every option gives the result of one device.

This is the part of the matrix that covers each optimizer, and each option on every
set-up; `tools/exactness` runs the whole of it.
"""

from __future__ import annotations

import keras
import pytest

from cases import exactness, planted_bugs
from harness.pool import ClusterPool
from harness.registry import ALL, Case, load_cases
from harness.setups import REFERENCE

CASE_MODULES = ("exactness",)
CASES = load_cases(CASE_MODULES)
BUGS = load_cases(("planted_bugs",))


def test_matches_one_device(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)


@pytest.mark.parametrize("name", BUGS)
def test_column_of(clusters: ClusterPool, name: str):
    with pytest.raises(AssertionError, match="differs from one device"):
        clusters.check(BUGS[name], "mirrored")


def test_gradients_of_the_matrix_are_larger_than_every_limit(clusters: ClusterPool):
    clusters.run(CASES["limits_of_the_matrix_bite"], REFERENCE.name)


def test_every_optimizer_of_keras_is_a_row():
    titles = " ".join(row.title for row in exactness.ROWS.values())
    for name, kind in vars(keras.optimizers).items():
        if isinstance(kind, type) and issubclass(kind, keras.Optimizer):
            assert name == "Optimizer" or name in titles


def test_every_column_runs_on_every_setup_and_every_row_on_some():
    covered = {
        (row, column, setup_name)
        for row, column, dtype in exactness.CELLS
        for setup_name in CASES[exactness.cell_name(row, column, dtype)].setups
    }
    assert {row for row, _, _ in covered} == set(exactness.ROWS)
    assert {(column, name) for _, column, name in covered} == {
        (column, name) for column in exactness.COLUMNS for name in ALL
    }
    assert {column for _, column, _ in covered} == set(planted_bugs.BUGS)
