"""Workers that communicate by MPI give the result of one device, as others do.

Of each feature that has a way of its own over the wire there is a case; the full tier
has all cells of the matrix that two workers have over the direct transport.
"""

from __future__ import annotations

import pytest

from tests.exactness.cases_exactness import COVERING
from tests.exactness.over_wires import MORE_OF_TWO, OF_TWO, OF_TWO_BY_TWO
from tests.harness import mpi
from tests.harness.pool import ClusterPool
from tests.harness.registry import Case, load_cases
from tests.harness.setups import TWO_BY_TWO, TWO_RANKS, TWO_RANKS_BY_TWO, TWO_WORKERS

if mpi.why_not():
    pytest.skip(mpi.why_not(), allow_module_level=True)

CASES = load_cases()
MATRIX = load_cases(("exactness.cases_exactness", "exactness.cases_equality"))
# Each launch costs as much as some cases: all of a set-up share one.
OF_RANKS = {TWO_RANKS.name: OF_TWO, TWO_RANKS_BY_TWO.name: OF_TWO_BY_TWO}
# What is a worker there is a rank here.
RANKS = {TWO_WORKERS.name: TWO_RANKS.name, TWO_BY_TWO.name: TWO_RANKS_BY_TWO.name}


def runs() -> list:
    """Cases and set-ups."""
    first = [(name, ranks) for ranks, names in OF_RANKS.items() for name in names]
    more = [(name, TWO_RANKS.name) for name in MORE_OF_TWO]
    # Not every supported Keras has all optimizers.
    covered = [name for name in COVERING if name in CASES]
    covering = [(name, ranks) for name in covered for ranks in RANKS.values()]
    matrix = [
        (name, RANKS[setup_name])
        for name, case in MATRIX.items()
        for setup_name in case.setups
        if setup_name == TWO_WORKERS.name
    ]
    return [
        pytest.param(
            CASES[name],
            setup_name,
            id=f"{name}-{setup_name}",
        )
        for run in dict.fromkeys([*first, *more, *covering, *matrix])
        for name, setup_name in [run]
    ]


@pytest.mark.full
@pytest.mark.parametrize(("case", "setup_name"), runs())
def test_ranks_match_one_device(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)
