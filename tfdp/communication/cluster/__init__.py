"""Clusters of `TF_CONFIG`, Slurm, clouds and MPI: addresses, ports, devices.

Only `devices` and `cpu_kernels` import TensorFlow, so that the command line reads a
cluster in milliseconds. Reading order:
    spec: the cluster and this task's rank
    tf_config, slurm, clouds: read it from the environment
    launchers: ranks that MPI and other launchers set in the environment
    mpi_guard, mpi_start, mpi_job, mpi_cluster: cluster of an MPI job, agreed over MPI
    own_addresses, gpus: IP addresses and GPUs of this host
    address, ports: find, open and probe ports
    limits: open files and threads that a worker needs, and their limits
    nodes: replicas of each node, and how they are found
    devices: local devices that hold a replica
    cpu_kernels: whether TensorFlow uses oneDNN on CPUs, and the cost if not
    process_tree: kill processes together with their descendants
"""

from __future__ import annotations

from tfdp.communication.cluster.address import split_address
from tfdp.communication.cluster.launchers import unconnected_processes
from tfdp.communication.cluster.mpi_cluster import (
    count_workers,
    find_cluster,
    rank_of_process,
)
from tfdp.communication.cluster.nodes import topology_of
from tfdp.communication.cluster.ports import (
    ProbeResult,
    describe_workers,
    free_ports,
    listen,
    probe_port,
    unreachable_workers,
)
from tfdp.communication.cluster.spec import Cluster

__all__ = [
    "Cluster",
    "ProbeResult",
    "count_workers",
    "describe_workers",
    "find_cluster",
    "free_ports",
    "listen",
    "probe_port",
    "rank_of_process",
    "split_address",
    "topology_of",
    "unconnected_processes",
    "unreachable_workers",
]
