"""Comparison of the workers' set-ups, once all have joined the cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdp.communication.cluster import topology_of
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.ground import _compat
from tfdp.ground.options import CommunicationOptions
from tfdp.ground.plans.topology import Topology


def check_same_setup(
    worker_group: WorkerGroup,
    devices: Sequence[str],
    options: CommunicationOptions,
    *,
    rebalances: bool = False,
) -> list[str]:
    """Raise on every worker if device counts, versions or options differ.

    Args:
        worker_group: `WorkerGroup`.
        devices: Sequence of strings, full names of the local devices.
        options: `CommunicationOptions`.
        rebalances: Bool, whether rows follow the workers' speed. Defaults to `False`.

    Returns:
        List of strings, the devices of all workers in the order of ranks.

    Raises:
        ValueError: Naming the first worker that differs from worker 0.
    """
    kinds = sorted({_compat.device_type(device) for device in devices})
    facts = {
        "devices per worker": f"{len(devices)} x {'/'.join(kinds)}",
        # What a step is made of. Another Python computes the same.
        "TensorFlow version": tf.__version__,
        "Keras version": keras.__version__,
        "tfdp version": _own_version(),
        "settings of `rebalance`": str(rebalances).lower(),
    }
    for field in dataclasses.fields(options):
        # Each may wait as long as it likes, and has interfaces of its own.
        if field.name not in ("timeout_seconds", "interface"):
            facts[f"`{field.name}` options"] = repr(getattr(options, field.name))
    own = json.dumps({"devices": list(devices), "facts": facts})
    messages = [json.loads(text) for text in worker_group.all_gather("start-up", own)]
    first = messages[0]["facts"]
    for rank, message in enumerate(messages):
        for name, value in message["facts"].items():
            if value != first[name]:
                worker_group.leave()
                raise ValueError(
                    f"Workers have different {name}: worker 0 has {first[name]}, "
                    f"worker {rank} has {value}. Start all workers alike."
                )
    return [device for message in messages for device in message["devices"]]


def agreed_topology(
    worker_group: WorkerGroup,
    hosts: Sequence[str],
    num_local: int,
    options: CommunicationOptions,
) -> Topology:
    """Find which replicas share a node; all workers take the first one's answer.

    Args:
        worker_group: `WorkerGroup`.
        hosts: Sequence of strings, the host of each worker.
        num_local: Int, replicas of a worker.
        options: `CommunicationOptions`.

    Returns:
        A `Topology`.

    Raises:
        ValueError: If `node_size` or `nodes` do not fit the cluster.
    """
    found = topology_of(
        hosts, num_local, node_size=options.node_size, nodes=options.nodes
    )
    # A name may have other addresses on another machine.
    return Topology.from_json(worker_group.all_gather("topology", found.to_json())[0])


def _own_version() -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("tfdp")
    return "not installed"
