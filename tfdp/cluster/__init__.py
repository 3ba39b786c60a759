"""The cluster of `TF_CONFIG` or of a Slurm step, as plain values and sockets.

Nothing here imports TensorFlow, so that the command line reads a cluster in
milliseconds.
"""

from __future__ import annotations

from tfdp.cluster.address import split_address
from tfdp.cluster.join_guard import guarded
from tfdp.cluster.local_ports import free_ports
from tfdp.cluster.nodes import topology_of
from tfdp.cluster.ports import (
    Answer,
    answers,
    check_port_free,
    knock,
    meet,
    name_workers,
    unreachable,
)
from tfdp.cluster.spec import Cluster
from tfdp.cluster.topology import Topology

__all__ = [
    "Answer",
    "Cluster",
    "Topology",
    "answers",
    "check_port_free",
    "free_ports",
    "guarded",
    "knock",
    "meet",
    "name_workers",
    "split_address",
    "topology_of",
    "unreachable",
]
