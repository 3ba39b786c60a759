"""Cluster of an MPI job: addresses and ports that its processes agree on by MPI."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Sequence
from typing import Any

from tfdp.communication.cluster import slurm
from tfdp.communication.cluster.address import join_address
from tfdp.communication.cluster.gpus import own_gpus, visible_gpus
from tfdp.communication.cluster.launchers import LaunchedRank, has_mpi4py, mpi_rank
from tfdp.communication.cluster.mpi_job import MpiJob
from tfdp.communication.cluster.mpi_start import start_job
from tfdp.communication.cluster.own_addresses import (
    answering,
    host_key,
    own_addresses,
    reached,
)
from tfdp.communication.cluster.ports import reserved_ports
from tfdp.communication.cluster.spec import Cluster

# As `tfdp run` has it, where all are on one machine.
_LOCAL_HOST = "127.0.0.1"
_agreed: list[Cluster] = []
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class ProcessPlacement:
    """Where one process of the job is, as it tells the others.

    Args:
        host: String, equal on all processes that share a host and its network.
        addresses: Sequence of strings, the IP addresses of the host.
        port: Int, on which this process will listen.
        token: String, what it answers there until all have agreed.
        gpus: Sequence of strings, the GPUs that it sees.
    """

    host: str
    addresses: Sequence[str]
    port: int
    token: str
    gpus: Sequence[str]


def find_cluster(timeout_seconds: float | None = None) -> Cluster | None:
    """Find the cluster of `TF_CONFIG`, of a Slurm step, or of an MPI job.

    In an MPI job, where mpi4py is installed, its processes agree on their addresses,
    once; all of them have to call it.

    Args:
        timeout_seconds: Float or `None`, the longest wait for the other processes of
            an MPI job. Defaults to `None`, for ever.

    Returns:
        A `Cluster`, or `None` on a single machine.

    Raises:
        ValueError: If the variables, or the processes, do not fit together.
        TimeoutError: If a process of the MPI job does not come in time.
    """
    own = mpi_rank()
    if own is None or _says_more(own):
        return Cluster.from_environment()
    if not has_mpi4py():
        return None  # Slurm's variables, where they are set, are those of a launcher
    with _lock:
        if not _agreed:
            _agreed.append(agree(start_job(timeout_seconds), timeout_seconds))
    return _agreed[0]


def count_workers() -> int:
    """Count the workers that a strategy would have, and wait for none of them.

    Returns:
        Int; 1 on a single machine, and for an evaluator, which works by itself.

    Raises:
        ValueError: If the variables do not fit together.
    """
    return _place_of_process()[1]


def rank_of_process() -> int:
    """Find the rank that this process would have, and wait for no other one.

    Returns:
        Int; 0 on a single machine, and for an evaluator, which works by itself.

    Raises:
        ValueError: If the variables do not fit together.
    """
    return _place_of_process()[0]


def _place_of_process() -> tuple[int, int]:
    """Rank, and number of workers; 0 and 1 for who trains or evaluates by itself."""
    own = mpi_rank()
    if own is not None and not _says_more(own):
        return (own.rank, own.size) if has_mpi4py() else (0, 1)
    cluster = Cluster.from_environment()
    if cluster is None or cluster.is_evaluator:
        return 0, 1
    return cluster.rank, cluster.num_workers


def _says_more(own: LaunchedRank) -> bool:
    """Whether `TF_CONFIG` names a cluster, or `srun` has started the ranks."""
    is_set = Cluster.from_tf_config(os.environ.get("TF_CONFIG", "")) is not None
    return is_set or is_of_slurm(own)


def is_of_slurm(own: LaunchedRank) -> bool:
    """Whether `srun` has started the ranks, rather than one `mpiexec` per node.

    `mpiexec` starts a process on each node by `srun`, whose ranks inherit its
    variables.

    Args:
        own: `LaunchedRank` of this process.

    Returns:
        Bool.
    """
    if os.environ.get("SLURM_PROCID") != str(own.rank):
        return False
    step = slurm.read(os.environ)
    return step is not None and len(step["workers"]) == own.size


def agree(job: MpiJob, timeout_seconds: float | None = None) -> Cluster:
    """Agree with the other processes of the job on the cluster.

    Args:
        job: `MpiJob`.
        timeout_seconds: Float or `None`, the longest wait for one of them.

    Returns:
        The `Cluster` as this process sees it. GPUs of a host are divided between its
        processes, in `os.environ`.

    Raises:
        ValueError: If a host cannot be reached from the others.
        TimeoutError: If a process does not come in time.
    """
    with reserved_ports(1) as (ports, sockets), answering(*sockets) as token:
        own = ProcessPlacement(
            host_key(), own_addresses(), ports[0], token, visible_gpus()
        )
        places = [
            ProcessPlacement(**facts)
            for facts in job.exchange(dataclasses.asdict(own), timeout_seconds)
        ]
        found = _reached_by(job.rank, places)
        views = job.exchange({"reached": found}, timeout_seconds)
        hosts = choose_hosts(places, [view["reached"] for view in views])
        # No port is given back before all have chosen.
        job.exchange({}, timeout_seconds)
    _divide_gpus(job.rank, places)
    workers = tuple(
        join_address(host, place.port)
        for host, place in zip(hosts, places, strict=True)
    )
    return Cluster(workers, task_index=job.rank)


def _first_of_hosts(places: Sequence[ProcessPlacement]) -> dict[str, int]:
    """The lowest rank of each host."""
    firsts: dict[str, int] = {}
    for rank, place in enumerate(places):
        firsts.setdefault(place.host, rank)
    return firsts


def _reached_by(rank: int, places: Sequence[ProcessPlacement]) -> dict[str, list[str]]:
    """Find the addresses of other hosts that are reached from here, by their rank."""
    firsts = _first_of_hosts(places)
    if firsts[places[rank].host] != rank:
        return {}  # the first one of this host tries
    others = {r: places[r] for r in firsts.values() if r != rank}
    found = reached({r: (p.addresses, p.port, p.token) for r, p in others.items()})
    return {str(r): addresses for r, addresses in found.items()}  # as JSON has keys


def choose_hosts(
    places: Sequence[ProcessPlacement], views: Sequence[dict[str, list[str]]]
) -> list[str]:
    """Choose the address of each process's host: the first that all others reach.

    Args:
        places: Sequence of `ProcessPlacement`, in the order of ranks.
        views: Sequence of dicts, what the first process of each host has reached: from
            the first rank of another host to its addresses. Of the others, empty.

    Returns:
        List of strings, in the order of ranks.

    Raises:
        ValueError: If a host has no such address.
    """
    firsts = _first_of_hosts(places)
    if len(firsts) == 1:
        return [_LOCAL_HOST] * len(places)
    chosen: dict[str, str] = {}
    for host, rank in firsts.items():
        others = [r for r in firsts.values() if r != rank]
        common = [
            address
            for address in places[rank].addresses
            if all(address in views[r].get(str(rank), ()) for r in others)
        ]
        if not common:
            raise ValueError(_unreachable(rank, places[rank], others, views))
        chosen[host] = common[0]
    return [chosen[place.host] for place in places]


def _unreachable(
    rank: int,
    place: ProcessPlacement,
    others: Sequence[int],
    views: Sequence[dict[str, list[str]]],
) -> str:
    sizes = [(len(views[r].get(str(rank), ())), r) for r in others]
    at = min(sizes)[1]
    tried = ", ".join(place.addresses) or "none"
    return (
        f"The host of rank {rank} has no address at which all other hosts reach it; "
        f"from that of rank {at} the fewest answered. Open the ports from 10000 on "
        "between the hosts, or set TF_CONFIG. "
        f"Received: addresses {tried}, port {place.port}"
    )


def _divide_gpus(rank: int, places: Sequence[ProcessPlacement]) -> None:
    """Give each process of a host its part of the GPUs, if all see the same ones."""
    peers = [r for r, place in enumerate(places) if place.host == places[rank].host]
    gpus: Any = places[rank].gpus
    if all(places[r].gpus == gpus for r in peers):
        os.environ.update(own_gpus(peers.index(rank), len(peers), gpus))
