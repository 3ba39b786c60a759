"""Hosts of a SageMaker training job: one worker on each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdp.communication.cluster.tf_config import describe, shorten

# Hosts of a job reach each other on all ports, and run nothing else.
PORT = 2222
# In every container of a training job, with or without Amazon's training toolkit.
RESOURCES = Path("/opt/ml/input/config/resourceconfig.json")


def read(environ: Mapping[str, str]) -> tuple[tuple[str, ...], int] | None:
    """Read the addresses of a job's hosts, and the rank of this one.

    The training toolkit sets `SM_HOSTS` and `SM_CURRENT_HOST`; without it the file
    `resourceconfig.json` of SageMaker's has the same.

    Args:
        environ: Mapping of environment variables.

    Returns:
        The addresses in the order of ranks and this host's rank; or `None` outside of
        SageMaker, and in a job of one host.

    Raises:
        ValueError: If the hosts and the name of this one do not fit together.

    Source: https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md
    and https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
    """
    where = ("SM_HOSTS", "SM_CURRENT_HOST")
    if "SM_HOSTS" in environ:
        hosts = _parse(environ["SM_HOSTS"], "SM_HOSTS")
        own: Any = environ.get("SM_CURRENT_HOST")
    elif RESOURCES.is_file():
        config = _parse(RESOURCES.read_text("utf-8", "replace"), str(RESOURCES))
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
    return tuple(f"{host}:{PORT}" for host in hosts), hosts.index(own)


def _parse(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{name} is not valid JSON ({error}), as SageMaker writes it; or set "
            f"TF_CONFIG. Received: {describe(text)}"
        ) from error


def _are_names(hosts: Any) -> bool:
    is_list = isinstance(hosts, list) and bool(hosts)
    if not is_list or not all(isinstance(host, str) and host for host in hosts):
        return False
    return len(set(hosts)) == len(hosts)
