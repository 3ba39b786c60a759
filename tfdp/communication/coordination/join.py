"""Start-up of a worker: check the set-up and join the cluster."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.communication.cluster import Cluster, find_cluster
from tfdp.communication.cluster.devices import set_logical_cpus
from tfdp.communication.cluster.limits import check_limits
from tfdp.communication.coordination.preemption import PREEMPTED
from tfdp.communication.store import JobAlreadyRunning, Membership, ask_job
from tfdp.ground import forks, user_code
from tfdp.ground.options import CommunicationOptions
from tfdp.ground.text import say

# After a cluster has changed, a worker without a timeout waits at most this long for
# the others, since one of them may be lost meanwhile.
_REFORM_SECONDS = 60.0
# A process applies to a running job every `_APPLY_SECONDS`. If no worker of the job has
# answered for `_JOB_ENDED_SECONDS`, the process assumes that the job has ended.
_APPLY_SECONDS, _JOB_ENDED_SECONDS = 0.2, 20.0
_WARN_AFTER_SECONDS = 10.0
# The membership in the present cluster, at most one: a process is a worker of one
# cluster at a time.
_memberships: list[Membership] = []


@dataclasses.dataclass(frozen=True)
class Worker:
    """Cluster, devices and membership of this process, from which a strategy is made.

    Args:
        cluster: `Cluster`, or `None` on a single machine.
        resolver: TensorFlow's `ClusterResolver`, the strategy's `cluster_resolver`; it
            also names a task that trains alone.
        devices: Sequence of device strings, the user's choice, or `None`.
        timeout_seconds: Float or `None`, the longest wait for other workers.
        membership: `Membership` in the cluster, or `None` on a single machine.
        job_to_join: `Cluster` of the running job that this process is to join in `fit`,
            or `None`. Until it has joined, it trains with no other worker.
        min_workers: Int, least number of workers with which training continues after
            the loss of others, or `None` if it does not. Defaults to `None`.
    """

    cluster: Cluster | None
    resolver: Any
    devices: Sequence[str] | None
    timeout_seconds: float | None
    membership: Membership | None = None
    job_to_join: Cluster | None = None
    min_workers: int | None = None

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
    """Find the cluster, check the set-up of this process, and join the cluster.

    A process whose job runs already does not join yet: the result has `job_to_join`.

    Args:
        resolver: TensorFlow's `ClusterResolver`; `None` for the environment's cluster.
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
    if cluster is None or not cluster.may_have_several_workers:
        # This process trains or evaluates alone: it has no cluster, is the only worker
        # of its cluster, or is an evaluator, which as in TensorFlow is not part of the
        # cluster that trains.
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
        and not tf.config.get_visible_devices("GPU"),
    )
    least = cluster.elastic
    if options.on_loss == "continue":
        least = max(options.min_workers, cluster.elastic or 1)
        if least > cluster.num_workers:
            raise ValueError(
                f"`min_workers` must be at most the number of workers, "
                f"{cluster.num_workers}. Received: min_workers={least}"
            )
    limit = options.timeout_seconds
    try:
        if least and not _memberships and ask_job(cluster) is not None:
            raise JobAlreadyRunning
        membership = _join(cluster, limit, may_run_already=least is not None)
    except JobAlreadyRunning:
        resolver = resolver_of_environment(None)
        return Worker(
            None, resolver, devices, limit, job_to_join=cluster, min_workers=least
        )
    if membership.generation:
        # Workers were lost or have joined since the job started, so the cluster differs
        # from `TF_CONFIG`, and from the user's resolver.
        cluster, resolver = membership.cluster, None
    return Worker(
        cluster,
        resolver or _resolver(cluster),
        devices,
        limit,
        membership,
        min_workers=least,
    )


def num_joined_workers() -> int:
    """Return the number of workers of this process's cluster, 1 before it joins."""
    return _memberships[0].cluster.num_workers if _memberships else 1


def join_next_cluster(
    worker: Worker, survivors: Sequence[int], applicants: Sequence[str] = ()
) -> Worker:
    """Join the next cluster of a job, after workers were lost or have applied.

    Args:
        worker: `Worker`, this process in the former cluster.
        survivors: Sequence of ints, the former ranks of the workers that continue.
        applicants: Sequence of strings, `"host:port"` of the processes that are
            admitted. Defaults to none.

    Returns:
        A `Worker`, with a new rank.

    Raises:
        TimeoutError: If another worker of the next cluster does not join in time.
    """
    former, membership = worker.cluster, worker.membership
    assert former is not None
    assert membership is not None
    origin = membership.origin
    workers = [
        *(former.workers[rank] for rank in survivors),
        *applicants,
    ]
    generation = membership.generation + 1
    return _join_later_cluster(worker, origin, workers, generation)


def join_running_job(
    worker: Worker, facts: dict[str, str], timeout_seconds: float | None
) -> Worker:
    """Apply to a running job, and join its cluster once its workers admit this process.

    Args:
        worker: `Worker`, this process, whose `job_to_join` is the job's cluster.
        facts: Dict of strings, the settings that must be the same on all workers.
        timeout_seconds: Float or `None`, the longest wait. `None` means no limit.

    Returns:
        A `Worker`, with its rank in the job.

    Raises:
        TimeoutError: If the job does not admit this process in time.
        ValueError: If the workers of the job have other facts.
        SystemExit: With code 75, if no worker of the job has answered for 20 seconds.
    """
    origin = worker.job_to_join
    assert origin is not None
    begin = heard = time.monotonic()
    first: int | None = None
    while True:
        # The first request only asks for the facts of the job's set-up, and later ones
        # apply to join: the workers must not wait for a process whose facts differ.
        state = ask_job(origin, applies=first is not None)
        if state is not None:
            heard = time.monotonic()
            _check_facts(facts, state.facts)
            first = state.generation if first is None else min(first, state.generation)
            own = origin.workers[origin.rank]
            if state.generation > first and own in state.workers:
                workers = list(state.workers)
                return _join_later_cluster(worker, origin, workers, state.generation)
        if time.monotonic() - heard > _JOB_ENDED_SECONDS:
            say(
                "the job that this worker was to join has ended: none of its "
                f"workers answers. Exit code {PREEMPTED}."
            )
            raise SystemExit(PREEMPTED)
        waited = time.monotonic() - begin
        if timeout_seconds is not None and waited > timeout_seconds:
            raise TimeoutError(
                f"Waited {timeout_seconds:.0f} s for the running job to take this "
                "worker in. It does so in `fit` with `BackupAndRestore`, or at a "
                "commit of `ElasticState`."
            )
        if waited > _WARN_AFTER_SECONDS:
            user_code.warn(
                "Waiting for the running job to take this worker in, which it does in "
                "`fit` with `BackupAndRestore`, at the end of a step, or at a commit "
                "of `ElasticState`.",
                once_for=origin,
                topic="taken in",
            )
        time.sleep(_APPLY_SECONDS)


def _check_facts(own: dict[str, str], others: dict[str, str]) -> None:
    """Raise `ValueError` if facts of this process differ from those of the job.

    Args:
        own: Dict of strings, the settings of this process by name.
        others: Dict of strings, those of the job's workers. Missing names are ignored.
    """
    for name, value in own.items():
        if others.get(name, value) != value:
            raise ValueError(
                f"This worker cannot join the running job, which has other {name}: "
                f"{others[name]}. Received: {value}"
            )


def _join_later_cluster(
    worker: Worker, origin: Cluster, workers: Sequence[str], generation: int
) -> Worker:
    """Join a later cluster of a job; return the `Worker` with its rank there.

    Args:
        worker: `Worker`, this process in its previous cluster.
        origin: `Cluster` of all workers that the job may have.
        workers: Sequence of strings, `"host:port"` of each worker of the cluster.
        generation: Int, number of previous clusters of the job.
    """
    cluster = dataclasses.replace(
        origin,
        workers=tuple(workers),
        has_chief=False,
        task_type="worker",
        task_index=list(workers).index(origin.workers[origin.rank]),
    )
    membership = _join(
        cluster, worker.timeout_seconds or _REFORM_SECONDS, origin, generation
    )
    return dataclasses.replace(
        worker,
        cluster=cluster,
        resolver=_resolver(cluster),
        membership=membership,
        job_to_join=None,
    )


def _join(
    cluster: Cluster,
    timeout_seconds: float | None,
    origin: Cluster | None = None,
    generation: int = 0,
    *,
    may_run_already: bool = False,
) -> Membership:
    """Join a cluster, and leave a previous one.

    If this process already trains in the job whose first cluster is `cluster`, it
    joins no other, and the result is its present membership.

    Args:
        cluster: `Cluster`.
        timeout_seconds: Float or `None`, longest wait for the other workers.
        origin: `Cluster` of all workers that the job may have, or `None` for `cluster`.
        generation: Int, number of previous clusters of the job. Defaults to 0.
        may_run_already: Bool, whether the missing workers may be in a later cluster of
            the job. Defaults to `False`.

    Returns:
        `Membership` of this process in the cluster.
    """
    if not generation and _memberships and _memberships[0].origin == cluster:
        return _memberships[0]
    for former in _memberships:
        former.is_replaced = generation > 0
        former.leave()
    _memberships.clear()
    membership = Membership(cluster, origin, generation)
    try:
        membership.join(timeout_seconds, may_run_already=may_run_already)
    except BaseException:
        membership.leave()
        raise
    forks.at_exit(membership.leave)
    _memberships.append(membership)
    return membership


def resolver_of_environment(cluster: Cluster | None) -> Any:
    """Return the resolver that TensorFlow would use for a process that trains alone.

    Args:
        cluster: `Cluster` of this process, which is used if `TF_CONFIG` has no task; or
            `None`.

    Returns:
        `TFConfigClusterResolver` if `TF_CONFIG` has a task; else a
        `SimpleClusterResolver` of `cluster`, or of no tasks if that is `None`.
    """
    text = os.environ.get("TF_CONFIG", "").strip()
    config = json.loads(text) if text else {}
    # TensorFlow's resolver raises an error for a cluster or task of `null`, which some
    # cluster managers write for a single machine, so such a `TF_CONFIG` is not read.
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
    """Return the cluster of a TensorFlow resolver, or `None` if it lists no tasks.

    Raises `ValueError` unless it is a `ClusterResolver` of a valid cluster.
    """
    if not isinstance(resolver, tf.distribute.cluster_resolver.ClusterResolver):
        raise ValueError(
            "`cluster_resolver` must be a `tf.distribute.cluster_resolver."
            f"ClusterResolver` or None. Received: cluster_resolver={resolver!r}"
        )
    jobs = resolver.cluster_spec().as_dict()
    if not jobs:
        return None
    task = {"type": resolver.task_type, "index": resolver.task_id}
    return Cluster.from_tf_config(json.dumps({"cluster": jobs, "task": task}))
