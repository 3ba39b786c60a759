"""Ranks of an MPI job on two hosts find the addresses that join these, and train."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.harness.commands import ROOT, run_command
from tests.harness.mpi import answers, is_open_mpi, needs_mpi, options, why_not
from tests.strategy.trained import HEAVY_BYTES, SCRIPT, check_answers
from tfdp.communication.cluster import split_address
from tools.bench import hosts_bed
from tools.bench.hosts_bed import TwoHosts
from tools.bench.hosts_mpi import OVER_THE_LINK, entered

# Nothing else makes hosts while other tests look for what is left of them.
PROCESS_GROUP = "hosts"
pytestmark = [
    needs_mpi,
    pytest.mark.processes,
    pytest.mark.full,
    pytest.mark.skipif(bool(hosts_bed.missing()), reason=hosts_bed.missing()),
    pytest.mark.skipif(
        not why_not() and is_open_mpi(),
        reason="Open MPI does not start in two namespaces of one host",
    ),
]

DEADLINE_SECONDS = 60.0
TRAINING_SECONDS = 180.0


def run_on(
    bed: TwoHosts,
    num_ranks: int,
    *module: str,
    deadline_seconds: float,
    **environment: str,
) -> list[dict[str, Any]]:
    """Runs a module as ranks that are on two hosts, and returns their answers.

    Args:
        bed: The two hosts.
        num_ranks: How many ranks.
        *module: Its name and arguments.
        deadline_seconds: After so long nothing is left running.
        **environment: Variables of the ranks.
    """
    finished = run_command(
        *options(num_ranks),
        *entered(bed, num_ranks // 2),
        *(sys.executable, "-m", *module),
        deadline_seconds=deadline_seconds,
        environment={"PYTHONPATH": str(ROOT), **environment},
    )
    assert finished.code == 0, finished.output
    found = answers(finished)
    assert len(found) == num_ranks, finished.output
    return found


@pytest.mark.parametrize("is_ipv6", [False, True])
def test_ranks_on_two_hosts_get_the_addresses_of_the_link_between_them(is_ipv6):
    with TwoHosts("1gbit", is_ipv6=is_ipv6) as bed:
        module = ("tests.cluster.mpi_agreement", "all")
        found = run_on(bed, 4, *module, deadline_seconds=DEADLINE_SECONDS)
    found.sort(key=lambda answer: answer["rank"])
    assert [answer["rank"] for answer in found] == [0, 1, 2, 3]
    assert all(answer["workers"] == found[0]["workers"] for answer in found)
    hosts = [split_address(worker)[0] for worker in found[0]["workers"]]
    assert hosts == [address for address in bed.addresses for _ in range(2)]
    (secret,) = {answer["secret"] for answer in found}
    assert len(secret) == 32


@pytest.mark.full
def test_ranks_on_two_hosts_train_as_one_device_does():
    with TwoHosts("1gbit") as bed:
        module = (SCRIPT, "auto_strategy", "heavy")
        found = run_on(
            bed, 2, *module, deadline_seconds=TRAINING_SECONDS, **OVER_THE_LINK
        )
        assert min(bed.bytes_sent()) > HEAVY_BYTES
    check_answers(found, num_replicas=2, backend="mpi")
