"""Workers that come back under their names at other addresses, as replaced pods do."""

from __future__ import annotations

import collections.abc
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from tests.cli.launcher import ROOT
from tests.elastic.test_nodes import await_epoch, check
from tools.bench import hosts_bed
from tools.bench.hosts_bed import TwoHosts

pytestmark = [
    pytest.mark.processes,
    pytest.mark.full,
    pytest.mark.skipif(bool(hosts_bed.missing()), reason=hosts_bed.missing()),
]
DEADLINE_SECONDS, EPOCHS = 200.0, 8
SCRIPT = f"""
import os, pathlib, pickle
from tests.elastic.training import train
result = train(
    int(os.environ["POD"]), ".", epochs={EPOCHS}, features=["rows"], step_seconds=0.4
)
pathlib.Path(f"result-{{os.getpid()}}").write_bytes(pickle.dumps(result))
"""


class Pods:
    """Processes with names and addresses of their own, in one network namespace."""

    def __init__(self, folder: pathlib.Path, bed: TwoHosts, number: int) -> None:
        self.folder, self._bed = folder, bed
        self._hosts = pathlib.Path(f"/etc/netns/{bed.names[0]}/hosts")
        self._hosts.parent.mkdir(parents=True)
        self._hosts.touch()
        self._names = [f"job-{rank}.job" for rank in range(number)]
        self._last = 0
        self._address_of: dict[int, str] = {}
        self.processes: dict[int, subprocess.Popen] = {}
        (folder / "script.py").write_text(SCRIPT)
        (folder / "secret").write_text("0123456789abcdef")
        (folder / "secret").chmod(0o600)

    def start(self, rank: int) -> subprocess.Popen:
        """Start a pod at a new address, which its name has from now on."""
        self._last += 1
        self._address_of[rank] = f"10.78.0.{self._last}"
        self._ip("add", self._address_of[rank])
        lines = [f"{ip} {self._names[r]}\n" for r, ip in self._address_of.items()]
        # Its inode must stay the same, since it is mounted in the other pods.
        self._hosts.write_text("127.0.0.1 localhost\n" + "".join(lines))
        workers = [f"{name}:2222" for name in self._names]
        task = {"type": "worker", "index": rank}
        config = {"cluster": {"worker": workers}, "task": task}
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TF_CONFIG": json.dumps(config),
            "POD": str(rank),
            "TFDP_JOB_SECRET_FILE": str(self.folder / "secret"),
        }
        log = (self.folder / f"pod-{rank}.log").open("a")
        self.processes[rank] = subprocess.Popen(
            [*self._bed.enter(0), sys.executable, "script.py"],
            cwd=self.folder,
            env=environment,
            stdout=log,
            stderr=log,
        )
        return self.processes[rank]

    def lose(self, rank: int) -> None:
        """Kill a pod, and remove its address; the name keeps it until a new start."""
        self.processes[rank].kill()
        self.processes[rank].wait()
        self._ip("del", self._address_of[rank])

    def output(self) -> str:
        return "\n".join(p.read_text() for p in sorted(self.folder.glob("*.log")))

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self._hosts.unlink()
        self._hosts.parent.rmdir()

    def _ip(self, what: str, address: str) -> None:
        line = f"ip -n {self._bed.names[0]} addr {what} {address}/32 dev lo"
        subprocess.run(line.split(), check=True)


@pytest.fixture
def pods(tmp_path) -> collections.abc.Iterator[Pods]:
    with TwoHosts() as bed:
        pods = Pods(tmp_path, bed, 3)
        yield pods
        pods.close()


@pytest.mark.parametrize(("rank", "seconds"), [(0, 0.0), (2, 3.0)])
def test_a_pod_that_is_replaced_joins_under_its_name_at_another_address(
    pods, rank, seconds
):
    for each in range(3):
        pods.start(each)
    await_epoch(pods.folder)
    pods.lose(rank)
    time.sleep(seconds)  # as while a pod is created: nobody has its address
    pods.start(rank)
    codes = [p.wait(DEADLINE_SECONDS) for _, p in sorted(pods.processes.items())]
    assert codes == [0, 0, 0], pods.output()
    assert "1 worker joined the job" in pods.output()
    check(pods.folder, 3, EPOCHS)
