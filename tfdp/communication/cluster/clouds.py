"""Clouds that say which hosts a job has: SageMaker, and the pools of Vertex AI."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdp.communication.cluster import tf_config
from tfdp.communication.cluster.tf_config import describe, shorten

# Hosts of a job reach each other on all ports, and run nothing else.
PORT = 2222
# In every container of a training job, with or without Amazon's training toolkit.
RESOURCES = Path("/opt/ml/input/config/resourceconfig.json")
# What the pools of Vertex AI are for, by their place in the job.
_JOBS = {
    "workerpool0": "chief",
    "workerpool1": "worker",
    "workerpool2": "ps",
    "workerpool3": "evaluator",
}


def read_sagemaker(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Read the hosts of a SageMaker training job: one worker on each.

    The training toolkit sets `SM_HOSTS` and `SM_CURRENT_HOST`; without it the file
    `resourceconfig.json` of SageMaker's has the same.

    Args:
        environ: Mapping of environment variables.

    Returns:
        A dict of the arguments of `Cluster`; or `None` outside of SageMaker, and in a
        job of one host.

    Raises:
        ValueError: If the hosts and the name of this one do not fit together.

    Source: https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md
    and https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
    """
    where = ("SM_HOSTS", "SM_CURRENT_HOST")
    if "SM_HOSTS" in environ:
        hosts = _parse(environ["SM_HOSTS"], "SM_HOSTS", "SageMaker")
        own: Any = environ.get("SM_CURRENT_HOST")
    elif RESOURCES.is_file():
        text = RESOURCES.read_text("utf-8", "replace")
        config = _parse(text, str(RESOURCES), "SageMaker")
        config = config if isinstance(config, dict) else {}
        hosts, own = config.get("hosts"), config.get("current_host")
        where = (f"'hosts' in {RESOURCES}", f"'current_host' in {RESOURCES}")
    else:
        return None
    if not _are_names(hosts):
        raise ValueError(
            f"{where[0]} must be a JSON list of the names of all hosts, each one once, "
            f"as SageMaker writes it; or set TF_CONFIG. Received: {describe(hosts)}"
        )
    if own not in hosts:
        raise ValueError(
            f"{where[1]} must be one of the hosts of {where[0]}, "
            f"{shorten(', '.join(hosts))}; or set TF_CONFIG. Received: {describe(own)}"
        )
    if len(hosts) == 1:
        return None
    hosts = sorted(hosts)  # alike on all of them
    workers = [f"{host}:{PORT}" for host in hosts]
    return {"workers": workers, "task_index": hosts.index(own)}


def read_vertex(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Read the cluster of a job whose `TF_CONFIG` is not there.

    Vertex AI sets both. A script that starts others may pass on only one.

    Args:
        environ: Mapping of environment variables.

    Returns:
        A dict of the arguments of `Cluster`, or `None` outside of Vertex AI.

    Raises:
        ValueError: If the pools are not those of a job of `tfdp`.

    Source: https://cloud.google.com/vertex-ai/docs/training/distributed-training
    """
    text = environ.get("CLUSTER_SPEC", "")
    if "workerpool" not in text:
        return None  # other programs may have a variable of that name
    spec = _parse(text, "CLUSTER_SPEC", "Vertex AI")
    try:
        return tf_config.parse(json.dumps(_renamed(spec)))
    except ValueError as error:
        raise ValueError(f"CLUSTER_SPEC, read as TF_CONFIG: {error}") from error


def _renamed(spec: Any) -> Any:
    """Give the jobs the names that they have in `TF_CONFIG`."""
    if not isinstance(spec, dict):
        return spec
    cluster, task = spec.get("cluster"), spec.get("task")
    if isinstance(cluster, dict):
        # A pool that the job leaves out has no tasks.
        cluster = {_JOBS.get(n, n): pool for n, pool in cluster.items() if pool}
    if isinstance(task, dict):
        name = task.get("type")
        task = {**task, "type": _JOBS.get(name, name) if type(name) is str else name}
    return {"cluster": cluster, "task": task}


def _parse(text: str, name: str, cloud: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{name} is not valid JSON ({error}), as {cloud} writes it; or set "
            f"TF_CONFIG. Received: {shorten(text)}"
        ) from error


def _are_names(hosts: Any) -> bool:
    is_list = isinstance(hosts, list) and bool(hosts)
    if not is_list or not all(isinstance(host, str) and host for host in hosts):
        return False
    return len(set(hosts)) == len(hosts)
