"""The manifests of examples/cluster start clusters that tfdp accepts."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.harness.commands import ROOT
from tfdp.communication.cluster import Cluster
from tfdp.communication.coordination.preemption import PREEMPTED

FOLDER = ROOT / "examples" / "cluster"


def documents(name: str) -> dict[str, dict]:
    """The documents of a YAML file, by kind."""
    loaded = list(yaml.safe_load_all((FOLDER / name).read_text("utf-8")))
    return {document["kind"]: document for document in loaded}


def containers(pod_template: dict) -> list[dict]:
    return pod_template["spec"]["containers"]


def tf_configs_of_kubeflow(job: dict) -> list[str]:
    """What the training operator (v1.9) sets, in pkg/controller.v1/tensorflow."""
    name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
    cluster: dict[str, list[str]] = {}
    for kind, replica in job["spec"]["tfReplicaSpecs"].items():
        (container,) = [
            item
            for item in containers(replica["template"])
            if item["name"] == "tensorflow"
        ]
        (port,) = [
            item["containerPort"]
            for item in container["ports"]
            if item["name"] == "tfjob-port"
        ]
        cluster[kind.lower()] = [
            f"{name}-{kind.lower()}-{index}.{namespace}.svc:{port}"
            for index in range(replica["replicas"])
        ]
    return [
        json.dumps(
            {
                "cluster": cluster,
                "task": {"type": job_name, "index": index},
                "environment": "cloud",
            }
        )
        for job_name, addresses in cluster.items()
        for index in range(len(addresses))
    ]


def run_container(container: dict, index: int, folder: Path, **environment: str) -> str:
    """Runs the command of a pod with a `python` that prints `TF_CONFIG`."""
    program = folder / "python"
    program.write_text('#!/bin/sh\nprintf "%s" "$TF_CONFIG"\n', "utf-8")
    program.chmod(0o755)
    variables = {item["name"]: item.get("value", "8") for item in container["env"]}
    done = subprocess.run(
        container["command"] + container.get("args", []),
        env={
            **variables,
            **environment,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "JOB_COMPLETION_INDEX": str(index),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kubeflow_gives_every_pod_of_the_tfjob_a_rank_of_its_own():
    job = documents("tfjob.yaml")["TFJob"]
    clusters = [Cluster.from_tf_config(text) for text in tf_configs_of_kubeflow(job)]
    assert sorted(cluster.rank for cluster in clusters) == [0, 1, 2, 3]
    assert len({cluster.workers for cluster in clusters}) == 1
    assert [c.task_type for c in clusters if c.rank == 0] == ["chief"]


def test_pods_of_the_indexed_job_make_a_tf_config_with_their_own_rank(tmp_path):
    loaded = documents("indexed_job.yaml")
    job, service = loaded["Job"], loaded["Service"]
    (container,) = containers(job["spec"]["template"])
    count = job["spec"]["completions"]
    clusters = [
        Cluster.from_tf_config(run_container(container, index, tmp_path))
        for index in range(count)
    ]
    assert [cluster.rank for cluster in clusters] == list(range(count))
    # Kubernetes names pod i of an Indexed Job <job>-<i>, below the service.
    assert clusters[0].workers == tuple(
        f"{job['metadata']['name']}-{index}.{service['metadata']['name']}:2222"
        for index in range(count)
    )


def test_pods_of_the_trainjob_make_a_tf_config_with_their_own_rank(tmp_path):
    loaded = documents("trainjob.yaml")
    runtime, job = loaded["ClusterTrainingRuntime"], loaded["TrainJob"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    trainer, name = job["spec"]["trainer"], job["metadata"]["name"]
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    # The trainer sets image, args and environment of this container.
    (container,) = containers(node["template"]["spec"]["template"])
    assert container["name"] == node["name"] == "node"
    container = container | {"args": trainer["args"]}
    given = {item["name"]: item["value"] for item in trainer["env"]}
    clusters = [
        Cluster.from_tf_config(
            run_container(container, index, tmp_path, JOB=name, **given)
        )
        for index in range(trainer["numNodes"])
    ]
    assert [cluster.rank for cluster in clusters] == [0, 1, 2, 3]
    # JobSet names a pod <jobset>-<replicated job>-<job>-<pod>, below the jobset.
    assert clusters[0].workers == tuple(
        f"{name}-node-0-{index}.{name}:2222" for index in range(4)
    )
    network = runtime["spec"]["template"]["spec"]["network"]
    assert network["publishNotReadyAddresses"]


def test_the_indexed_job_starts_all_workers_at_once_below_its_headless_service():
    loaded = documents("indexed_job.yaml")
    job, service = loaded["Job"]["spec"], loaded["Service"]
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"]
    assert job["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    labels = job["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


@pytest.mark.parametrize(
    ("file", "labels"),
    [
        # The label that the training operator puts on every pod of a job.
        ("tfjob.yaml", {"training.kubeflow.org/job-name": "tfdp-demo"}),
        ("indexed_job.yaml", {"app": "tfdp-demo"}),
        # The label that JobSet puts on every pod.
        ("trainjob.yaml", {"jobset.sigs.k8s.io/jobset-name": "tfdp-demo"}),
    ],
)
def test_only_pods_of_the_job_reach_the_open_port_of_tensorflow(file, labels):
    loaded = documents(file)
    policy = loaded["NetworkPolicy"]
    own_pods = {"podSelector": {"matchLabels": labels}}
    assert policy["spec"] == {
        **own_pods,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [own_pods]}],
    }
    (job,) = [loaded[kind] for kind in ("TFJob", "Job", "TrainJob") if kind in loaded]
    assert job["metadata"]["name"] == "tfdp-demo"
    assert policy["metadata"]["namespace"] == job["metadata"]["namespace"]


@pytest.mark.parametrize("file", ["tfjob.yaml", "indexed_job.yaml"])
def test_one_failed_pod_ends_the_job_and_every_pod_has_limits(file):
    loaded = documents(file)
    if "TFJob" in loaded:
        spec = loaded["TFJob"]["spec"]
        assert spec["runPolicy"]["cleanPodPolicy"] == "Running"
        replicas = list(spec["tfReplicaSpecs"].values())
        policies = {replica["restartPolicy"] for replica in replicas}
        templates = [replica["template"] for replica in replicas]
    else:
        spec = loaded["Job"]["spec"]
        assert spec["backoffLimit"] == 0
        policies = {spec["template"]["spec"]["restartPolicy"]}
        templates = [spec["template"]]
    assert policies == {"Never"}
    for container in (item for template in templates for item in containers(template)):
        assert {"cpu", "memory"} <= container["resources"]["limits"].keys()


def test_the_tasks_of_the_slurm_script_are_one_cluster():
    script = FOLDER / "slurm.sbatch"
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", script.read_text(), re.M))
    nodes, tasks = int(asked["nodes"]), int(asked["ntasks-per-node"])
    step = {
        "SLURM_JOB_ID": "41",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": f"n[1-{nodes}]",
        "SLURM_STEP_NUM_TASKS": str(nodes * tasks),
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{nodes})",
    }
    clusters = [
        Cluster.from_environment(
            {
                **step,
                "SLURM_PROCID": str(rank),
                "SLURM_NODEID": str(rank // tasks),
                "SLURM_LOCALID": str(rank % tasks),
            }
        )
        for rank in range(nodes * tasks)
    ]
    assert [cluster.rank for cluster in clusters] == list(range(nodes * tasks))


def run_slurm_script(folder: Path, code: int, restarts: int | None = None):
    """Runs the batch script with commands of Slurm that show what they are given."""
    for name, end in (("srun", code), ("scontrol", 0)):
        program = folder / name
        show = f'#!/bin/sh\nprintf "%s\\n" {name} "$OMP_NUM_THREADS" "$@"\nexit {end}\n'
        program.write_text(show, "utf-8")
        program.chmod(0o755)
    count = {} if restarts is None else {"SLURM_RESTART_COUNT": str(restarts)}
    return subprocess.run(
        ["bash", str(FOLDER / "slurm.sbatch"), "train.py", "--name", "two words"],
        env={
            "PATH": f"{folder}:{os.environ['PATH']}",
            "SLURM_CPUS_PER_TASK": "8",
            "SLURM_JOB_ID": "41",
            **count,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_slurm_script_hands_the_users_arguments_to_srun(tmp_path):
    done = run_slurm_script(tmp_path, code=0)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["srun", "8"]
    assert "--kill-on-bad-exit=1" in lines
    assert lines[-4:] == ["python", "train.py", "--name", "two words"]


@pytest.mark.parametrize("restarts", [None, 4])
def test_slurm_starts_a_job_again_whose_workers_have_failed_or_saved(
    restarts, tmp_path
):
    done = run_slurm_script(tmp_path, PREEMPTED, restarts)
    assert done.returncode == PREEMPTED
    assert done.stdout.splitlines()[-4:] == ["scontrol", "8", "requeue", "41"]


def test_slurm_starts_a_job_again_five_times_only(tmp_path):
    done = run_slurm_script(tmp_path, code=1, restarts=5)
    assert done.returncode == 1
    assert "scontrol" not in done.stdout


def test_the_jobset_of_the_docs_starts_all_again_and_does_not_count_a_preemption():
    page = (ROOT / "docs" / "howto" / "kubernetes.md").read_text("utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S)
    parts = map(yaml.safe_load, blocks)
    (spec,) = [part["spec"] for part in parts if part.get("kind") == "JobSet"]
    (rule,) = spec["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    (workers,) = spec["replicatedJobs"]
    job = workers["template"]["spec"]
    assert job["backoffLimit"] == 0
    codes = [rule.get("onExitCodes") for rule in job["podFailurePolicy"]["rules"]]
    assert codes[0] == {"operator": "In", "values": [PREEMPTED]}
