"""Where the workers of a job live: on this machine, on two hosts, with a small disk."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path

from tests.faults.faulty import FILLER
from tests.faults.plan import Fault, JobPlan, Setting
from tests.harness.tf_config import free_ports
from tools.bench.hosts_bed import INTERFACE, BedError, TwoHosts

_NEW_MOUNTS, _NEW_NETWORK = 0x00020000, 0x40000000
_DISK_BYTES = 2**20
# A host to which nobody listens: what is sent to it is dropped without a word.
_NOWHERE = "02:00:00:00:00:99"
_KEEPER = 'mount -t tmpfs -o size="$1" tmpfs "$2" && echo ready && cat > /dev/null'


class Bed:
    """This machine as it is.

    Args:
        plan: `JobPlan`.
        folder: Path of an empty folder, for everything.
    """

    def __init__(self, plan: JobPlan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        (folder / "state").mkdir()

    def __enter__(self) -> Bed:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @property
    def state(self) -> Path:
        """What workers save, as the parent sees it."""
        return self._folder / "state"

    def setting(self, life: str) -> Setting:
        """What the workers of one life of the job are told."""
        notes = self._folder / life
        for rank in range(self._plan.num_workers):
            (notes / f"{rank}.tmp").mkdir(parents=True)
        return Setting(
            addresses=tuple(self._addresses()),
            notes=str(notes),
            state=str(self._folder / "state"),
            namespaces=tuple(map(self._namespaces, range(self._plan.num_workers))),
            cut_commands=self._cut_commands(),
        )

    def mend(self) -> None:
        """Puts right what the fault did to the machine."""

    def _addresses(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in free_ports(self._plan.num_workers)]

    def _namespaces(self, rank: int) -> tuple[tuple[str, int], ...]:
        del rank
        return ()

    def _cut_commands(self) -> tuple[tuple[str, ...], ...]:
        return ()


class SmallDisk(Bed):
    """What is saved lies on a disk of 1 MB, which the workers alone see."""

    def __enter__(self) -> Bed:
        size, path = str(_DISK_BYTES), str(self._folder / "state")
        self._keeper = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", _KEEPER, "keeper", size, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline() != b"ready\n":
            self.__exit__()
            raise BedError("A small disk cannot be mounted: this needs root.")
        return self

    def __exit__(self, *error: object) -> None:
        self._keeper.communicate()

    @property
    def state(self) -> Path:
        """What workers save, as the parent sees it: through its keeper."""
        return Path(f"/proc/{self._keeper.pid}/root{self._folder}/state")

    def mend(self) -> None:
        """Makes room."""
        (self.state / FILLER).unlink(missing_ok=True)

    def _namespaces(self, rank: int) -> tuple[tuple[str, int], ...]:
        del rank
        return ((f"/proc/{self._keeper.pid}/ns/mnt", _NEW_MOUNTS),)


class Cable(Bed):
    """Workers are on two hosts, and the link between them can be cut."""

    def __enter__(self) -> Bed:
        self._hosts = TwoHosts("1gbit")
        self._hosts.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hosts.__exit__(None, None, None)

    def mend(self) -> None:
        """Joins the hosts again."""
        for name, other in self._ends():
            ip = ["ip", "-n", name]
            subprocess.run([*ip, "link", "set", INTERFACE, "up"], check=True)
            forget = [*ip, "neigh", "del", other, "dev", INTERFACE]
            subprocess.run(forget, check=False, stderr=subprocess.DEVNULL)

    def _addresses(self) -> list[str]:
        hosts = self._plan.hosts
        all_of = self._hosts.worker_addresses(len(hosts))
        return [all_of[host * len(hosts) + rank] for rank, host in enumerate(hosts)]

    def _namespaces(self, rank: int) -> tuple[tuple[str, int], ...]:
        name = self._hosts.names[self._plan.hosts[rank]]
        return ((f"/var/run/netns/{name}", _NEW_NETWORK),)

    def _cut_commands(self) -> tuple[tuple[str, ...], ...]:
        """A plug that is pulled, or packets that come to nobody."""
        fault = self._plan.fault
        if fault is not None and fault.way == "plug":
            down = f"ip -n {self._hosts.names[0]} link set {INTERFACE} down"
            return (tuple(down.split()),)
        return tuple(
            tuple(
                f"ip -n {name} neigh replace {other} lladdr {_NOWHERE} "
                f"dev {INTERFACE} nud permanent".split()
            )
            for name, other in self._ends()
        )

    def _ends(self) -> list[tuple[str, str]]:
        """The name of each host, and the address of the other."""
        names, addresses = self._hosts.names, self._hosts.addresses
        return list(zip(names, reversed(addresses), strict=True))


def bed_for(plan: JobPlan, folder: Path) -> Bed:
    """The bed that a job needs."""
    if plan.hosts:
        return Cable(plan, folder)
    if plan.fault is not None and plan.fault.kind == "full":
        return SmallDisk(plan, folder)
    return Bed(plan, folder)


@functools.cache
def why_not(kind: str) -> str:
    """Why this machine has no bed for a kind of fault, or `""`.

    Args:
        kind: String.
    """
    hosts = (0, 1) if kind == "cut" else ()
    plan = JobPlan(2, Fault(kind, "training", 0), hosts=hosts)
    with tempfile.TemporaryDirectory(prefix="tfdp-bed-") as folder:
        try:
            with bed_for(plan, Path(folder)):
                return ""
        except (BedError, OSError) as error:  # root may not be allowed to, either
            return str(error)
