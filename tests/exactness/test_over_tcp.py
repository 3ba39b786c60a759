"""Workers that communicate by TCP give the result of one device, as others do.

Those of one host would share memory: here they may not, as if they were on two.
"""

from __future__ import annotations

import pytest

from tests.exactness.over_wires import MORE_OF_TWO, OF_TWO, OF_TWO_BY_TWO
from tests.harness.pool import ClusterPool
from tests.harness.registry import Case, load_cases
from tests.harness.setups import (
    TWO_BY_TWO_TCP,
    TWO_WORKERS_INTERFACE,
    TWO_WORKERS_IPV6,
    TWO_WORKERS_TCP,
)
from tfdp.communication.cluster.own_addresses import is_own

CASES = load_cases()
RUNS = {
    TWO_WORKERS_TCP.name: (*OF_TWO, *MORE_OF_TWO),
    TWO_BY_TWO_TCP.name: OF_TWO_BY_TWO,
    TWO_WORKERS_INTERFACE.name: ("training_with_bfloat16_on_the_wire",),
    TWO_WORKERS_IPV6.name: ("training_with_bfloat16_on_the_wire",),
}


def runs() -> list:
    """Cases and set-ups."""
    return [
        pytest.param(CASES[name], setup_name, id=f"{name}-{setup_name}")
        for setup_name, names in RUNS.items()
        for name in names
    ]


@pytest.mark.full
@pytest.mark.parametrize(("case", "setup_name"), runs())
def test_workers_match_one_device_over_tcp(
    clusters: ClusterPool, case: Case, setup_name: str
):
    if setup_name == TWO_WORKERS_IPV6.name and not is_own("::1"):
        pytest.skip("this machine has no IPv6")
    clusters.check(case, setup_name)
