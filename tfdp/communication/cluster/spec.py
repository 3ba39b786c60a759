"""Cluster specification: addresses of all tasks and the rank of this task."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from tfdp.communication.cluster import clouds, slurm, tf_config
from tfdp.communication.cluster.address import canonical_address, split_address
from tfdp.ground.text import pluralize

# Readers of the cluster from environment variables. The first one that finds a cluster
# decides, and `TF_CONFIG` comes first, since users set it themselves.
SOURCES: dict[str, Callable[[Mapping[str, str]], dict[str, Any] | None]] = {
    "TF_CONFIG": lambda environ: tf_config.parse(environ.get("TF_CONFIG", "")),
    "Slurm": slurm.read,
    "SageMaker": clouds.read_sagemaker,
    "Vertex AI": clouds.read_vertex,
}
# A larger number of devices per worker is a typo, and would exhaust memory.
_MAX_DEVICES = 1024


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Workers of a job and this task's rank among them.

    Args:
        workers: Tuple of `"host:port"`, in the order of the global ranks: the
            chief first if there is one, then the workers.
        task_type: `"chief"`, `"worker"` or `"evaluator"`. Defaults to
            `"worker"`.
        task_index: Int, index of this task within its job. Defaults to `0`.
        devices_per_worker: Int, logical CPU devices of each worker, from the
            `tfdp` key of `TF_CONFIG`; or `None` if it sets none.
        evaluators: Tuple of `"host:port"`, at most one, which does not take part
            in training. Defaults to `()`.
        has_chief: Bool, whether `workers[0]` is a `chief` task. Always true
            if `task_type` is `"chief"`. Defaults to `False`.
        rebalance: Bool, whether faster workers get more rows of a batch, from the
            `tfdp` key of `TF_CONFIG`. Defaults to `False`.
        elastic: Int, least number of workers with which the job continues after the
            loss of others, from the `tfdp` key of `TF_CONFIG`; or `None` if that is
            left to the script. Defaults to `None`.
        secret: String, the secret that the launcher has given the workers of a job on
            several hosts in the `tfdp` key of `TF_CONFIG`; or `None`.

    Raises:
        ValueError: If an address is malformed or appears twice, or if the
            task is not in the cluster.

    Example:
    >>> cluster = Cluster(("a:2222", "b:2222"), task_index=1)
    >>> cluster.num_workers, cluster.rank, cluster.address, cluster.is_chief
    (2, 1, 'b:2222', False)

    Source: https://www.tensorflow.org/guide/distributed_training#TF_CONFIG
    """

    workers: tuple[str, ...]
    task_type: str = "worker"
    task_index: int = 0
    devices_per_worker: int | None = None
    evaluators: tuple[str, ...] = ()
    has_chief: bool = False
    rebalance: bool = False
    elastic: int | None = None
    secret: str | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        tf_config.check_job_name(self.task_type)
        if self.task_type == "chief":
            object.__setattr__(self, "has_chief", True)
        object.__setattr__(self, "workers", tuple(self.workers))
        object.__setattr__(self, "evaluators", tuple(self.evaluators))
        _check_addresses(self.workers + self.evaluators)
        _check_index(self)
        _check_devices_per_worker(self.devices_per_worker)
        _check_elastic(self.elastic)
        _check_rebalance(self.rebalance)
        _check_secret(self.secret)

    @classmethod
    def from_tf_config(cls, text: str) -> Cluster | None:
        """Read the value of `TF_CONFIG`.

        Args:
            text: String, the JSON value of `TF_CONFIG`.

        Returns:
            A `Cluster`, or `None` if the text is empty or names no cluster, as in the
            `TF_CONFIG` of cluster managers for a job on a single machine.

        Raises:
            ValueError: If the text is not a valid `TF_CONFIG`.

        Example:
        >>> text = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
        >>> Cluster.from_tf_config(text).workers
        ('a:1',)
        """  # noqa: E501
        fields = tf_config.parse(text)
        return None if fields is None else cls(**fields)

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] = os.environ
    ) -> Cluster | None:
        """Find the cluster that the launcher or the cluster manager set up.

        `TF_CONFIG` comes first; then a Slurm step (`srun`) of several tasks, the
        hosts of a SageMaker job, and the pools of a Vertex AI job (`CLUSTER_SPEC`).

        Args:
            environ: Mapping of environment variables. Defaults to
                `os.environ`.

        Returns:
            A `Cluster`, or `None` if none of these variables describes one.

        Raises:
            ValueError: If the variables are set but invalid.

        Example:
        >>> Cluster.from_environment({}) is None
        True
        """
        for read in SOURCES.values():
            fields = read(environ)
            if fields is not None:
                return cls(**fields)
        return None

    def to_tf_config(self) -> str:
        """Write this cluster as a value for `TF_CONFIG`.

        Returns:
            String, JSON that `from_tf_config` reads as an equal cluster.

        Example:
        >>> cluster = Cluster(("a:1", "b:1"), task_index=1)
        >>> Cluster.from_tf_config(cluster.to_tf_config()) == cluster
        True
        """
        num_chiefs = int(self.has_chief)
        jobs = {
            "chief": list(self.workers[:num_chiefs]),
            "worker": list(self.workers[num_chiefs:]),
            "evaluator": list(self.evaluators),
        }
        config: dict[str, Any] = {
            "cluster": {name: tasks for name, tasks in jobs.items() if tasks},
            "task": {"type": self.task_type, "index": self.task_index},
        }
        fields = {name: getattr(self, name) for name in tf_config.SETTINGS}
        settings = {name: value for name, value in fields.items() if value}
        if settings:
            config["tfdp"] = settings
        return json.dumps(config)

    @property
    def may_grow(self) -> bool:
        """Bool, whether workers that are not in `workers` may join the job.

        They may if both `elastic` and `secret` are set. A launcher on several machines
        gives the workers of such a job a secret that no other job has.
        """
        return self.elastic is not None and self.secret is not None

    @property
    def may_have_several_workers(self) -> bool:
        """Bool, whether this task trains in a job that may have several workers."""
        return not self.is_evaluator and (self.num_workers > 1 or self.may_grow)

    @property
    def num_workers(self) -> int:
        """Int, number of processes that train: the chief and the workers."""
        return len(self.workers)

    @property
    def rank(self) -> int:
        """Int, this worker's index in `workers`; an evaluator's task index."""
        if self.task_type == "worker":
            return self.task_index + int(self.has_chief)
        return self.task_index

    @property
    def is_evaluator(self) -> bool:
        """Bool, whether this task only evaluates and takes no part in training."""
        return self.task_type == "evaluator"

    @property
    def is_chief(self) -> bool:
        """Bool, whether this task writes the shared files.

        This is the chief, or worker 0 if there is no chief. As in TensorFlow, an
        evaluator is the chief of its own, separate run.
        """
        return self.is_evaluator or self.rank == 0

    @property
    def address(self) -> str | None:
        """String, this task's `"host:port"`; `None` if an evaluator has none."""
        if not self.is_evaluator:
            return self.workers[self.rank]
        return self.evaluators[self.task_index] if self.evaluators else None

    @property
    def hosts(self) -> tuple[str, ...]:
        """Tuple of strings, the host of each worker, in the order of ranks."""
        return tuple(split_address(address)[0] for address in self.workers)


def _check_addresses(addresses: tuple[str, ...]) -> None:
    """Raise `ValueError` unless all addresses are valid and distinct."""
    seen: dict[tuple[str, int], str] = {}
    for address in addresses:
        place = canonical_address(address)
        if place in seen:
            raise ValueError(
                "Two tasks of the cluster have the same address; give each its own "
                f"port (or host) in TF_CONFIG. Received: {seen[place]!r} and "
                f"{address!r}"
            )
        seen[place] = address


def _check_index(cluster: Cluster) -> None:
    """Raise `ValueError` unless `task_index` is the index of a task of its job."""
    index, job = cluster.task_index, cluster.task_type
    if isinstance(index, bool) or not isinstance(index, int):
        raise ValueError(
            "The index of a task in TF_CONFIG must be an int. "
            f"Received: {tf_config.describe(index)}"
        )
    if len(cluster.evaluators) > 1:
        raise ValueError(
            "A cluster has at most one 'evaluator'. "
            f"Received: {len(cluster.evaluators)} of them in TF_CONFIG"
        )
    num_chiefs = int(cluster.has_chief)
    num_tasks = {
        "chief": min(num_chiefs, cluster.num_workers),
        "worker": cluster.num_workers - num_chiefs,
        # As in TensorFlow, an evaluator need not be listed in the cluster, and is then
        # the only one.
        "evaluator": max(1, len(cluster.evaluators)),
    }[job]
    if not 0 <= index < num_tasks:
        indices = f"from 0 to {num_tasks - 1}" if num_tasks > 1 else "0"
        known = f"index must be {indices}" if num_tasks > 0 else "cluster has none"
        raise ValueError(
            f"This task of TF_CONFIG is {job} {tf_config.describe(index)}, but its "
            f"{known}. Correct the task or the cluster. Received: "
            f"{pluralize(num_tasks, 'task')} in job {job!r}"
        )


def _check_devices_per_worker(devices: object) -> None:
    """Raise `ValueError` unless the number is `None` or an int from 1 to 1024."""
    if devices is None:
        return
    is_int = isinstance(devices, int) and not isinstance(devices, bool)
    if not is_int or devices not in range(1, _MAX_DEVICES + 1):
        raise ValueError(
            "devices_per_worker (in the 'tfdp' key of TF_CONFIG) must be an int of "
            f"at least 1 and at most {_MAX_DEVICES}. "
            f"Received: devices_per_worker={tf_config.describe(devices)}"
        )


def _check_elastic(elastic: object) -> None:
    """Raise `ValueError` unless `elastic` is `None` or a positive int."""
    is_int = isinstance(elastic, int) and not isinstance(elastic, bool)
    if elastic is not None and (not is_int or elastic < 1):  # type: ignore[operator]
        raise ValueError(
            "elastic (in the 'tfdp' key of TF_CONFIG) must be an int of at least 1. "
            f"Received: elastic={tf_config.describe(elastic)}"
        )


def _check_rebalance(rebalance: object) -> None:
    """Raise `ValueError` unless `rebalance` is a bool."""
    if not isinstance(rebalance, bool):
        raise ValueError(
            "rebalance (in the 'tfdp' key of TF_CONFIG) must be true or false. "
            f"Received: rebalance={tf_config.describe(rebalance)}"
        )


def _check_secret(secret: object) -> None:
    """Raise `ValueError` unless `secret` is `None` or a non-empty string."""
    if not (secret is None or (isinstance(secret, str) and secret)):
        raise ValueError(
            "secret (in the 'tfdp' key of TF_CONFIG) must be a string that is not "
            f"empty. Received: {type(secret).__name__}"
        )
