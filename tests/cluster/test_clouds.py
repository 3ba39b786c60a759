"""What SageMaker and Vertex AI put into a container is a cluster.

The environments are those of the pages that they name; nothing is set by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tfdp.communication.cluster import Cluster, clouds

ENVIRONMENTS = Path(__file__).parent / "environments"
HOSTS = ["algo-2", "algo-10", "algo-1"]


@pytest.fixture
def resources(tmp_path, monkeypatch) -> Path:
    """Where SageMaker's file would be."""
    path = tmp_path / "resourceconfig.json"
    monkeypatch.setattr(clouds, "RESOURCES", path)
    return path


@pytest.mark.parametrize(
    "path", sorted(ENVIRONMENTS.glob("*.json")), ids=lambda path: path.stem
)
def test_a_recorded_environment_is_a_cluster(path: Path, resources: Path):
    recorded = json.loads(path.read_text("utf-8"))
    if "resources" in recorded:
        resources.write_text(json.dumps(recorded["resources"]), "utf-8")
    cluster = Cluster.from_environment(recorded["environ"])
    assert cluster is not None
    assert list(cluster.workers) == recorded["workers"]
    assert cluster.rank == recorded["rank"]
    assert cluster.is_chief == (cluster.rank == 0)


def test_the_pools_of_vertex_are_what_tf_config_says():
    path = ENVIRONMENTS / "vertex_worker.json"
    environ = json.loads(path.read_text("utf-8"))["environ"]
    by_tf_config = Cluster.from_environment(environ)
    del environ["TF_CONFIG"]
    assert Cluster.from_environment(environ) == by_tf_config
    assert by_tf_config is not None
    assert by_tf_config.evaluators == ("cmle-training-workerpool3-ab-0:2222",)


def of_sagemaker(hosts: Any, own: str | None = "algo-1") -> dict[str, str]:
    text = hosts if isinstance(hosts, str) else json.dumps(hosts)
    return {"SM_HOSTS": text} | ({} if own is None else {"SM_CURRENT_HOST": own})


def test_hosts_have_ranks_alike_on_all_of_them():
    for rank, own in enumerate(sorted(HOSTS)):
        cluster = Cluster.from_environment(of_sagemaker(HOSTS, own))
        assert cluster is not None
        assert cluster.hosts == tuple(sorted(HOSTS))
        assert cluster.rank == rank


def of_vertex(cluster: Any, task: Any) -> dict[str, str]:
    return {"CLUSTER_SPEC": json.dumps({"cluster": cluster, "task": task})}


@pytest.mark.parametrize(
    "environ",
    [
        of_sagemaker(["algo-1"]),
        {"CLUSTER_SPEC": '{"mine": 1}'},
        {"CLUSTER_SPEC": ""},
        of_vertex({}, {"type": "workerpool0", "index": 0}),
    ],
)
def test_one_host_and_variables_of_others_are_a_single_machine(environ, resources):
    assert Cluster.from_environment(environ) is None


def test_tf_config_comes_before_what_a_cloud_says():
    config = {
        "cluster": {"worker": ["a:1", "b:1"]},
        "task": {"type": "worker", "index": 1},
    }
    environ = of_sagemaker(HOSTS) | {"TF_CONFIG": json.dumps(config)}
    cluster = Cluster.from_environment(environ)
    assert cluster is not None
    assert cluster.workers == ("a:1", "b:1")


POOLS = {"workerpool0": ["a:1"], "workerpool1": ["b:1"]}
WRONG = [
    (of_sagemaker("["), "SM_HOSTS is not valid JSON"),
    (of_sagemaker("{}"), "SM_HOSTS must be a JSON list"),
    (of_sagemaker([]), "SM_HOSTS must be a JSON list"),
    (of_sagemaker(["algo-1", 2]), r"SM_HOSTS must .* Received: \['algo-1', 2\]"),
    (of_sagemaker(["algo-1"] * 2), "names each host once"),
    (of_sagemaker(HOSTS, None), "SM_CURRENT_HOST must be one of .* Received: None"),
    (of_sagemaker(HOSTS, "algo-4"), "algo-2, algo-10, algo-1; .* Received: 'algo-4'"),
    ({"CLUSTER_SPEC": '{"workerpool0'}, "CLUSTER_SPEC is not valid JSON"),
    ({"CLUSTER_SPEC": '["workerpool0"]'}, "CLUSTER_SPEC, read as TF_CONFIG: "),
    (of_vertex({"workerpool0": 1}, {}), "CLUSTER_SPEC, .* 'chief' .* must be a list"),
    (of_vertex(POOLS, None), "CLUSTER_SPEC, .* which task this is"),
    (of_vertex(POOLS, {"type": "workerpool7", "index": 0}), "'workerpool7'"),
    (of_vertex(POOLS, {"type": [], "index": 0}), r"Received: \[\]"),
    (of_vertex({**POOLS, "workerpool2": ["c:1"]}, {}), "Parameter servers are not"),
    (
        of_vertex({**POOLS, "workerpool3": ["c:1", "d:1"]}, {"type": "workerpool0"}),
        "CLUSTER_SPEC, .* 'type' and 'index'",
    ),
]


@pytest.mark.parametrize(("environ", "message"), WRONG)
def test_a_wrong_environment_gets_one_sentence(environ, message, resources):
    with pytest.raises(ValueError, match=message) as caught:
        Cluster.from_environment(environ)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "resourceconfig.json is not valid JSON"),
        ("[]", "'hosts' in .*resourceconfig.json must be a JSON list"),
        ('{"hosts": ["a", "b"], "current_host": "c"}', "must be one of the hosts"),
    ],
)
def test_a_wrong_file_gets_one_sentence(text, message, resources):
    resources.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=message):
        Cluster.from_environment({})
