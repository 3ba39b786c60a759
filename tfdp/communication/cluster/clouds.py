"""Clusters of cloud jobs: the hosts of SageMaker and the pools of Vertex AI."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdp.communication.cluster import tf_config
from tfdp.communication.cluster.tf_config import describe, shorten

# Port of each worker. A fixed port is free, since the hosts of a cloud job run nothing
# else, and none of their ports is blocked between them.
PORT = 2222
# File in which SageMaker lists the hosts of a training job. Jobs without Amazon's
# training toolkit have no variable `SM_HOSTS`, so the file is read for them.
RESOURCES = Path("/opt/ml/input/config/resourceconfig.json")
# Job name in `TF_CONFIG` for each pool of a Vertex AI job: the number of a pool
# determines the role of its tasks.
_JOBS = {
    "workerpool0": "chief",
    "workerpool1": "worker",
    "workerpool2": "ps",
    "workerpool3": "evaluator",
}


def read_sagemaker(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Read the hosts of a SageMaker training job: one worker on each.

    The training toolkit sets `SM_HOSTS` and `SM_CURRENT_HOST`; without it, SageMaker's
    file `resourceconfig.json` holds the same values.

    Args:
        environ: Mapping of environment variables.

    Returns:
        A dict of the arguments of `Cluster`; or `None` outside of SageMaker, and in a
        job of one host.

    Raises:
        ValueError: If the list of hosts is malformed, or this host is not in it.

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
    if not _are_distinct_names(hosts):
        raise ValueError(
            f"{where[0]} must be a JSON list that names each host once, as SageMaker "
            f"writes it; or set TF_CONFIG. Received: {describe(hosts)}"
        )
    if own not in hosts:
        raise ValueError(
            f"{where[1]} must be one of the hosts of {where[0]}, "
            f"{shorten(', '.join(hosts))}; or set TF_CONFIG. Received: {describe(own)}"
        )
    if len(hosts) == 1:
        return None
    hosts = sorted(hosts)  # ranks follow this order, which must be equal on all hosts
    workers = [f"{host}:{PORT}" for host in hosts]
    return {"workers": workers, "task_index": hosts.index(own)}


def read_vertex(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Read the cluster of a Vertex AI job from `CLUSTER_SPEC`.

    Vertex AI also sets `TF_CONFIG`, but a script that starts the training process may
    pass only `CLUSTER_SPEC` to it.

    Args:
        environ: Mapping of environment variables.

    Returns:
        A dict of the arguments of `Cluster`, or `None` outside of Vertex AI.

    Raises:
        ValueError: If the pools are not a chief, workers and an evaluator.

    Source: https://cloud.google.com/vertex-ai/docs/training/distributed-training
    """
    text = environ.get("CLUSTER_SPEC", "")
    if "workerpool" not in text:
        # Other programs than Vertex AI may set a variable `CLUSTER_SPEC`, too, but one
        # without pools.
        return None
    spec = _parse(text, "CLUSTER_SPEC", "Vertex AI")
    try:
        return tf_config.parse(json.dumps(_with_job_names(spec)))
    except ValueError as error:
        raise ValueError(f"CLUSTER_SPEC, read as TF_CONFIG: {error}") from error


def _with_job_names(spec: Any) -> Any:
    """Replace Vertex AI's names of pools by the job names of `TF_CONFIG`.

    Args:
        spec: Parsed JSON, the value of `CLUSTER_SPEC`.

    Returns:
        Parsed JSON in the format of `TF_CONFIG`; `spec` itself if it is not a dict.
    """
    if not isinstance(spec, dict):
        return spec
    cluster, task = spec.get("cluster"), spec.get("task")
    if isinstance(cluster, dict):
        # Vertex AI also lists pools that the job does not use, with an empty list of
        # tasks. They are left out, since even an empty pool of parameter servers would
        # be refused.
        cluster = {_JOBS.get(n, n): pool for n, pool in cluster.items() if pool}
    if isinstance(task, dict):
        name = task.get("type")
        task = {**task, "type": _JOBS.get(name, name) if type(name) is str else name}
    return {"cluster": cluster, "task": task}


def _parse(text: str, name: str, cloud: str) -> Any:
    """Parse JSON text from a cloud, and return its value, of any JSON type.

    Args:
        text: String, JSON.
        name: String, name of the variable or file.
        cloud: String, name of the cloud that has set it.

    Raises:
        ValueError: If it is not valid JSON; the message has the name and the cloud.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{name} is not valid JSON ({error}). Set it as {cloud} does, or set "
            f"TF_CONFIG. Received: {shorten(text)}"
        ) from error


def _are_distinct_names(hosts: Any) -> bool:
    """Return whether a value is a list of distinct host names, at least one."""
    if not isinstance(hosts, list) or not all(type(h) is str and h for h in hosts):
        return False
    return 0 < len(set(hosts)) == len(hosts)
