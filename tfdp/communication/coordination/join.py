"""Start-up of a worker: check the set-up and join the cluster."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.communication.cluster import Cluster, find_cluster
from tfdp.communication.cluster.devices import set_logical_cpus
from tfdp.communication.cluster.limits import check_limits
from tfdp.communication.store import Membership
from tfdp.ground import forks
from tfdp.ground.options import CommunicationOptions

# The membership of this process, if any.
_memberships: list[Membership] = []


@dataclasses.dataclass(frozen=True)
class Worker:
    """This process as a member of its cluster.

    Args:
        cluster: `Cluster`, or `None` on a single machine.
        resolver: The strategy's `cluster_resolver`, which also names a task that trains
            alone.
        devices: Sequence of device strings, the user's choice, or `None`.
        timeout_seconds: Float or `None`, the longest wait for other workers.
        membership: `Membership` in the cluster, or `None` on a single machine.
    """

    cluster: Cluster | None
    resolver: Any
    devices: Sequence[str] | None
    timeout_seconds: float | None
    membership: Membership | None = None

    @property
    def num_workers(self) -> int:
        """Int, number of workers that train together."""
        return self.cluster.num_workers if self.cluster else 1

    @property
    def rank(self) -> int:
        """Int, index of this worker; the chief's is 0."""
        return self.cluster.rank if self.cluster else 0

    @property
    def rebalances(self) -> bool:
        """Bool, whether faster workers get more rows of a batch."""
        return self.cluster is not None and self.cluster.rebalance


def start_worker(
    resolver: Any, devices: Sequence[str] | None, options: CommunicationOptions
) -> Worker:
    """Find the cluster, check the set-up of this process, and join.

    Args:
        resolver: A cluster resolver or `None` for the environment's cluster.
        devices: Sequence of device strings or `None`.
        options: `CommunicationOptions`.

    Returns:
        A `Worker`.

    Raises:
        ValueError: If the cluster is invalid, this worker's port is taken, it may open
            too few files, or TensorFlow has started with other devices.
        TimeoutError: If another worker does not start in time.
    """
    cluster = (
        _cluster_of(resolver) if resolver else find_cluster(options.timeout_seconds)
    )
    if cluster is None or cluster.num_workers == 1 or cluster.is_evaluator:
        # As in TensorFlow, an evaluator is not part of the training cluster.
        if cluster is not None and cluster.devices_per_worker:
            set_logical_cpus(cluster.devices_per_worker)
        resolver = resolver or resolver_of_environment(cluster)
        return Worker(None, resolver, devices, options.timeout_seconds)
    if cluster.devices_per_worker:
        set_logical_cpus(cluster.devices_per_worker)
    check_limits(
        cluster.num_workers,
        one_host=len(set(cluster.hosts)) == 1,
        connects=options.backend in ("auto", "direct")
        and not tf.config.list_physical_devices("GPU"),
    )
    return Worker(
        cluster,
        resolver or _resolver(cluster),
        devices,
        options.timeout_seconds,
        _join(cluster, options.timeout_seconds),
    )


def num_joined_workers() -> int:
    """Return the number of workers of this process's cluster, 1 before it joins."""
    return _memberships[0].cluster.num_workers if _memberships else 1


def _join(cluster: Cluster, timeout_seconds: float | None) -> Membership:
    """Join a cluster, unless this process has; leave another one that it was in.

    Args:
        cluster: `Cluster`.
        timeout_seconds: Float or `None`, longest wait for the other workers.
    """
    if _memberships and _memberships[0].cluster == cluster:
        return _memberships[0]
    for former in _memberships:
        former.leave()
    _memberships.clear()
    membership = Membership(cluster)
    try:
        membership.join(timeout_seconds)
    except BaseException:
        membership.leave()
        raise
    forks.at_exit(membership.leave)
    _memberships.append(membership)
    return membership


def resolver_of_environment(cluster: Cluster | None) -> Any:
    """Return the resolver that stock TensorFlow would use for a single process.

    Args:
        cluster: `Cluster` of this process, or `None`.
    """
    text = os.environ.get("TF_CONFIG", "").strip()
    config = json.loads(text) if text else {}
    # TensorFlow's resolver would raise for a cluster or task of `null`, which some
    # cluster managers write.
    if config.get("task") and config.get("cluster", {}) is not None:
        return tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if cluster is not None:
        return _resolver(cluster)
    empty = tf.train.ClusterSpec({})
    return tf.distribute.cluster_resolver.SimpleClusterResolver(empty)


def _resolver(cluster: Cluster) -> Any:
    """Create TensorFlow's `SimpleClusterResolver` of a cluster."""
    jobs = json.loads(cluster.to_tf_config())["cluster"]
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs),
        task_type=cluster.task_type,
        task_id=cluster.task_index,
        rpc_layer="grpc",
    )


def _cluster_of(resolver: Any) -> Cluster | None:
    """Return the cluster of a resolver, or `None` if it names none."""
    jobs = resolver.cluster_spec().as_dict()
    if not jobs:
        return None
    task = {"type": resolver.task_type, "index": resolver.task_id}
    return Cluster.from_tf_config(json.dumps({"cluster": jobs, "task": task}))
