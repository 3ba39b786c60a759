"""What the how-to pages make of other systems' variables is a TF_CONFIG that is right.

The code is read out of the pages, so that page and test cannot differ.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.harness.commands import ROOT
from tfdp.communication.cluster import Cluster

HOWTO = ROOT / "docs" / "howto"
DEADLINE_SECONDS = 60


def file_of(page: str, name: str) -> str:
    """The text of a file that a page gives."""
    text = (HOWTO / page).read_text("utf-8")
    block = re.search(
        rf"^<!-- file: {re.escape(name)} -->\n```\w+\n(.*?)^```", text, re.M | re.S
    )
    assert block, f"{page} has no file {name}"
    return block[1]


def names_of(
    page: str, name: str, environ: dict[str, str], monkeypatch: Any
) -> dict[str, Any]:
    """Runs a module of a page with these variables, and no others of its kind."""
    for variable in list(os.environ):
        if re.match(r"TF_CONFIG|OMPI_|PMI_|HOSTS$|CUDA_VISIBLE", variable):
            monkeypatch.delenv(variable)
    # What the module sets goes with the test.
    monkeypatch.setattr(os, "environ", os.environ.copy() | environ)
    names: dict[str, Any] = {"__name__": name}
    exec(compile(file_of(page, name), name, "exec"), names)
    return names


def cluster_of(
    page: str, name: str, environ: dict[str, str], monkeypatch: Any
) -> Cluster | None:
    names_of(page, name, environ, monkeypatch)
    return Cluster.from_environment(os.environ)


MPI = ("mpi.md", "mpi_config.py")
OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
HYDRA = ("PMI_RANK", "PMI_SIZE")


@pytest.mark.parametrize("variables", [OPEN_MPI, HYDRA], ids=["open_mpi", "mpich"])
def test_ranks_of_mpi_on_one_machine_are_a_cluster(variables, monkeypatch):
    for rank in range(3):
        environ = dict(zip(variables, (str(rank), "3"), strict=True))
        cluster = cluster_of(*MPI, environ, monkeypatch)
        assert cluster is not None
        assert cluster.rank == rank
        assert cluster.workers == tuple(f"localhost:{22222 + i}" for i in range(3))
        assert os.environ["CUDA_VISIBLE_DEVICES"] == str(rank)


def test_ranks_of_mpi_on_several_hosts_have_ports_and_gpus_host_by_host(monkeypatch):
    environ = {"OMPI_COMM_WORLD_SIZE": "4", "HOSTS": "a,b,a,b"}
    gpus = []
    for rank in range(4):
        own = {**environ, "OMPI_COMM_WORLD_RANK": str(rank)}
        cluster = cluster_of(*MPI, own, monkeypatch)
        assert cluster is not None
        assert cluster.rank == rank
        assert cluster.workers == ("a:22222", "b:22222", "a:22223", "b:22223")
        gpus.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert gpus == ["0", "0", "1", "1"]


def test_a_rank_of_mpi_that_is_alone_on_its_host_keeps_all_gpus(monkeypatch):
    environ = {"PMI_RANK": "1", "PMI_SIZE": "2", "HOSTS": "a,b"}
    assert cluster_of(*MPI, environ, monkeypatch) is not None
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_outside_of_mpi_the_module_sets_nothing(monkeypatch):
    assert cluster_of(*MPI, {}, monkeypatch) is None
    assert "TF_CONFIG" not in os.environ


class LocalRay(types.ModuleType):
    """What the script asks of Ray, in this process and one call after the other."""

    def __init__(self):
        super().__init__("ray")
        self.killed: list[Any] = []
        self.options: dict[str, Any] = {}
        self.util = types.SimpleNamespace(get_node_ip_address=lambda: "10.0.0.7")
        error = type("RayActorError", (Exception,), {})
        self.exceptions = types.SimpleNamespace(RayActorError=error)

    def remote(self, actor: type) -> Any:
        def make(**options: Any) -> Any:
            self.options = options
            return types.SimpleNamespace(remote=lambda: LocalActor(actor()))

        return types.SimpleNamespace(options=make)

    def get(self, value: Any) -> Any:
        if isinstance(value, ActorDies):
            raise self.exceptions.RayActorError
        return value

    def wait(self, values: list[Any]) -> tuple[list[Any], list[Any]]:
        return values[:1], values[1:]

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


class ActorDies:
    """What a call returns whose actor dies in it."""


class Result:
    """What a call returns."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster


class LocalActor:
    def __init__(self, actor: Any):
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return types.SimpleNamespace(remote=getattr(self._actor, name))


def test_the_actors_of_ray_are_a_cluster_and_are_freed(monkeypatch):
    ray = LocalRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "keras", types.ModuleType("keras"))
    names = names_of("ray.md", "train_on_ray.py", {}, monkeypatch)

    def train(epochs: int) -> tuple[int, Cluster | None]:
        return epochs, Cluster.from_environment(os.environ)

    results = names["run_on_ray"](train, 3, num_workers=2, num_gpus=1)
    clusters = [cluster for _, cluster in results]
    assert [epochs for epochs, _ in results] == [3, 3]
    assert [cluster.rank for cluster in clusters] == [0, 1]
    assert clusters[0].workers == clusters[1].workers
    assert clusters[0].hosts == ("10.0.0.7", "10.0.0.7")
    assert ray.options == {"num_gpus": 1}
    assert len(ray.killed) == 2
    assert len({cluster.secret for cluster in clusters}) == 1
    assert clusters[0].elastic is None


def test_an_actor_of_ray_that_dies_is_replaced_in_the_same_job(monkeypatch):
    ray = LocalRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "keras", types.ModuleType("keras"))
    names = names_of("ray.md", "train_on_ray.py", {}, monkeypatch)
    seen: list[Cluster] = []

    def train(deaths: int) -> Any:
        cluster = Cluster.from_environment(os.environ)
        assert cluster is not None
        seen.append(cluster)
        return ActorDies() if len(seen) <= deaths else Result(cluster)

    run = names["run_on_ray"]
    results = run(train, 1, num_workers=2, replacements=1)
    assert [result.cluster.rank for result in results] == [0, 1]
    first, other, again = seen
    assert all(cluster.elastic == 1 for cluster in seen)
    assert first.secret == again.secret
    assert first.workers[0] != again.workers[0]
    assert other.workers[1] == again.workers[1]
    seen.clear()
    with pytest.raises(ray.exceptions.RayActorError):
        run(train, 2, num_workers=2, replacements=1)


SHOW = 'import os, sys; print(os.environ["TF_CONFIG"], os.getcwd(), sys.argv[1:])'


def launch(folder: Path, *command: str) -> subprocess.CompletedProcess:
    """Runs the launcher of the ssh page with an `ssh` that starts local processes."""
    (folder / "launch.sh").write_text(file_of("ssh.md", "launch.sh"), "utf-8")
    program = folder / "ssh"
    # As sshd does: the command is one text, for a shell.
    program.write_text('#!/bin/bash\nexec sh -c "${@: -1}"\n', "utf-8")
    program.chmod(0o755)
    return subprocess.run(
        ["bash", "launch.sh", "me@a,b", *command],
        cwd=folder,
        env={"PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )


def test_the_ssh_script_starts_a_worker_on_each_host(tmp_path):
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    done = launch(folder, sys.executable, "-c", SHOW, "two words", "it's")
    assert done.returncode == 0, done.stderr
    lines = " ".join(done.stdout.split())
    texts = re.findall(r"\{.*?\}\}", re.sub(r"\[worker \d\] ", "", lines))
    clusters = [Cluster.from_tf_config(text) for text in texts]
    assert sorted(cluster.rank for cluster in clusters if cluster) == [0, 1]
    assert {c.workers for c in clusters if c} == {("a:22222", "b:22223")}
    assert lines.count(f"{folder} ['two words', \"it's\"]") == 2


def test_the_ssh_script_ends_with_the_code_of_the_worker_that_fails(tmp_path):
    fails = (
        "import json, os, sys, time\n"
        'rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]\n'
        "time.sleep(0 if rank == 1 else 300)\n"
        "sys.exit(7)"
    )
    (tmp_path / "fails.py").write_text(fails, "utf-8")
    done = launch(tmp_path, sys.executable, "fails.py")
    assert done.returncode == 7
