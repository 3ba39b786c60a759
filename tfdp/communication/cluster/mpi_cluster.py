"""Cluster of an MPI job: its processes agree on addresses and ports over MPI."""

from __future__ import annotations

import dataclasses
import os
import secrets
import threading
from collections.abc import Sequence
from typing import Any

from tfdp.communication.cluster import slurm
from tfdp.communication.cluster.address import join_address
from tfdp.communication.cluster.gpus import gpu_environment, visible_gpus
from tfdp.communication.cluster.launchers import LaunchedRank, has_mpi4py, mpi_rank
from tfdp.communication.cluster.mpi_job import MpiJob
from tfdp.communication.cluster.mpi_start import start_job
from tfdp.communication.cluster.own_addresses import (
    answer_with_token,
    host_key,
    own_addresses,
    reachable_addresses,
)
from tfdp.communication.cluster.ports import reserved_ports
from tfdp.communication.cluster.spec import Cluster

# Workers on one machine use this address, as in clusters of `tfdp run`, since no other
# host can reach it.
_LOCAL_HOST = "127.0.0.1"
# Random bytes of the secret by which processes on several hosts recognize each other:
# 128 bits cannot be guessed.
_SECRET_BYTES = 16
_agreed: list[Cluster] = []
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class ProcessPlacement:
    """Host, port and GPUs of one process of the job, as it sends them to the others.

    Args:
        host: String, a key that is equal for processes on one host and network.
        addresses: Sequence of strings, the IP addresses of the host.
        port: Int, port on which this process will listen.
        token: String, which the process sends to each connection to the port until all
            processes have agreed.
        gpus: Sequence of strings, the GPUs that the process sees.
    """

    host: str
    addresses: Sequence[str]
    port: int
    token: str
    gpus: Sequence[str]


def find_cluster(timeout_seconds: float | None = None) -> Cluster | None:
    """Find the cluster of `TF_CONFIG`, of a Slurm step, or of an MPI job.

    In an MPI job with mpi4py, the processes agree on their addresses at the first call,
    which all of them must make. If all tasks of a host in a Slurm step or an MPI job
    see the same GPUs, `CUDA_VISIBLE_DEVICES` of each is set to its part of them.

    Args:
        timeout_seconds: Float or `None`, the longest wait for the other processes of
            an MPI job. Defaults to `None`, no limit.

    Returns:
        A `Cluster`; or `None` if there is no such job, or an MPI job lacks mpi4py.

    Raises:
        ValueError: If the environment variables or the processes contradict each other.
        TimeoutError: If a process of the MPI job does not join in time.
    """
    launched = mpi_rank()
    if launched is None or _uses_other_source(launched):
        cluster = Cluster.from_environment()
        if cluster is not None and not _is_in_tf_config():
            os.environ.update(slurm.gpus_of_task(os.environ))
        return cluster
    if not has_mpi4py():
        # Without mpi4py the ranks cannot agree. Slurm's variables, if set, do not help:
        # they describe the helpers of mpiexec, which has started them by `srun`.
        return None
    with _lock:
        if not _agreed:
            _agreed.append(
                agree_on_cluster(start_job(timeout_seconds), timeout_seconds)
            )
    return _agreed[0]


def count_workers() -> int:
    """Count the workers that a strategy would have, without waiting for them.

    Returns:
        Int; 1 for a process that runs alone, such as an evaluator.

    Raises:
        ValueError: If the environment variables that define the cluster, such as
            `TF_CONFIG`, contradict each other.
    """
    return _rank_and_num_workers()[1]


def rank_of_process() -> int:
    """Find the rank that this process would have, without waiting for the others.

    Returns:
        Int; 0 for a process that runs alone, such as an evaluator.

    Raises:
        ValueError: If the environment variables that define the cluster, such as
            `TF_CONFIG`, contradict each other.
    """
    return _rank_and_num_workers()[0]


def _rank_and_num_workers() -> tuple[int, int]:
    """Return the rank and number of workers; 0 and 1 for a process that runs alone."""
    launched = mpi_rank()
    if launched is not None and not _uses_other_source(launched):
        return (launched.rank, launched.size) if has_mpi4py() else (0, 1)
    cluster = Cluster.from_environment()
    if cluster is None or cluster.is_evaluator:
        return 0, 1
    return cluster.rank, cluster.num_workers


def _uses_other_source(launched: LaunchedRank) -> bool:
    """Return whether `TF_CONFIG` or Slurm, rather than MPI, defines the cluster.

    Args:
        launched: `LaunchedRank` of this process.
    """
    return _is_in_tf_config() or is_started_by_srun(launched)


def _is_in_tf_config() -> bool:
    """Return whether `TF_CONFIG` defines the cluster."""
    return Cluster.from_tf_config(os.environ.get("TF_CONFIG", "")) is not None


def is_started_by_srun(launched: LaunchedRank) -> bool:
    """Return whether `srun` itself has started the ranks, rather than `mpiexec`.

    `mpiexec` starts a helper process on each node by `srun`, and the ranks inherit
    Slurm's variables from it.

    Args:
        launched: `LaunchedRank` of this process.

    Returns:
        Bool.
    """
    if os.environ.get("SLURM_PROCID") != str(launched.rank):
        return False
    step = slurm.read(os.environ)
    return step is not None and len(step["workers"]) == launched.size


def agree_on_cluster(job: MpiJob, timeout_seconds: float | None = None) -> Cluster:
    """Agree with the other processes of the job on the cluster.

    If all processes of a host see the same GPUs, `CUDA_VISIBLE_DEVICES` of each is set
    to its part of them.

    Args:
        job: `MpiJob`, the job of this process.
        timeout_seconds: Float or `None`, the longest wait for another process.

    Returns:
        The `Cluster`, with the task index of this process.

    Raises:
        ValueError: If a host cannot be reached from the others.
        TimeoutError: If a process does not join in time.
    """
    with reserved_ports(1) as (ports, sockets), answer_with_token(*sockets) as token:
        placement = ProcessPlacement(
            host_key(), own_addresses(), ports[0], token, visible_gpus()
        )
        placements = [
            ProcessPlacement(**fields)
            for fields in job.exchange(dataclasses.asdict(placement), timeout_seconds)
        ]
        reachable = _probe_other_hosts(job.rank, placements)
        own = {"reached": reachable, "secret": secrets.token_hex(_SECRET_BYTES)}
        views = job.exchange(own, timeout_seconds)
        hosts = choose_hosts(placements, [view["reached"] for view in views])
        # Ports stay reserved until all processes have chosen, because another process's
        # probe needs an answer on them.
        job.exchange({}, timeout_seconds)
    _divide_gpus(job.rank, placements)
    workers = tuple(
        join_address(host, place.port)
        for host, place in zip(hosts, placements, strict=True)
    )
    is_one_host = len(_first_ranks(placements)) == 1
    secret = None if is_one_host else views[0]["secret"]
    return Cluster(workers, task_index=job.rank, secret=secret)


def _first_ranks(placements: Sequence[ProcessPlacement]) -> dict[str, int]:
    """Return the lowest rank on each host, by the host's key.

    Args:
        placements: Sequence of `ProcessPlacement`, in the order of ranks.

    Returns:
        Dict from `ProcessPlacement.host` to a rank.
    """
    firsts: dict[str, int] = {}
    for rank, place in enumerate(placements):
        firsts.setdefault(place.host, rank)
    return firsts


def _probe_other_hosts(
    rank: int, placements: Sequence[ProcessPlacement]
) -> dict[str, list[str]]:
    """Return the addresses of other hosts that are reachable from this host.

    Args:
        rank: Int, rank of this process.
        placements: Sequence of `ProcessPlacement`, in the order of ranks.

    Returns:
        Dict from the first rank of a host, as text, to its addresses; empty if this
        process is not the first of its host.
    """
    firsts = _first_ranks(placements)
    if firsts[placements[rank].host] != rank:
        return {}  # the first process of this host probes for all of them
    others = {r: placements[r] for r in firsts.values() if r != rank}
    found = reachable_addresses(
        {r: (p.addresses, p.port, p.token) for r, p in others.items()}
    )
    return {str(r): addresses for r, addresses in found.items()}  # JSON keys are text


def choose_hosts(
    places: Sequence[ProcessPlacement], views: Sequence[dict[str, list[str]]]
) -> list[str]:
    """Choose the address of each process's host: the first that all others reach.

    Args:
        places: Sequence of `ProcessPlacement`, in the order of ranks.
        views: Sequence of dicts, in the order of ranks, from the first rank of another
            host to its addresses that the process has reached. Empty for a process that
            is not the first of its host.

    Returns:
        List of strings, in the order of ranks.

    Raises:
        ValueError: If a host has no address that all others reach.
    """
    firsts = _first_ranks(places)
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
    """Format the error of a host that the other hosts do not reach at one address.

    Args:
        rank: Int, the first rank of the host.
        place: `ProcessPlacement` of that rank.
        others: Sequence of ints, the first ranks of the other hosts.
        views: Sequence of dicts, the reached addresses by rank, as in `choose_hosts`.
    """
    sizes = [(len(views[r].get(str(rank), ())), r) for r in others]
    at = min(sizes)[1]
    tried = ", ".join(place.addresses) or "none"
    return (
        f"The host of rank {rank} has no address that all other hosts can reach; the "
        f"host of rank {at} reached the fewest. Open all ports from 10000 between the "
        "hosts, or set TF_CONFIG. "
        f"Received: addresses {tried}, port {place.port}"
    )


def _divide_gpus(rank: int, placements: Sequence[ProcessPlacement]) -> None:
    """Set `CUDA_VISIBLE_DEVICES` to this process's part of the GPUs of its host.

    Do nothing unless all processes of the host see the same GPUs.

    Args:
        rank: Int, rank of this process.
        placements: Sequence of `ProcessPlacement`, in the order of ranks.
    """
    peers = [
        r for r, place in enumerate(placements) if place.host == placements[rank].host
    ]
    gpus: Any = placements[rank].gpus
    if all(placements[r].gpus == gpus for r in peers):
        os.environ.update(gpu_environment(peers.index(rank), len(peers), gpus))
