"""Ranks of an MPI job on two hosts find the addresses that join these."""

from __future__ import annotations

import shlex
import sys

import pytest

from tests.harness.commands import ROOT, run_command
from tests.harness.mpi import answers, is_open_mpi, needs_mpi, options, why_not
from tools.bench import hosts_bed
from tools.bench.hosts_bed import TwoHosts

# Nothing else makes hosts while other tests look for what is left of them.
PROCESS_GROUP = "hosts"
pytestmark = [
    needs_mpi,
    pytest.mark.processes,
    pytest.mark.standard,
    pytest.mark.skipif(bool(hosts_bed.missing()), reason=hosts_bed.missing()),
    pytest.mark.skipif(
        not why_not() and is_open_mpi(),
        reason="Open MPI does not start in two namespaces of one host",
    ),
]

DEADLINE_SECONDS = 60.0


def test_ranks_on_two_hosts_get_the_addresses_of_the_link_between_them():
    with TwoHosts("1gbit") as bed:
        first, second = (shlex.join(bed.enter(host)) for host in (0, 1))
        enter = (
            f'case $PMI_RANK in 0|2) exec {first} "$@";; *) exec {second} "$@";; esac'
        )
        finished = run_command(
            *options(4),
            *("sh", "-c", enter, "sh", sys.executable),
            *("-m", "tests.cluster.mpi_agreement", "all"),
            deadline_seconds=DEADLINE_SECONDS,
            environment={"PYTHONPATH": str(ROOT)},
        )
    found = sorted(answers(finished), key=lambda answer: answer["rank"])
    assert finished.code == 0, finished.output
    assert [answer["rank"] for answer in found] == [0, 1, 2, 3]
    assert all(answer["workers"] == found[0]["workers"] for answer in found)
    hosts = [worker.rpartition(":")[0] for worker in found[0]["workers"]]
    assert hosts == [*bed.addresses, *bed.addresses]
