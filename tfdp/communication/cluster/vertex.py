"""Worker pools of a Vertex AI job, as `CLUSTER_SPEC` names them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tfdp.communication.cluster import tf_config

# What the pools are for, by their place in the job.
_JOBS = {
    "workerpool0": "chief",
    "workerpool1": "worker",
    "workerpool2": "ps",
    "workerpool3": "evaluator",
}


def read(environ: Mapping[str, str]) -> dict[str, Any] | None:
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
    try:
        spec = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"CLUSTER_SPEC is not valid JSON ({error}), as Vertex AI writes it; or set "
            f"TF_CONFIG. Received: {tf_config.shorten(text)}"
        ) from error
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
