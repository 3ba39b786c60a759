"""Workers between which a firewall drops what they dial say which port that is."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.faults import job
from tests.faults.beds import Cable, why_not
from tests.faults.plan import JobPlan
from tools.bench.hosts_bed import INTERFACE, BedError

PROCESS_GROUP = "hosts"
pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.full]

TIMEOUT_SECONDS, DEADLINE_SECONDS = 6.0, 60.0
# Those from which the system chooses: of workers' own connections both ends are such,
# of TensorFlow's only one is.
_CHOSEN = "32768-60999"
# TensorFlow's, of worker 0: its port is open.
_SERVER = "10.77.0.1:20000"
_NOWHERE, _ITS_CARD, _TABLE = "10.77.0.99", "02:00:00:00:00:99", "77"


class Firewall(Cable):
    """Two hosts, between which packets to ports that the system chose are dropped."""

    def __enter__(self) -> Firewall:
        super().__enter__()
        try:
            for name, other in self._ends():
                self._drop(name, other)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _drop(self, name: str, other: str) -> None:
        rule = f"rule add to {other} ipproto tcp sport {_CHOSEN} dport {_CHOSEN}"
        card = f"{_NOWHERE} lladdr {_ITS_CARD} dev {INTERFACE}"
        for command in (
            f"neigh replace {card} nud permanent",
            f"route add {other} via {_NOWHERE} dev {INTERFACE} table {_TABLE}",
            f"{rule} table {_TABLE}",
        ):
            words = ["ip", "-n", name, *command.split()]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                raise BedError(f"`{' '.join(words)}` said: {done.stderr.strip()}")


def test_a_port_that_a_firewall_closes_is_named_on_every_worker(tmp_path):
    if reason := why_not("cut"):
        pytest.skip(reason)
    plan = JobPlan(2, timeout_seconds=TIMEOUT_SECONDS, hosts=(0, 1))
    try:
        bed = Firewall(plan, tmp_path).__enter__()
    except BedError as error:
        pytest.skip(str(error))
    with bed:
        life = job.run(plan, bed.setting("first"), DEADLINE_SECONDS)
    assert life.left == ""
    for rank, end in enumerate(life.ends):
        print(f"worker {rank}: {end.error_seconds:.1f} s after the start, {end.error}")
        assert end.code == 1, end.log
        assert re.search(r"10\.77\.0\.1:\d+", end.error.replace(_SERVER, ""))
        assert "firewall" in end.error
        assert len(end.error.splitlines()) == 1
