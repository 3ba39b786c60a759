"""All workers take the same transport, and learn together what one of them lacks."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from tfdp.communication.coordination.checks import check_same_setup, setup_facts
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.ground.options import CommunicationOptions
from tfdp.training.strategy import transports


@dataclasses.dataclass
class Pair(WorkerGroup):
    """This worker, and another one that says what it is told to."""

    other: list
    rank: int = 0
    num_workers: int = 2
    said: tuple | list = ()

    def all_gather(self, topic, value="", timeout_seconds=None):
        self.said = value
        values = [value, self.other]
        return values if self.rank == 0 else values[::-1]


def agreed(name: str, other: list, rank: int = 0, **options) -> tuple:
    group = Pair(other, rank)
    chosen = CommunicationOptions(**options)
    return transports._agree_on_transport(name, chosen, group, "localhost")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        ("direct", "direct", "direct"),
        ("mpi", "mpi", "mpi"),
        ("mpi", "direct", "direct"),
        ("direct", "mpi", "direct"),
        ("nccl", "ring", "ring"),
        ("ring", "nccl", "ring"),
    ],
)
def test_workers_that_see_other_things_take_what_all_can(own, other, expected, rank):
    name, interfaces = agreed(own, [other, None, ""], rank)
    assert name == expected
    assert interfaces == (None, None)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_without_an_address_is_an_error_of_all(rank):
    group = Pair(["direct", None, "it resolves elsewhere"], rank)
    with pytest.raises(ValueError, match="cannot be reached: it resolves") as caught:
        transports._agree_on_transport(
            "direct", CommunicationOptions(), group, "localhost"
        )
    assert str(caught.value).startswith(f"Worker {1 - rank} ")


def test_an_interface_that_is_not_here_is_told_to_the_others():
    group = Pair(["direct", None, ""])
    options = CommunicationOptions(interface="eth77")
    with pytest.raises(ValueError, match="Worker 0 cannot be reached: `interface`"):
        transports._agree_on_transport("direct", options, group, "localhost")


def test_each_worker_has_an_interface_of_its_own():
    _, interfaces = agreed("direct", ["direct", "eth1", ""], interface="127.0.0.1")
    assert interfaces == ("127.0.0.1", "eth1")
    devices = ["/device:CPU:0"]
    facts = setup_facts(devices, CommunicationOptions(interface="a"))
    group = Pair([[facts], devices])
    check_same_setup(group, devices, facts)
    [said], _ = group.said
    assert "`backend` options" in said
    assert not any("interface" in name for name in said)


def test_an_interface_that_nothing_uses_is_warned_of():
    with pytest.warns(UserWarning, match="`interface` is for"):
        agreed("ring", ["ring", None, ""], interface="eth0")


def test_between_workers_on_cpus_auto_is_direct_and_within_one_ring():
    devices = ["/device:CPU:0", "/device:CPU:1"]
    assert transports._backend(CommunicationOptions(), devices, 2) == "direct"
    assert transports._backend(CommunicationOptions(), devices, 1) == "ring"


def test_elsewhere_than_on_linux_tensorflow_carries_the_bytes(monkeypatch):
    monkeypatch.setattr(transports, "_HAS_DIRECT", False)
    devices = ["/device:CPU:0"]
    assert transports._backend(CommunicationOptions(), devices, 2) == "ring"
    with pytest.raises(ValueError, match="needs Linux"):
        transports._backend(CommunicationOptions(backend="direct"), devices, 2)


def test_the_transport_is_imported_where_its_sockets_are_not():
    script = """
import select, socket, sys, types
del select.POLLRDHUP, socket.MSG_NOSIGNAL
package = types.ModuleType("tfdp")
package.__path__ = [sys.argv[1]]
sys.modules["tfdp"] = package
import tfdp.communication.transport
"""
    folder = Path(transports.__file__).parents[2]
    command = [sys.executable, "-c", script, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
