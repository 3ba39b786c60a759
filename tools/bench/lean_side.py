"""Workers whose resident memory is what they use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdp.bench.sides import Side, worker_commands, worker_environment
from tfdp.cluster import free_ports

# oneDNN and glibc keep what is freed, for later.
WITHOUT_CACHES = {"TF_ENABLE_ONEDNN_OPTS": "0", "MALLOC_MMAP_THRESHOLD_": "100000"}


class LeanSide(Side):
    """A side whose workers give back to the system what they have freed.

    Args:
        name: String, for people.
        module: String, the module that each worker runs.
        setup: Dict, what the workers are told.
        num_workers: Int.
        python: String or `None`, the interpreter. Defaults to this one.
    """

    def __init__(
        self,
        name: str,
        module: str,
        setup: Mapping[str, Any],
        num_workers: int,
        python: str | None = None,
    ) -> None:
        self.name = name
        addresses = [f"127.0.0.1:{port}" for port in free_ports(num_workers)]
        commands = worker_commands(module, setup, addresses, python)
        self._start(commands, {**worker_environment(), **WITHOUT_CACHES})
