"""TensorFlow's server, which NCCL and `backend="ring"` need between workers."""

from __future__ import annotations

import dataclasses
import json
import sys

import tensorflow as tf

from tfdp.communication.cluster import Cluster, free_ports
from tfdp.communication.cluster.address import join_address
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.ground import forks, user_code
from tfdp.ground._compat import runtime
from tfdp.ground.options import CommunicationOptions

# TensorFlow allows only one server in a process. So the cluster of the started server
# is kept here, and later strategies of the same cluster use that server.
_started: list[Cluster] = []


def start_server(
    cluster: Cluster,
    worker_group: WorkerGroup,
    options: CommunicationOptions,
    *,
    may_change: bool,
) -> None:
    """Start TensorFlow's server on all workers, if the backend of any worker uses it.

    The server runs any graph that it is sent, on a port of all interfaces. The port is
    a free one, since the worker's port in the cluster is the store's.

    Args:
        cluster: `Cluster` of this process.
        worker_group: `WorkerGroup` between the workers.
        options: `CommunicationOptions`.
        may_change: Bool, whether training is to continue after the loss of workers.

    Raises:
        ValueError: On all workers, if TensorFlow has already started on one of them, or
            training is to continue without lost workers.
    """
    has_server = _started == [cluster]
    too_late = not has_server and runtime.is_context_initialized()
    began = user_code.start_of_tensorflow() if too_late else ""
    found = worker_group.all_gather("start", [_needs_server(options), began])
    if has_server or not any(needs for needs, _ in found):
        return
    if may_change:
        raise ValueError(
            '`on_loss="continue"` is for `backend="direct"` on CPUs: TensorFlow\'s own '
            "collectives, NCCL's among them, cannot continue without a worker. Use "
            '`on_loss="stop"` and `tfdp run --max-restarts`.'
        )
    for rank, (_, began) in enumerate(found):
        if began:
            raise ValueError(
                f"TensorFlow has already started on worker {rank}, {began}. GPUs and "
                '`backend="ring"` need TensorFlow\'s server between workers, which '
                "starts with TensorFlow: create the strategy before any other use of "
                "TensorFlow, before tensors, variables, models and datasets."
            )
    ports = worker_group.all_gather("TensorFlow's server", free_ports(1)[0])
    servers = tuple(map(join_address, cluster.hosts, ports))
    config = dataclasses.replace(cluster, workers=servers, evaluators=())
    jobs = json.loads(config.to_tf_config())["cluster"]
    runtime.start_server(jobs, cluster.task_type, cluster.task_index)
    _started[:] = [cluster]
    forks.close_port_in_forks(ports[cluster.rank])


def _needs_server(options: CommunicationOptions) -> bool:
    """Return whether `options.backend` makes this worker use TensorFlow's server."""
    if options.backend == "auto":
        has_gpus = bool(tf.config.get_visible_devices("GPU"))
        return has_gpus or sys.platform != "linux"
    return options.backend in ("nccl", "ring")
