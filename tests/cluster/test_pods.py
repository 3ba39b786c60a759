"""Pods of the manifests train: their commands, on two hosts with the pods' names."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.test_manifests import containers, documents
from tests.harness.commands import HEEDING, ROOT
from tests.strategy.trained import SCRIPT, check_answers
from tools.bench import hosts_bed
from tools.bench.hosts_bed import TwoHosts

# Nothing else makes hosts while other tests look for what is left of them.
PROCESS_GROUP = "hosts"
pytestmark = [
    pytest.mark.processes,
    pytest.mark.full,
    pytest.mark.skipif(bool(hosts_bed.missing()), reason=hosts_bed.missing()),
]
DEADLINE_SECONDS = 180.0
NAME = "tfdp-demo"
# `ip netns exec` puts what is in a folder of the namespace's name in the place of /etc.
OF_NAMESPACES = Path("/etc/netns")


def pod_of_indexed_job() -> tuple[dict, str]:
    """The container, and the name of a pod without its index."""
    (container,) = containers(documents("indexed_job.yaml")["Job"]["spec"]["template"])
    return container, f"{NAME}-{{}}.{NAME}"


def pod_of_trainjob() -> tuple[dict, str]:
    loaded = documents("trainjob.yaml")
    spec = loaded["ClusterTrainingRuntime"]["spec"]["template"]["spec"]
    (node,) = spec["replicatedJobs"]
    (container,) = containers(node["template"]["spec"]["template"])
    args = loaded["TrainJob"]["spec"]["trainer"]["args"]
    return container | {"args": args}, f"{NAME}-node-0-{{}}.{NAME}"


@contextlib.contextmanager
def names_resolve(bed: TwoHosts, name_of_pod: str) -> Iterator[None]:
    """The headless Service: each host knows the pods by their names."""
    lines = ["127.0.0.1 localhost"]
    for index, address in enumerate(bed.addresses):
        lines.append(f"{address} {name_of_pod.format(index)}")
    folders = [OF_NAMESPACES / name for name in bed.names]
    try:
        for folder in folders:
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(
                "\n".join(["127.0.0.1 localhost", *lines, ""])
            )
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("pod", [pod_of_indexed_job, pod_of_trainjob])
def test_pods_on_two_hosts_train_as_one_device_does(pod, tmp_path):
    container, name_of_pod = pod()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {SCRIPT} auto_strategy\n')
    python.chmod(0o755)
    given = {item["name"]: item.get("value", "1") for item in container["env"]}
    environment = (
        os.environ
        | given
        | {
            "NUM_WORKERS": "2",
            "JOB": NAME,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "-1",
        }
    )
    command = [*container["command"], *container.get("args", [])]
    with TwoHosts("1gbit") as bed, names_resolve(bed, name_of_pod):
        started = [
            subprocess.Popen(
                [*bed.enter(index), *HEEDING, *command],
                env=environment | {"JOB_COMPLETION_INDEX": str(index)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for index in range(2)
        ]
        outputs = [p.communicate(timeout=DEADLINE_SECONDS)[0] for p in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    lines = [line for output in outputs for line in output.splitlines()]
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(found) == 2
    check_answers(found, num_replicas=2, backend="direct")
