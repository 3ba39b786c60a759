"""The set-ups that every case is run on: plain data, no TensorFlow."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Setup:
    """A number of worker processes and of devices in each.

    Args:
        name: The name in test ids.
        num_workers: Number of worker processes.
        devices_per_worker: Number of logical CPU devices in each worker.
        distributed: Whether the case runs under a strategy.
        is_mpi: Whether MPI starts the workers, and carries their bytes.
        is_tcp: Whether TCP carries the bytes of workers of one host, too.
        backend: That of the options of the strategy.
        host: The host of the workers, as their `TF_CONFIG` names it.
        interface: The interface that they are told to use, or `None`.
    """

    name: str
    num_workers: int
    devices_per_worker: int
    distributed: bool = True
    is_mpi: bool = False
    is_tcp: bool = False
    backend: str = "auto"
    host: str = "localhost"
    interface: str | None = None

    @property
    def num_replicas(self) -> int:
        """Number of replicas over all workers."""
        return self.num_workers * self.devices_per_worker

    @property
    def is_multi_worker(self) -> bool:
        """Whether there is more than one worker process."""
        return self.num_workers > 1


REFERENCE = Setup("reference", 1, 1, distributed=False)
MIRRORED = Setup("mirrored", 1, 2)
THREE_DEVICES = Setup("three_devices", 1, 3)
SIX_DEVICES = Setup("six_devices", 1, 6)
EIGHT_DEVICES = Setup("eight_devices", 1, 8)
TWELVE_DEVICES = Setup("twelve_devices", 1, 12)
TWO_WORKERS = Setup("two_workers", 2, 1)
TWO_BY_TWO = Setup("two_by_two", 2, 2)
TWO_RANKS = Setup("two_ranks", 2, 1, is_mpi=True)
TWO_RANKS_BY_TWO = Setup("two_ranks_by_two", 2, 2, is_mpi=True)
TWO_WORKERS_TCP = Setup("two_workers_tcp", 2, 1, is_tcp=True)
TWO_BY_TWO_TCP = Setup("two_by_two_tcp", 2, 2, is_tcp=True)
# TensorFlow's own cluster, whose collectives need its server.
TWO_BY_TWO_RING = Setup("two_by_two_ring", 2, 2, backend="ring")
# Of all loopback addresses the interface has the first one.
TWO_WORKERS_INTERFACE = Setup(
    "two_workers_interface", 2, 1, is_tcp=True, host="127.0.0.2", interface="lo"
)
TWO_WORKERS_IPV6 = Setup("two_workers_ipv6", 2, 1, is_tcp=True, host="::1")

DISTRIBUTED = (MIRRORED, TWO_WORKERS, TWO_BY_TWO)
_MORE_DEVICES = (THREE_DEVICES, SIX_DEVICES, EIGHT_DEVICES, TWELVE_DEVICES)
OF_MPI = (TWO_RANKS, TWO_RANKS_BY_TWO)
OF_TCP = (TWO_WORKERS_TCP, TWO_BY_TWO_TCP, TWO_WORKERS_INTERFACE, TWO_WORKERS_IPV6)
BY_NAME = {
    setup.name: setup
    for setup in (
        *(REFERENCE, *_MORE_DEVICES, *DISTRIBUTED, *OF_MPI, *OF_TCP),
        TWO_BY_TWO_RING,
    )
}
