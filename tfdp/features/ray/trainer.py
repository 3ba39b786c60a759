"""Trainer that runs the workers of Ray Train as a cluster of tf.distribute."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import ray
from ray.train import DataConfig, RunConfig, ScalingConfig
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from tfdp.communication.connection.secret import new_secret
from tfdp.features.tracking.watch import disable_trackers_by_rank

# With this environment variable TensorFlow uses Keras 2, which tfdp does not support:
# each worker removes the variable.
_LEGACY = "TF_USE_LEGACY_KERAS"


class KerasTrainer(DataParallelTrainer):
    """Run a training function on every worker of a Ray cluster, with `TF_CONFIG` set.

    The function contains ordinary tfdp code: `tfdp.auto_strategy()` creates the
    strategy of all workers. When Ray restarts workers, after a failure or with another
    number of them, the function runs again; `tfdp.callbacks.BackupAndRestore` with a
    path that all nodes share resumes the run.

    Unlike Ray's `TensorflowTrainer`, it does not require Keras 2.

    Args:
        train_loop_per_worker: Callable that takes no argument, or a dict.
        train_loop_config: Dict, the argument of the function, or `None`. Defaults to
            `None`.
        scaling_config: `ray.train.ScalingConfig`: number of workers, or a tuple of
            their smallest and largest number, and resources of each worker. Defaults
            to `None`: one worker with one CPU.
        run_config: `ray.train.RunConfig`: name, storage, failures. Defaults to `None`.
        datasets: Dict from a name to a `ray.data.Dataset`, see `dataset_shard`.
            Defaults to `None`.
        dataset_config: `ray.train.DataConfig` or `None`. Defaults to `None`.

    Raises:
        ValueError: If Ray rejects an argument.

    Example:

    >>> from ray.train import ScalingConfig
    >>> trainer = KerasTrainer(print, scaling_config=ScalingConfig(num_workers=2))
    >>> trainer.scaling_config.num_workers
    2

    Source: Ray Train, https://docs.ray.io/en/latest/train/train.html
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: dict[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
    ) -> None:
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=_KerasConfig(),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
        )


@dataclasses.dataclass
class _KerasConfig(BackendConfig):
    """Backend config through which Ray finds `_KerasBackend`."""

    @property
    def backend_cls(self) -> type[Backend]:
        """Class, the backend that Ray creates for the workers."""
        return _KerasBackend


class _KerasBackend(Backend):
    """Backend that sets `TF_CONFIG` on each worker before the training function."""

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Set `TF_CONFIG` on each worker: all addresses, its rank and a new secret."""
        del backend_config
        addresses = worker_group.execute(_own_address)
        secret = new_secret()
        ray.get(
            [
                worker_group.execute_single_async(
                    rank, _set_up, addresses, rank, secret
                )
                for rank in range(len(worker_group))
            ]
        )


def _own_address() -> str:
    """Return the host and a free port of this worker, as `host:port`."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"


def _set_up(addresses: list[str], rank: int, secret: str) -> None:
    """Set `TF_CONFIG` of this worker, and have only the first worker log to trackers.

    Args:
        addresses: List of strings, `"host:port"` of all workers, by rank.
        rank: Int, rank of this worker.
        secret: String, by which the job's workers authenticate each other.

    Raises:
        RuntimeError: If Keras 2 is loaded in this process.
    """
    if "tf_keras" in sys.modules:
        raise RuntimeError(
            "Keras 2 (`tf_keras`) is loaded in this worker, and tfdp needs Keras 3. "
            f"Import `keras`, and leave {_LEGACY} unset where Ray is started: "
            f"{_LEGACY}={os.environ.get(_LEGACY)!r}"
        )
    os.environ.pop(_LEGACY, None)
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": rank},
            "tfdp": {"secret": secret},
        }
    )
    disable_trackers_by_rank(rank)
