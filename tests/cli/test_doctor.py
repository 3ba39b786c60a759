"""`tfdp doctor`: one run with TensorFlow, the rest without."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import click
import pytest
from rich.console import Console

from tests.harness import forks
from tests.harness.tf_config import cluster_configs
from tfdp.communication.cluster import Cluster, topology_of
from tfdp.launch.cli import doctor
from tfdp.launch.cli.lines import without_escapes
from tfdp.launch.cli.topology_tree import (
    describe_unevenness,
    draw_topology,
    port_states,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 120


def run_doctor(**environ):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    for name in {"TF_CONFIG", "TF_CPP_MIN_LOG_LEVEL"} - set(environ):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, "-m", "tfdp", "doctor"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )


def drawing_of(cluster, devices, states, **overrides):
    topology = topology_of(
        cluster.hosts, len(devices), resolve=lambda host: [], **overrides
    )
    console = Console(file=io.StringIO(), width=200)
    console.print(draw_topology(cluster, devices, states, topology))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.fixture
def taken_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.processes
@pytest.mark.slow(seconds=15)
def test_doctor_shows_versions_devices_nccl_cluster_ports_and_a_warning(
    taken_port, free_port
):
    config = {
        "cluster": {
            "worker": [f"127.0.0.1:{taken_port}", f"127.0.0.1:{free_port}"],
            "evaluator": ["elsewhere:1"],
        },
        "task": {"type": "worker", "index": 1},
        "tfdp": {"devices_per_worker": 2},
    }
    # No GPU, whatever the machine has: what is printed is then known.
    result = run_doctor(TF_CONFIG=json.dumps(config), CUDA_VISIBLE_DEVICES="")
    # TensorFlow's own lines are not shown, those of before it reads its level neither.
    assert (result.returncode, result.stderr) == (0, "")
    output = result.stdout
    for name in ("python", "tfdp", "tensorflow", "keras", "numpy"):
        assert f"\n  {name} " in output
    assert f"{sys.version_info.major}.{sys.version_info.minor}." in output
    for line in (
        "  physical    CPU:0",
        "  logical     CPU:0, CPU:1",
        "the gradient of a dense layer takes ",
        "  from TF_CONFIG; this process is worker 1 of 2",
        "1 node, 2 workers, 4 replicas",
        "node 0  127.0.0.1",
        f"worker 0 (chief)  127.0.0.1:{taken_port}  answers",
        f"worker 1  127.0.0.1:{free_port}  this task, port free",
        "replica 3  CPU:1  local rank 3",
        "evaluator  elsewhere:1  takes no part in training",
        f"this worker listens on 127.0.0.1, port {free_port}, and on its Unix socket",
        "worker 0 serves the job's store to processes of this user; if it is lost, the "
        "worker with the copy does",
        "TensorFlow's server listens on a free port of all interfaces and runs any",
    ):
        assert line in output, output
    assert "uneven" not in output
    nccl = output.split("\nNCCL\n")[1].splitlines()[0]
    assert nccl.startswith("  not available: ")


def devices_of_doctor_and_strategy() -> tuple[list[str], int]:
    import tensorflow as tf

    import tfdp

    found = doctor.local_devices(tf, Cluster.from_environment())
    return found, tfdp.auto_strategy().num_replicas_in_sync


def config_of(num_workers, **own):
    workers = [f"127.0.0.1:{port}" for port in range(1, num_workers + 1)]
    task = {"type": "worker", "index": 0}
    return json.dumps({"cluster": {"worker": workers}, "task": task, "tfdp": own})


def test_doctor_counts_replicas_as_auto_strategy_does():
    configs = [None, config_of(1), config_of(1, devices_per_worker=3)]
    starts = [forks.Start(devices_of_doctor_and_strategy, config) for config in configs]
    answers = forks.run(starts, DEADLINE_SECONDS)
    for answer in answers:
        assert len(answer.value[0]) == answer.value[1], answer
    assert answers[2].value[0] == ["CPU:0", "CPU:1", "CPU:2"]


def doctor_devices() -> list[str]:
    import tensorflow as tf

    return doctor.local_devices(tf, Cluster.from_environment())


def test_doctor_counts_the_devices_of_one_of_several_workers():
    configs = [config_of(2), config_of(2, devices_per_worker=2)]
    starts = [forks.Start(doctor_devices, config) for config in configs]
    found = [answer.value for answer in forks.run(starts, DEADLINE_SECONDS)]
    assert found == [["CPU:0"], ["CPU:0", "CPU:1"]]


def test_errors_pass_the_filter_of_tensorflows_lines_even_before_a_crash():
    code = """
import os, signal, sys
from tfdp.launch.cli.noise import quiet_stderr
with quiet_stderr():
    os.write(2, b"I0000 00:00:1.5  7 cudart_stub.cc:31] Could not find cuda\\n")
    os.write(2, b"E0000 00:00:1.5  7 driver.cc:31] a real error\\n")
print("no longer filtered", file=sys.stderr)
with quiet_stderr():
    os.write(2, b"F0000 00:00:1.5  7 driver.cc:31] the last words")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TF_CPP_MIN_LOG_LEVEL", None)
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert [line.split("] ")[-1] for line in result.stderr.splitlines()] == [
        "a real error",
        "no longer filtered",
        "the last words",
    ]


@pytest.mark.parametrize("text", ["{x", '{"cluster": {"worker": ["a:1"]}}'])
def test_a_bad_tf_config_gets_one_sentence_and_code_2_at_once(text):
    start = time.monotonic()
    result = run_doctor(TF_CONFIG=text)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("tfdp: error: ")
    assert result.stderr.count("\n") == 1
    assert "Received: " in result.stderr
    assert time.monotonic() - start < 10


def test_doctor_without_tensorflow_says_so_and_exits_with_1(tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise ImportError('libfoo is missing')")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    result = run_doctor(PYTHONPATH=path)
    assert result.returncode == 1
    assert "ImportError: libfoo is missing" in result.stdout
    assert "this is a single machine" in result.stdout
    assert "Traceback" not in result.stderr


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("output", "longest"), [(Terminal, 50), (io.StringIO, 400)])
def test_a_terminal_gets_lines_that_fit_and_a_file_whole_ones(
    monkeypatch, output, longest
):
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TF_CONFIG", cluster_configs(2)[0])
    monkeypatch.setattr(doctor, "quiet_stderr", contextlib.nullcontext)
    monkeypatch.setattr(doctor, "_import_tensorflow", lambda console: None)
    monkeypatch.setattr(sys, "stdout", output())
    with pytest.raises(click.exceptions.Exit):
        doctor.doctor.callback()
    lines = without_escapes(sys.stdout.getvalue()).splitlines()
    assert longest / 2 < max(map(len, lines)) <= longest
    words = "\n".join(lines).split()
    assert {"interfaces", "Kubernetes,", "NetworkPolicy"} <= set(words)


def test_workers_on_one_host_are_drawn_under_one_node():
    cluster = Cluster(("a:1", "b:1", "a:2"), has_chief=True)
    states = ["s0", "s1", "s2"]
    assert drawing_of(cluster, ["GPU:0", "GPU:1"], states) == [
        "2 nodes, 3 workers, 6 replicas, numbered by global rank",
        "├── node 0  a",
        "│   ├── worker 0 (chief)  a:1  s0",
        "│   │   ├── replica 0  GPU:0  local rank 0",
        "│   │   └── replica 1  GPU:1  local rank 1",
        "│   └── worker 2  a:2  s2",
        "│       ├── replica 4  GPU:0  local rank 2",
        "│       └── replica 5  GPU:1  local rank 3",
        "└── node 1  b",
        "    └── worker 1  b:1  s1",
        "        ├── replica 2  GPU:0  local rank 0",
        "        └── replica 3  GPU:1  local rank 1",
    ]


def test_a_node_is_drawn_with_all_its_hosts_and_a_split_worker_on_each_node():
    cluster = Cluster(("a:1", "b:1"))
    devices, states = ["CPU:0", "CPU:1"], ["s0", "s1"]
    merged = drawing_of(cluster, devices, states, nodes=["x", "x"])
    assert merged[1] == "└── node 0  a, b"
    assert drawing_of(cluster, devices, states, node_size=1)[-6:] == [
        "├── node 2  b",
        "│   └── worker 1  b:1  s1",
        "│       └── replica 2  CPU:0  local rank 0",
        "└── node 3  b",
        "    └── worker 1  b:1  s1",
        "        └── replica 3  CPU:1  local rank 0",
    ]


def test_uneven_nodes_are_said_to_fall_back_to_flat_algorithms():
    assert describe_unevenness(topology_of(["a"] * 2, 2)) is None
    uneven = topology_of(["a", "b", "b"], 2, nodes=["a", "b", "b"])
    assert describe_unevenness(uneven) == (
        "The nodes are uneven, with 2, 4 replicas: hierarchical algorithms fall back "
        "to flat ones."
    )


def test_doctor_says_when_nodes_are_uneven(monkeypatch):
    monkeypatch.setattr(doctor, "port_states", lambda cluster: ["s0", "s1", "s2"])
    console = Console(file=io.StringIO(), width=200)
    cluster = Cluster(("10.0.0.1:1", "10.0.0.2:1", "10.0.0.2:2"))
    doctor._show_cluster(console, cluster, ["CPU:0"])
    assert "  The nodes are uneven, with 1, 2 replicas: " in console.file.getvalue()


@pytest.mark.parametrize(
    ("host", "own", "where"),
    [
        ("two", ["10.0.0.1", "fe80::1"], "10.0.0.1 and fe80::1, port 2222"),
        ("elsewhere", [""], "all interfaces, port 2222"),
    ],
)
def test_doctor_says_on_which_addresses_a_worker_listens(monkeypatch, host, own, where):
    found = {host: own}
    monkeypatch.setattr(doctor, "addresses_to_listen_on", found.__getitem__)
    cluster = Cluster(("other:1", f"{host}:2222"), task_index=1, secret="s" * 16)
    line, store, *_ = doctor._describe_network(cluster)
    assert line == f"this worker listens on {where}"
    assert "processes with the job's secret" in store
    monkeypatch.setattr(doctor, "current_job", object)
    assert next(doctor._describe_network(cluster)).endswith(", a free port")


def test_doctor_names_no_port_of_an_evaluator():
    lines = list(doctor._describe_network(Cluster(("a:1", "b:1"), "evaluator")))
    assert lines[0].startswith("worker 0 serves the job's store")


def test_an_address_in_brackets_is_not_taken_for_markup():
    cluster = Cluster(("[fe80::1]:1",))
    assert (
        "worker 0 (chief)  [fe80::1]:1  s" in drawing_of(cluster, ["CPU:0"], ["s"])[2]
    )


def test_port_states_tell_own_from_others(taken_port, free_port):
    silent = Cluster((f"127.0.0.1:{taken_port}", f"127.0.0.1:{free_port}"))
    own, other = port_states(silent, timeout_seconds=0.2)
    assert own.startswith("this task, port taken")
    assert other == "does not answer"
    evaluator = Cluster((f"127.0.0.1:{taken_port}",), "evaluator")
    assert port_states(evaluator, timeout_seconds=5) == ["answers"]


class FakeTensorFlow:
    """What `_describe_nccl` asks of TensorFlow."""

    def __init__(self, has_cuda):
        self.test = self.sysconfig = self
        self.is_built_with_cuda = lambda: has_cuda
        self.get_build_info = lambda: {"cuda_version": "12.5"} if has_cuda else {}


@pytest.mark.parametrize(
    ("has_cuda", "num_gpus", "words"),
    [
        (False, 0, "not available: this TensorFlow is built without CUDA"),
        (True, 0, "sees no GPU"),
        (True, 2, "available: built with CUDA 12.5, 2 GPUs"),
    ],
)
def test_nccl_is_described_plainly(has_cuda, num_gpus, words):
    assert words in doctor._describe_nccl(FakeTensorFlow(has_cuda), num_gpus)


def test_slurm_is_named_as_the_source_of_the_cluster(tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise ImportError('not needed')")
    result = run_doctor(
        PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]),
        SLURM_JOB_ID="7",
        SLURM_STEP_ID="0",
        SLURM_STEP_NUM_TASKS="2",
        SLURM_STEP_NODELIST="localhost",
        SLURM_STEP_TASKS_PER_NODE="2",
        SLURM_PROCID="1",
        SLURM_NODEID="0",
        SLURM_LOCALID="1",
    )
    assert "from Slurm; this process is worker 1 of 2" in result.stdout
