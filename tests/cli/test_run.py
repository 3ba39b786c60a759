"""`tfdp run`: the cluster, the devices and the cores that workers get."""

from __future__ import annotations

import json
import os
import resource

import pytest

from tests.cli.launcher import lines_of
from tests.harness.tiers import full
from tfdp.communication.cluster import Cluster
from tfdp.communication.cluster import ports as cluster_ports
from tfdp.communication.cluster.gpus import visible_gpus
from tfdp.launch.cli import launch

pytestmark = pytest.mark.processes


def test_each_worker_gets_the_same_cluster_and_its_own_task(launcher):
    launcher.script("print(json.dumps(CONFIG))")
    result = launcher.run("-n", "3", "script.py")
    assert result.returncode == 0, result.stdout
    configs = [json.loads(lines_of(result.stdout, rank)[0]) for rank in range(3)]
    assert [config["task"] for config in configs] == [
        {"type": "worker", "index": rank} for rank in range(3)
    ]
    addresses = configs[0]["cluster"]["worker"]
    assert all(config["cluster"] == {"worker": addresses} for config in configs)
    assert len(set(addresses)) == 3
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    assert all(
        Cluster.from_tf_config(json.dumps(config)).devices_per_worker is None
        for config in configs
    )


def test_as_many_workers_as_gpus_or_else_as_cpu_cores(launcher):
    launcher.environment["CUDA_VISIBLE_DEVICES"] = "0,1,2"
    launcher.script("print(len(CONFIG['cluster']['worker']), sys.argv[1:])")
    # What follows the script is its own, an option of another launcher too.
    result = launcher.run("-n", "auto", "script.py", "-np")
    assert lines_of(result.stdout, 0) == ["3 ['-np']"]
    launcher.environment["CUDA_VISIBLE_DEVICES"] = ""
    result = launcher.run("-n", "auto", "script.py")
    assert lines_of(result.stdout, 0) == [f"{launch.num_cores()} []"]


@pytest.mark.parametrize("option", ["-D", full("--devices-per-worker")])
def test_devices_per_worker_travel_in_tf_config(launcher, option):
    launcher.script("print(CONFIG['tfdp']['devices_per_worker'])")
    result = launcher.run("-n", "2", option, "3", "script.py")
    assert lines_of(result.stdout, 0) == lines_of(result.stdout, 1) == ["3"]


def test_rebalance_travels_in_tf_config_and_says_where_it_has_no_effect(launcher):
    launcher.script("print(CONFIG['tfdp'].get('rebalance'))")
    for arguments, expected in ((["--rebalance"], "True"), ([], "None")):
        result = launcher.run("-n", "2", *arguments, "script.py")
        assert lines_of(result.stdout, 0) == lines_of(result.stdout, 1) == [expected]
        assert "no effect" not in result.stdout
    result = launcher.run("-n", "1", "--rebalance", "script.py")
    assert result.returncode == 0
    assert "--rebalance has no effect with one worker" in result.stdout


@pytest.mark.full
def test_cores_are_divided_among_workers(launcher):
    launcher.script(
        "print(os.environ['TF_NUM_INTRAOP_THREADS'], os.environ['OMP_NUM_THREADS'])"
    )
    result = launcher.run("-n", "2", "script.py")
    share = max(1, launch.num_cores() // 2)
    assert lines_of(result.stdout, 1) == [f"{share} {share}"]


def test_the_users_own_number_of_threads_and_choice_of_kernels_stand(launcher):
    launcher.environment["OMP_NUM_THREADS"] = "7"
    launcher.script(
        "print(os.environ['OMP_NUM_THREADS'], os.environ['TF_ENABLE_ONEDNN_OPTS'])"
    )
    launcher.environment["TF_ENABLE_ONEDNN_OPTS"] = "0"
    assert lines_of(launcher.run("-n", "2", "script.py").stdout, 0) == ["7 0"]


def gpus_of(slot: int, environ: dict, count: int = 2, num_workers: int = 2):
    workers = tuple(f"127.0.0.1:{port}" for port in range(1, num_workers + 1))
    environment = launch.worker_environment(
        Cluster(workers), slot, count, "job", environ=environ
    )
    return environment.get("CUDA_VISIBLE_DEVICES")


def test_gpus_are_shared_out_among_workers():
    chosen = {"CUDA_VISIBLE_DEVICES": "4,5, 6,7"}
    assert [gpus_of(rank, chosen) for rank in range(2)] == ["4,5", "6,7"]
    assert gpus_of(1, chosen, count=3) == "5"
    assert gpus_of(0, chosen, count=1) == "4,5, 6,7"
    assert gpus_of(0, {"CUDA_VISIBLE_DEVICES": ""}) == ""
    assert gpus_of(1, {"CUDA_VISIBLE_DEVICES": "0"}) == "0"


@pytest.mark.parametrize(
    ("chosen", "gpus"),
    [
        ("-1", []),
        ("0,-1,1", ["0"]),
        ("NoDevFiles", []),
        ("GPU-8932f937,MIG-2", ["GPU-8932f937", "MIG-2"]),
    ],
)
def test_gpus_are_counted_up_to_the_first_name_that_is_none(chosen, gpus):
    environ = {"CUDA_VISIBLE_DEVICES": chosen}
    assert visible_gpus(environ) == gpus
    if not gpus:
        assert gpus_of(0, environ) == chosen


def test_who_is_left_out_takes_its_gpus_along():
    chosen = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    # Of four slots that with GPU 1 is left out, or all but that with GPU 3.
    left = [gpus_of(slot, chosen, 4, num_workers=3) for slot in (0, 2, 3)]
    assert left == ["0", "2", "3"]
    assert gpus_of(3, chosen, 4, num_workers=1) == "3"


def test_a_tf_config_of_somebody_else_is_replaced_with_a_warning(launcher):
    launcher.environment["TF_CONFIG"] = '{"cluster": {"worker": ["other:1"]}}'
    launcher.script("print(len(CONFIG['cluster']['worker']))")
    result = launcher.run("-n", "2", "script.py")
    assert lines_of(result.stdout, 0) == ["2"]
    assert "TF_CONFIG is set, and is replaced" in result.stdout


def test_ports_are_distinct_free_and_outside_the_kernels_own_range():
    ports = cluster_ports.free_ports(200)
    assert len(set(ports)) == 200
    assert min(ports) >= 10000
    assert max(ports) < cluster_ports._first_ephemeral_port()


@pytest.mark.parametrize(
    ("files", "processes", "most", "reason"),
    [
        (10**6, -1, 128, "64 for each of its 2 CPU cores"),
        (256, -1, 16, r"of open files, 256 \(ulimit -n\): each of 17 needs 261"),
        (-1, 1600, 10, r"limit of threads, 1600 \(ulimit -u\): each needs 160"),
        (-1, -1, 128, "CPU cores"),
    ],
)
def test_more_workers_than_the_machine_can_hold_are_refused(
    monkeypatch, files, processes, most, reason
):
    limits = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_NPROC: processes}
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limits[what], -1))
    monkeypatch.setattr(launch, "num_cores", lambda: 2)
    monkeypatch.setattr(launch, "visible_gpus", list)
    monkeypatch.setattr(launch, "needed_threads", lambda connects: 160)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    launch.check_num_workers(most)
    with pytest.raises(ValueError, match=f"holds {most}, .*{reason}"):
        launch.check_num_workers(most + 1)


def test_too_many_workers_for_the_ports_are_refused(monkeypatch):
    monkeypatch.setattr(cluster_ports, "_first_ephemeral_port", lambda: 10010)
    with pytest.raises(ValueError, match="-n 20"):
        cluster_ports.free_ports(20)
