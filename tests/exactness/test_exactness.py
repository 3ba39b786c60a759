"""Every optimizer of Keras with every option gives the result of one device.

This is the part of the matrix that covers each optimizer, and each option on every
set-up, and with sharded state each option and each set-up. The full tier has each
optimizer with each option and each kind of sharding; `tools/exactness` runs all cells.
"""

from __future__ import annotations

import itertools

import keras
import pytest

from tests.exactness import cases_exactness as exactness
from tests.exactness import cases_planted_bugs as planted_bugs
from tests.harness.pool import ClusterPool
from tests.harness.registry import ALL, Case, load_cases
from tests.harness.setups import REFERENCE

CASE_MODULES = ("exactness.cases_exactness",)
CASES = load_cases(CASE_MODULES)
BUGS = load_cases(("exactness.cases_planted_bugs",))
# Of local replicas that are not alike a worker tells itself.
FAULTS = "differs from one device|on local replica"


def test_matches_one_device(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)


@pytest.mark.full
@pytest.mark.parametrize("name", BUGS)
def test_column_of(clusters: ClusterPool, name: str):
    with pytest.raises(AssertionError, match=FAULTS):
        clusters.check(BUGS[name], "mirrored")


@pytest.mark.full
def test_gradients_of_the_matrix_are_larger_than_every_limit(clusters: ClusterPool):
    clusters.run(CASES["limits_of_the_matrix_bite"], REFERENCE.name)


def test_every_optimizer_of_keras_is_a_row():
    titles = " ".join(row.title for row in exactness.ROWS.values())
    for name, kind in vars(keras.optimizers).items():
        if isinstance(kind, type) and issubclass(kind, keras.Optimizer):
            assert name == "Optimizer" or name in titles


@pytest.mark.parametrize(
    "shardings", [("none",), ("optimizer", "gradients"), ("parameters",)]
)
def test_every_row_and_column_runs_and_on_every_setup(shardings):
    covered = {
        (row, column, sharding, setup_name)
        for row, column, dtype, sharding in exactness.CELLS
        for setup_name in exactness.COVERING.get(
            exactness.cell_name(row, column, dtype, sharding), ()
        )
        if sharding in shardings
    }
    pairs = {(column, name) for _, column, _, name in covered}
    assert {column for column, _ in pairs} == set(exactness.COLUMNS)
    if shardings == ("none",):
        assert {row for row, _, _, _ in covered} == set(exactness.ROWS)
        assert len(pairs) == len(exactness.COLUMNS) * len(ALL)
    assert {(sharding, name) for _, _, sharding, name in covered} == {
        (sharding, name) for sharding in shardings for name in ALL
    }


def test_the_full_tier_runs_every_row_with_every_column_and_sharding():
    runs = {
        (row, column, sharding, dtype, setup_name)
        for row, column, dtype, sharding in exactness.CELLS
        for case in [CASES[exactness.cell_name(row, column, dtype, sharding)]]
        for setup_name in case.setups
    }
    triples = itertools.product(exactness.ROWS, exactness.COLUMNS, exactness.SHARDINGS)
    assert {run[:3] for run in runs} == set(triples)
    for names, place in ((exactness.ROWS, 0), (exactness.COLUMNS, 1)):
        kinds = {(run[place], *run[3:]) for run in runs}
        assert kinds == set(itertools.product(names, exactness.DTYPES, ALL))


def test_every_column_catches_a_fault_that_is_its_own():
    assert set(planted_bugs.BUGS) == set(exactness.COLUMNS)
