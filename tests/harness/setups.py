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
    """

    name: str
    num_workers: int
    devices_per_worker: int
    distributed: bool = True
    is_mpi: bool = False

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
TWO_WORKERS = Setup("two_workers", 2, 1)
TWO_BY_TWO = Setup("two_by_two", 2, 2)
TWO_RANKS = Setup("two_ranks", 2, 1, is_mpi=True)
TWO_RANKS_BY_TWO = Setup("two_ranks_by_two", 2, 2, is_mpi=True)

DISTRIBUTED = (MIRRORED, TWO_WORKERS, TWO_BY_TWO)
_MORE_DEVICES = (THREE_DEVICES, SIX_DEVICES, EIGHT_DEVICES)
OF_MPI = (TWO_RANKS, TWO_RANKS_BY_TWO)
BY_NAME = {
    setup.name: setup for setup in (REFERENCE, *_MORE_DEVICES, *DISTRIBUTED, *OF_MPI)
}
