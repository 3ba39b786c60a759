"""Launchers of islands on two machines: which one ends when the other is killed."""

from __future__ import annotations

import collections.abc
import os
import signal
import subprocess

import pytest

from tests.cli.nodes import Nodes, ended, read_until

SILENT_SECONDS = 2.0
# An island without TensorFlow, which meets the others until there is a file.
SCRIPT = """
import pathlib, time
import numpy as np
from tfdp.features.islands.island import Island
from tfdp.features.islands import hub_clients as module

module._CONNECT_SECONDS = 1.0
island = Island.from_environment()
RANK = island.index
member = module.HubClient(island)
settings = {"min_participants": 2, "patience_seconds": 0.1}
version = member.join(settings, [np.zeros(2)]).version
pathlib.Path(f"pid-{RANK}").write_text(str(os.getpid()))
while not pathlib.Path(f"is-over-{RANK}").exists():
    reply = member.exchange(version, 1.0, [np.ones(2)])
    version = reply.version
    if version == 1:
        print("has met", reply.participants, flush=True)
    time.sleep(0.01)
member.close(is_through=True)
print("is through", flush=True)
"""
IMPATIENT = f"""
import tfdp.features.islands.hub as hub
from tfdp.launch.cli.main import main

hub.SILENT_SECONDS = {SILENT_SECONDS}
"""


class TwoMachines(Nodes):
    """Two launchers with an island each, which have met."""

    def begin(self, *arguments: str) -> list[subprocess.Popen]:
        self.script(SCRIPT)
        line = ["run", "-n", "1", "--islands", "--hub", self.place, *arguments]
        line += ["--num-islands", "2", "--log-dir", "logs", "--first-island"]
        started = [
            self.python(f"{IMPATIENT}main({[*line, str(index), 'script.py']!r})")
            for index in range(2)
        ]
        for index, process in enumerate(started):
            read_until(process, f"[worker {index}] has met 2")
        return started

    def kill_island(self, index: int) -> None:
        os.kill(int((self.folder / f"pid-{index}").read_text()), signal.SIGKILL)

    def end_islands(self, *indices: int) -> None:
        for index in indices:
            (self.folder / f"is-over-{index}").touch()


pytestmark = pytest.mark.processes


@pytest.fixture
def machines(tmp_path) -> collections.abc.Iterator[TwoMachines]:
    machines = TwoMachines(tmp_path)
    yield machines
    machines.close()


@pytest.mark.full
def test_a_hub_ends_when_the_launcher_of_the_other_machine_is_killed(machines):
    first, second = machines.begin()
    os.kill(second.pid, signal.SIGKILL)
    ended(second)
    # Its exchange of at least two goes on by itself.
    read_until(first, "tfdp: island 1 is lost: neither it nor its launcher")
    machines.end_islands(0)
    code, output = ended(first)
    assert code == 0, output
    assert "is through" in output
    machines.assert_nothing_is_left(within_seconds=5.0)


@pytest.mark.full
def test_a_hub_waits_for_an_island_that_its_launcher_starts_again(machines):
    first, second = machines.begin("--max-restarts", "1")
    machines.kill_island(1)
    read_until(second, "it starts again in 1 s")
    machines.end_islands(0, 1)
    for process in second, first:
        code, output = ended(process)
        assert code == 0, output
        assert "is lost" not in output


def test_a_signal_that_ends_the_wait_for_other_machines_is_the_exit_code(machines):
    first, _ = machines.begin()
    machines.end_islands(0)
    read_until(first, "waiting for islands of other machines")
    os.kill(first.pid, signal.SIGTERM)
    assert ended(first)[0] == 128 + signal.SIGTERM


@pytest.mark.full
def test_islands_and_their_launcher_end_when_that_of_the_hub_is_killed(machines):
    first, second = machines.begin("--max-restarts", "1")
    os.kill(first.pid, signal.SIGKILL)
    code, output = ended(second)
    assert code == 1, output
    assert "cannot be reached" in output
    assert "(restart 1 of 1)" in output
    machines.assert_nothing_is_left(within_seconds=5.0)
