"""Start-up of a worker: check the set-up and join the cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdp.communication.cluster import (
    Cluster,
    describe_workers,
    find_cluster,
    join_deadline,
    rendezvous,
    unreachable_workers,
)
from tfdp.communication.cluster.address import split_address
from tfdp.communication.cluster.devices import set_logical_cpus
from tfdp.communication.cluster.limits import check_limits
from tfdp.communication.coordination.preemption import restore_python_handler
from tfdp.ground import _compat, user_code
from tfdp.ground.forks import close_port_in_forks
from tfdp.ground.options import CommunicationOptions

# Timeout of TensorFlow's own heartbeats. It uses the wall clock, so that a change of
# the system time would make all workers look dead. A day disables it in effect:
# `tfdp.communication.coordination.watch` detects lost workers instead.
_HEARTBEAT_SECONDS = 24 * 3600
# Longest wait for the other workers to join, by default. All have started before, but
# initializing many GPUs takes time.
_DEFAULT_JOIN_SECONDS = 300.0
# Added to the guard's deadline, so that an error of TensorFlow comes before it.
_JOIN_SLACK_SECONDS = 5.0
# A worker that ends may still accept connections on its port for this time.
_ENDING_SECONDS, _PROBE_PAUSE_SECONDS = 3.0, 0.2
# The cluster of this process's server, if any; TensorFlow allows only one.
_joined: list[Cluster] = []


@dataclasses.dataclass(frozen=True)
class Worker:
    """This process as a member of its cluster.

    Args:
        cluster: `Cluster`, or `None` on a single machine.
        resolver: The strategy's `cluster_resolver`, which also names a task that trains
            alone.
        devices: Sequence of device strings, the user's choice, or `None`.
        timeout_seconds: Float or `None`, the longest wait for other workers.
    """

    cluster: Cluster | None
    resolver: Any
    devices: Sequence[str] | None
    timeout_seconds: float | None

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
    """Find the cluster and check the set-up as far as possible before joining it.

    Args:
        resolver: A cluster resolver or `None` for the environment's cluster.
        devices: Sequence of device strings or `None`.
        options: `CommunicationOptions`.

    Returns:
        A `Worker`.

    Raises:
        ValueError: If the cluster is invalid, this worker's port is taken, it may open
            too few files, or TensorFlow has already started.
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
    worker = Worker(
        cluster, resolver or _resolver(cluster), devices, options.timeout_seconds
    )
    if _joined == [cluster]:
        return worker  # a second strategy shares the running server
    if _compat.is_context_initialized():
        raise ValueError(
            f"TensorFlow has already started, {user_code.start_of_tensorflow()}. "
            "Create the multi-worker strategy before any other use of TensorFlow: "
            "before tensors, variables, models and datasets."
        )
    if cluster.devices_per_worker:
        set_logical_cpus(cluster.devices_per_worker)
    check_limits(
        cluster.num_workers,
        one_host=len(set(cluster.hosts)) == 1,
        connects=options.backend in ("auto", "direct")
        and not tf.config.list_physical_devices("GPU"),
    )
    missing = rendezvous(cluster, options.timeout_seconds)
    if missing:
        # Without a timeout, `rendezvous` waits until no worker is missing.
        assert options.timeout_seconds is not None
        raise TimeoutError(
            f"Waited {options.timeout_seconds:.0f} s for "
            f"{describe_workers(cluster, missing)}, which did not start. Start every "
            "worker of TF_CONFIG, and check that they reach each other's ports."
        )
    _configure_coordination_service(cluster, options.timeout_seconds)
    return worker


def has_joined(worker: Worker) -> bool:
    """Return whether this process runs a server of the worker's cluster already."""
    return worker.cluster is not None and _joined == [worker.cluster]


def num_joined_workers() -> int:
    """Return the number of workers of this process's cluster, 1 before it joins."""
    return _joined[0].num_workers if _joined else 1


@contextlib.contextmanager
def joining(worker: Worker) -> Iterator[None]:
    """Replace TensorFlow's start-up errors in the block by one clear message.

    Afterwards, Python's handler of SIGTERM is active again.
    """
    try:
        with _deadline(worker):
            yield
        restore_python_handler()
        if worker.cluster is not None:
            _joined[:] = [worker.cluster]
            _, port = split_address(worker.cluster.workers[worker.rank])
            close_port_in_forks(port)
    except (tf.errors.OpError, RuntimeError) as error:
        if worker.cluster is None:
            raise
        is_deadline = isinstance(error, tf.errors.DeadlineExceededError)
        silent = _silent_workers(
            worker.cluster, 0.0 if is_deadline else _ENDING_SECONDS
        )
        if not silent and not isinstance(error, tf.errors.OpError):
            raise
        limit = worker.timeout_seconds or _DEFAULT_JOIN_SECONDS
        if is_deadline:
            text = _deadline_message(worker.cluster, silent, limit)
            raise TimeoutError(text) from error
        raise TimeoutError(_ended_message(worker.cluster, silent, error)) from error


def _silent_workers(cluster: Cluster, seconds: float) -> list[int]:
    """Return the ranks that do not answer now, or stop answering within `seconds`."""
    end = time.monotonic() + seconds
    while True:
        silent = unreachable_workers(cluster, timeout_seconds=1.0)
        if silent or time.monotonic() >= end:
            return silent
        time.sleep(_PROBE_PAUSE_SECONDS)


def _deadline(worker: Worker) -> contextlib.AbstractContextManager:
    """Return a context manager that ends this process if its join takes too long."""
    cluster = worker.cluster
    if cluster is None or has_joined(worker):
        return contextlib.nullcontext()
    others = [
        f"{rank}={address}"
        for rank, address in enumerate(cluster.workers)
        if rank != cluster.rank
    ]
    limit = worker.timeout_seconds or _DEFAULT_JOIN_SECONDS
    # With the slack, an error of TensorFlow at the limit comes before the guard's.
    return join_deadline(others, limit + _JOIN_SLACK_SECONDS)


def _deadline_message(cluster: Cluster, silent: list[int], limit: float) -> str:
    """Format the error of a join that has timed out.

    Args:
        cluster: `Cluster`.
        silent: List of ints, workers that do not answer; empty if all do.
        limit: Float, the time limit.
    """
    if silent:
        return (
            f"{describe_workers(cluster, silent)} started but did not join the cluster "
            f"within {limit:.0f} s. Check the end of the output there, and restart all "
            "workers."
        )
    # Every worker joins at worker 0, and worker 0 waits for all others.
    others = [0] if cluster.rank else list(range(1, cluster.num_workers))
    return (
        f"Waited {limit:.0f} s to join the cluster: all ports answer, but not all "
        "workers have joined. Either a worker hangs, or another program listens on the "
        f"port of {describe_workers(cluster, others)}. Check which process holds it, "
        "and restart all workers."
    )


def _ended_message(cluster: Cluster, ranks: list[int], error: Exception) -> str:
    """Format the error of workers that have ended during the join.

    Args:
        cluster: `Cluster`.
        ranks: List of ints, the workers; empty if they are unknown.
        error: The exception that TensorFlow has raised.
    """
    names = describe_workers(cluster, ranks) or "One of the workers"
    reason = str(getattr(error, "message", error)).partition("\n")[0]
    return (
        f"{names} exited while the workers joined the cluster ({reason}). Check the "
        "end of the output there, and restart all workers."
    )


def _configure_coordination_service(
    cluster: Cluster, timeout_seconds: float | None
) -> None:
    """Configure TensorFlow's coordination service, which worker 0 hosts.

    Args:
        cluster: `Cluster`.
        timeout_seconds: Float or `None`, longest wait for all workers to join.
    """
    join_seconds = timeout_seconds or _DEFAULT_JOIN_SECONDS
    jobs = json.loads(cluster.to_tf_config())["cluster"]
    jobs.pop("evaluator", None)
    leader = (
        "/job:chief/replica:0/task:0"
        if cluster.has_chief
        else ("/job:worker/replica:0/task:0")
    )
    _compat.configure_coordination_service(
        service_type="standalone",
        service_leader=leader,
        cluster_register_timeout_in_ms=int(join_seconds * 1000),
        heartbeat_timeout_in_ms=_HEARTBEAT_SECONDS * 1000,
        coordinated_jobs=_compat.coordinated_jobs(
            {name: len(tasks) for name, tasks in jobs.items()}
        ),
    )


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
