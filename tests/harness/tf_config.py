"""`TF_CONFIG` of clusters on this machine."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any


def free_ports(count: int) -> list[int]:
    """Returns ports that are free now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("localhost", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def cluster_configs(
    num_workers: int,
    devices_per_worker: int | Sequence[int] | None = None,
    host: str = "localhost",
    addresses: Sequence[str] | None = None,
) -> list[str]:
    """The `TF_CONFIG` of each worker of a cluster, by default on free ports."""
    shown = f"[{host}]" if ":" in host else host
    if addresses is None:
        addresses = [f"{shown}:{port}" for port in free_ports(num_workers)]
    texts = []
    for rank in range(num_workers):
        config: dict[str, Any] = {
            "cluster": {"worker": list(addresses)},
            "task": {"type": "worker", "index": rank},
        }
        if devices_per_worker is not None:
            listed = isinstance(devices_per_worker, Sequence)
            count = devices_per_worker[rank] if listed else devices_per_worker
            config["tfdp"] = {"devices_per_worker": count}
        texts.append(json.dumps(config))
    return texts
