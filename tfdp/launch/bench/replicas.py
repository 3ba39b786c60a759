"""Replicas of a benchmark: local workers, or the cluster of this process."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tfdp.ground.plans.topology import Topology
from tfdp.launch.bench.channel import Variants
from tfdp.launch.bench.sides import Runner, Side, started


class ReplicaSettings:
    """Base class of settings of a benchmark that runs on a choice of replicas.

    It is not a dataclass, so that each benchmark orders its own fields.

    Attributes:
        algorithms: Sequence of strings, algorithms of the all-reduce.
        num_workers: Int, number of local processes, or `None` for the cluster that this
            process belongs to.
        devices_per_worker: Int, logical CPU devices of each worker, or `None` for one.
        node_size: Int, number of replicas that count as one node, or `None` for the
            real nodes.
    """

    algorithms: Sequence[str]
    num_workers: int | None
    devices_per_worker: int | None
    node_size: int | None

    @property
    def worker_setup(self) -> dict[str, Any]:
        """Dict that each worker receives: `"strategy"`, `"devices"` and `"addresses"`.

        The strategy is `"tfdp"` for several local workers, or else `"auto"`. The
        addresses are empty: `Side` fills in those of local workers.
        """
        return {
            "strategy": "tfdp" if (self.num_workers or 0) > 1 else "auto",
            "devices": self.devices_per_worker,
            "addresses": [],
        }

    def check(self, topology: Topology) -> None:
        """Check that there are enough replicas and nodes for each of `algorithms`.

        Each needs two replicas; `"hierarchical"` needs several nodes with the same
        number of replicas, at least two.

        Args:
            topology: `Topology` of the replicas.

        Raises:
            ValueError: If there are too few, or if `node_size` does not divide the
                number of replicas.
        """
        count = topology.num_replicas
        if count < 2:
            raise ValueError(
                "A collective needs at least 2 replicas; give -n, or "
                f"--devices-per-worker, or run it in a cluster. Received: {count}"
            )
        if "hierarchical" in self.algorithms and not topology.supports_hierarchy:
            raise ValueError(
                "The hierarchical algorithm needs several nodes with the same number "
                "of replicas, at least 2; --node-size sets the replicas of a node. "
                f"Received: nodes of {[len(node) for node in topology.nodes]}"
            )
        if self.node_size and count % self.node_size:
            raise ValueError(
                f"--node-size must divide the number of replicas, {count}. "
                f"Received: {self.node_size}"
            )


class Replicas(NamedTuple):
    """Replicas that are ready to run the blocks of a benchmark.

    Args:
        runner: `Runner` of the replicas' measured variants.
        topology: `Topology` of the replicas.
        is_chief: Bool, whether this process reports the results.
    """

    runner: Runner
    topology: Topology
    is_chief: bool


class ClusterRunner:
    """Runner that runs a variant on all workers of the cluster of this process.

    Each worker runs the variant itself; the measurements are all-gathered.

    Args:
        worker_group: `WorkerGroup` of the strategy.
        variants: `Variants`, the measured variants of this process.
    """

    name = "here"

    def __init__(self, worker_group: Any, variants: Variants) -> None:
        self._worker_group, self._variants = worker_group, variants

    def run(self, variant: str, steps: int) -> list[Any]:
        """Run steps of a measured variant, and return each worker's measurement.

        All workers of the cluster must call this method with the same arguments.

        Args:
            variant: String, name of the variant: a key of `Variants`.
            steps: Int, number of steps, which run without interruption.
        """
        measurement = self._variants[variant](steps)
        return self._worker_group.all_gather(f"time of {variant}", measurement)


@contextlib.contextmanager
def ready_replicas(settings: ReplicaSettings, worker: str) -> Iterator[Replicas]:
    """Start local workers, or without `num_workers` join this process's cluster.

    Args:
        settings: `ReplicaSettings` of the benchmark.
        worker: String, the module of a worker. Its `make_variants` takes a worker's
            setup, and a callable that checks the `Topology`; the result has a
            `strategy`.

    Yields:
        `Replicas`. Local workers are killed when the context ends.

    Raises:
        ValueError: If the replicas cannot run the settings.
    """
    if settings.num_workers is None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        module = importlib.import_module(worker)
        variants = module.make_variants(settings.worker_setup, settings.check)
        extended = variants.strategy.extended
        group, topology = extended.worker_group, extended.algorithm_selector.topology
        yield Replicas(ClusterRunner(group, variants), topology, group.is_chief)
        return
    topology = local_topology(
        settings.num_workers, settings.devices_per_worker, settings.node_size
    )
    settings.check(topology)
    side = Side("workers", worker, settings.worker_setup, settings.num_workers)
    with started(side):
        yield Replicas(side, topology, is_chief=True)


def local_topology(
    num_workers: int | None, devices_per_worker: int | None, node_size: int | None
) -> Topology:
    """Return the topology of local processes.

    Args:
        num_workers: Int, number of processes, or `None` for one.
        devices_per_worker: Int, number of devices of a process, or `None` for one.
        node_size: Int, number of replicas that count as one node, or `None` for all.

    Returns:
        `Topology`.

    Example:

    >>> local_topology(3, None, 2).nodes
    ((0, 1), (2,))
    """
    count = (num_workers or 1) * (devices_per_worker or 1)
    size = node_size or count
    starts = range(0, count, size)
    return Topology(tuple(tuple(range(s, min(s + size, count))) for s in starts))
