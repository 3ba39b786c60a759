"""What TF_CONFIG and Slurm's variables say, and what is wrong with them."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.harness.timing import within
from tfdp.communication.cluster import (
    Cluster,
    ProbeResult,
    free_ports,
    listen,
    ports,
    probe_port,
    split_address,
    unreachable_workers,
)
from tfdp.communication.cluster.mpi_cluster import find_cluster
from tfdp.communication.cluster.slurm import expand_nodelist, expand_tasks_per_node

TWO_WORKERS = {"worker": ["a:1000", "b:1000"]}


def tf_config(cluster=TWO_WORKERS, task_type="worker", index=0, **more):
    return json.dumps(
        {"cluster": cluster, "task": {"type": task_type, "index": index}, **more}
    )


@contextlib.contextmanager
def listening(host="127.0.0.1"):
    """A port on which something listens."""
    with socket.socket() as server:
        server.bind((host, 0))
        server.listen()
        yield server.getsockname()[1]


def unused_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("module", ["address", "ports", "slurm", "spec", "tf_config"])
def test_examples_in_docstrings_are_true(module):
    tested = doctest.testmod(
        importlib.import_module(f"tfdp.communication.cluster.{module}")
    )
    assert tested.attempted > 0
    assert tested.failed == 0


def test_reading_a_cluster_imports_no_tensorflow():
    code = (
        "import sys, tfdp.communication.cluster; sys.exit('tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_workers_without_a_chief_have_their_index_as_rank():
    cluster = Cluster.from_tf_config(tf_config(index=1))
    assert cluster.workers == ("a:1000", "b:1000")
    assert (cluster.rank, cluster.num_workers, cluster.address) == (1, 2, "b:1000")
    assert not cluster.is_chief
    assert Cluster.from_tf_config(tf_config(index=0)).is_chief


def test_a_chief_is_rank_0_and_workers_come_after_it():
    jobs = {"worker": ["a:1", "b:1"], "chief": ["c:1"], "evaluator": ["e:1"]}
    chief = Cluster.from_tf_config(tf_config(jobs, "chief", 0))
    worker = Cluster.from_tf_config(tf_config(jobs, "worker", 0))
    assert chief.workers == worker.workers == ("c:1", "a:1", "b:1")
    assert (chief.rank, chief.is_chief, chief.address) == (0, True, "c:1")
    assert (worker.rank, worker.is_chief, worker.address) == (1, False, "a:1")
    assert worker.num_workers == 3


def test_an_evaluator_is_not_a_worker_and_is_its_own_chief():
    jobs = {"chief": ["c:1"], "worker": ["a:1"], "evaluator": ["e:1"]}
    evaluator = Cluster.from_tf_config(tf_config(jobs, "evaluator", 0))
    assert evaluator.is_evaluator
    assert evaluator.is_chief
    assert evaluator.num_workers == 2
    assert evaluator.address == "e:1"
    assert "e:1" not in evaluator.workers


def test_an_evaluator_need_not_be_listed_in_the_cluster():
    evaluator = Cluster.from_tf_config(tf_config(TWO_WORKERS, "evaluator", 0))
    assert evaluator.is_evaluator
    assert evaluator.address is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "{}",
        '{"cluster": {}}',
        '{"cluster": null, "task": {"type": "worker", "index": 0}}',
        '{"cluster": {"worker": []}, "task": {"type": "worker", "index": 0}}',
        '{"environment": "cloud", "task": {"type": "master", "index": 0}}',
    ],
)
def test_without_a_cluster_there_is_none(text):
    assert Cluster.from_tf_config(text) is None
    assert Cluster.from_environment({"TF_CONFIG": text}) is None


def test_a_single_worker_is_a_cluster_of_one():
    cluster = Cluster.from_tf_config(tf_config({"chief": ["a:1"]}, "chief", 0))
    assert (cluster.num_workers, cluster.rank, cluster.is_chief) == (1, 0, True)


@pytest.mark.parametrize(
    "text",
    [
        tf_config(index=1),
        tf_config(index=1, tfdp={"devices_per_worker": 2}),
        tf_config(index=1, tfdp={"devices_per_worker": 2, "rebalance": True}),
        tf_config(tfdp={"rebalance": True}),
        tf_config(tfdp={"elastic": 2}),
        tf_config({"chief": ["c:1"], "worker": ["a:1"]}, "worker", 0),
        tf_config({"chief": ["c:1"], "evaluator": ["e:1"]}, "chief", 0),
        tf_config({"worker": ["[::1]:1", "[fe80::1]:1"]}),
    ],
)
def test_writing_and_reading_a_cluster_gives_it_back(text):
    cluster = Cluster.from_tf_config(text)
    assert json.loads(cluster.to_tf_config()) == json.loads(text)
    assert Cluster.from_tf_config(cluster.to_tf_config()) == cluster


def test_the_tfdp_key_gives_the_devices_per_worker():
    text = tf_config(tfdp={"devices_per_worker": 2, "job": "x"})
    assert Cluster.from_tf_config(text).devices_per_worker == 2
    assert Cluster.from_tf_config(tf_config()).devices_per_worker is None


def test_hosts_are_those_of_the_workers_in_the_order_of_ranks():
    jobs = {"worker": ["a:1", "b:1", "a:2"], "chief": ["[::1]:1"]}
    cluster = Cluster.from_tf_config(tf_config(jobs))
    assert cluster.hosts == ("::1", "a", "b", "a")


def test_an_index_in_quotes_is_read_as_tensorflow_reads_it():
    assert Cluster.from_tf_config(tf_config(index="1")).rank == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{x", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ('"worker"', "must be a JSON object"),
        (json.dumps({"cluster": TWO_WORKERS}), "which task this is"),
        (json.dumps({"cluster": TWO_WORKERS, "task": {"index": 0}}), "'type'"),
        (json.dumps({"cluster": TWO_WORKERS, "task": {"type": "worker"}}), "'index'"),
        (json.dumps({"cluster": TWO_WORKERS, "task": "worker"}), "which task this is"),
        (json.dumps({"cluster": ["a:1"], "task": {}}), "an object that maps"),
        (tf_config(index=2), "from 0 to 1"),
        (tf_config(index=-1), "from 0 to 1"),
        (tf_config(index=1.0), "must be an int"),
        (tf_config(index=True), "must be an int"),
        (tf_config(index="one"), "must be an int"),
        (tf_config(index=None), "must be an int"),
        (tf_config({"chief": ["a:1"]}, "worker", 0), "cluster has none"),
        (tf_config({"worker": ["a:1"]}, "chief", 0), "its cluster has none"),
        (tf_config({"chief": ["a:1"]}, "chief", 1), "index must be 0"),
        (tf_config({"chief": ["a:1", "b:1"]}, "chief", 0), "at most one 'chief'"),
        (tf_config({**TWO_WORKERS, "evaluator": ["c:1", "d:1"]}), "at most one"),
        (tf_config({"worker": ["a:1", "a:1"]}), "same address"),
        (tf_config({"worker": ["a:1"], "evaluator": ["A:1"]}), "same address"),
        (tf_config({"worker": ["127.0.0.1:1", "localhost:1"]}), "same address"),
        (tf_config({"worker": ["[::1]:1", "127.0.0.2:1"]}), "same address"),
        (tf_config({"worker": ["[::FFFF:10.0.0.1]:1", "10.0.0.1:1"]}), "same address"),
        (tf_config({"worker": ["[fe80::1]:1", "[fe80:0::1]:1"]}), "same address"),
        (tf_config({"wroker": ["a:1"]}), "'wroker'"),
        (tf_config(task_type="wroker"), "'wroker'"),
        (tf_config(task_type=3), "Received: 3"),
        (tf_config({**TWO_WORKERS, "ps": ["c:1"]}), "Parameter servers"),
        (tf_config(task_type="ps"), "Parameter servers"),
        (tf_config({"worker": "a:1"}), "must be a list"),
        (tf_config({"worker": {"0": "a:1"}}), "must be a list"),
        (tf_config({"worker": ["a"]}), "'host:port'"),
        (tf_config({"worker": ["a:"]}), "'host:port'"),
        (tf_config({"worker": [":1"]}), "'host:port'"),
        (tf_config({"worker": ["a:0"]}), "1 to 65535"),
        (tf_config({"worker": ["a:65536"]}), "1 to 65535"),
        (tf_config({"worker": ["a:1/x"]}), "'host:port'"),
        (tf_config({"worker": ["grpc://a:1"]}), "'host:port'"),
        (tf_config({"worker": ["::1:1"]}), "'host:port'"),
        (tf_config({"worker": [1]}), "Received: 1"),
        (tf_config({"worker": [None]}), "Received: None"),
        ('{"Cluster": {"worker": ["a:1", "b:1"]}}', "under the key 'Cluster'"),
        ('{"cluster": {}, "spec": {"chief": ["a:1"]}}', "under the key 'spec'"),
        ('{"task": {"type": "worker", "index": 1}}', "has no 'cluster'"),
        ('{"cluster": {}, "task": {"index": "3"}}', "has no 'cluster'"),
        ('{"cluster": {"worker": ["a:1"], "worker": []}}', "the key 'worker' occurs"),
        ("[" * 100_000, "not valid JSON"),
        ('{"cluster": ' + "[" * 900 + "]" * 900 + "}", "an object that maps"),
        ("{\n\n x", "not valid JSON"),
        ("\udc80{", "not valid JSON"),
        (json.dumps({"cluster": TWO_WORKERS, "task": None}), "which task this is"),
        (tf_config().replace("0}", "9" * 5000 + "}"), "not valid JSON"),
        (tf_config([]), "an object that maps"),
        (tf_config(0), "an object that maps"),
        (tf_config(""), "an object that maps"),
        (tf_config({"worker": None}), "must be a list"),
        (tf_config({"worker": [["a:1"]]}), "'host:port'"),
        (tf_config({"worker": ["a\ud800:1"]}), "'host:port'"),
        (tf_config({"worker": ["a\x00:1"]}), "'host:port'"),
        (tf_config({"worker": ["a..b:1"]}), "'host:port'"),
        (tf_config({"worker": ["a" * 64 + ":1"]}), "'host:port'"),
        (tf_config({"x" * 10_000: []}), "a 'chief', a 'worker'"),
        (tf_config(task_type=[]), "Received: []"),
        (tf_config(task_type="x" * 10_000), "a 'chief', a 'worker'"),
        (tf_config(index="9" * 5000), "must be an int"),
        (tf_config(index=10**4000), "from 0 to 1"),
        (tf_config().replace("0}", "1e400}"), "must be an int. Received: inf"),
        (tf_config(tfdp=[]), "'tfdp' in TF_CONFIG"),
        ('{"tfdp": 3}', "'tfdp' in TF_CONFIG"),
        (tf_config(tfdp={"devices_per_worker": 10**4000}), "at most 1024"),
        (tf_config(tfdp={"rebalance": "x" * 10_000}), "rebalance='xxx"),
        (tf_config(tfdp=2), "'tfdp' in TF_CONFIG"),
        (tf_config(tfdp={"devices_per_worker": 0}), "devices_per_worker=0"),
        (
            tf_config(tfdp={"device_per_worker": 2, "secret": "s"}),
            "'devices_per_worker'. Received: ['device_per_worker', 'secret']",
        ),
        (tf_config(tfdp={"devices_per_worker": "2"}), "devices_per_worker='2'"),
        (tf_config(tfdp={"devices_per_worker": True}), "devices_per_worker=True"),
        (tf_config(tfdp={"rebalance": 1}), "rebalance=1"),
        (tf_config(tfdp={"elastic": 0}), "elastic=0"),
        (tf_config(tfdp={"elastic": True}), "elastic=True"),
    ],
    ids=lambda text: text[:40],
)
def test_a_wrong_tf_config_gets_one_sentence_that_says_what_was_received(text, words):
    with pytest.raises(ValueError) as caught:
        Cluster.from_tf_config(text)
    message = str(caught.value)
    assert words in message
    assert "Received: " in message
    assert "\n" not in message
    assert len(message) < 700
    message.encode()  # any log can hold it


def test_a_long_wrong_value_is_cut_in_the_message():
    with pytest.raises(ValueError) as caught:
        Cluster.from_tf_config("{" + "x" * 10000)
    assert len(str(caught.value)) < 500


def test_a_cluster_built_by_hand_is_checked_too():
    with pytest.raises(ValueError, match="same address"):
        Cluster(("a:1", "a:1"))
    with pytest.raises(ValueError, match="from 0 to 1"):
        Cluster(("a:1", "b:1"), task_index=2)
    assert Cluster(["a:1"]).workers == ("a:1",)
    assert Cluster(("a:1", "b:1"), "chief").has_chief


def test_an_ipv6_address_loses_its_brackets():
    assert split_address("[fe80::1%eth0]:7") == ("fe80::1%eth0", 7)


def slurm(**variables):
    """The variables of task 3 of a step of 7 tasks on 4 nodes."""
    environ = {
        "SLURM_JOB_ID": "1234",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_NTASKS": "7",
        "SLURM_STEP_NODELIST": "n[01-03],m1",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
        "SLURM_PROCID": "3",
        "SLURM_NODEID": "1",
        "SLURM_LOCALID": "1",
        **variables,
    }
    return {name: value for name, value in environ.items() if value is not None}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[01-03,7],m1", ["n01", "n02", "n03", "n7", "m1"]),
        ("n[09-11]", ["n09", "n10", "n11"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[1,3]-ib", ["n1-ib", "n3-ib"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("gpu-a100-[5],x.example.org", ["gpu-a100-5", "x.example.org"]),
    ],
)
def test_node_lists_of_slurm_are_expanded(text, hosts):
    assert expand_nodelist(text) == hosts


@pytest.mark.parametrize(
    "text", ["", "n[", "n[1-2", "n[a-b]", "n[3-1]", "n1,,n2", "n[]"]
)
def test_a_malformed_node_list_is_refused(text):
    with pytest.raises(ValueError, match="SLURM_STEP_NODELIST"):
        expand_nodelist(text)


@pytest.mark.parametrize(
    ("text", "counts"), [("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("4,2(x2)", [4, 2, 2])]
)
def test_tasks_per_node_of_slurm_are_expanded(text, counts):
    assert expand_tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2(x)", "0", "2(3)", "2(x0)"])
def test_malformed_tasks_per_node_are_refused(text):
    with pytest.raises(ValueError, match="SLURM_STEP_TASKS_PER_NODE"):
        expand_tasks_per_node(text)


def test_a_slurm_step_of_several_tasks_is_a_cluster():
    cluster = Cluster.from_environment(slurm())
    assert cluster.hosts == ("n01", "n01", "n02", "n02", "n03", "n03", "m1")
    assert (cluster.rank, cluster.task_type) == (3, "worker")
    assert len(set(cluster.workers)) == 7
    ports = [split_address(address)[1] for address in cluster.workers]
    assert ports == [ports[0], ports[0] + 1] * 3 + [ports[0]]


def slurm_tasks(order, nodes=3, per_node=2):
    """All tasks of a step, as `--distribution=block` or `cyclic` numbers them."""
    places = [(node, local) for node in range(nodes) for local in range(per_node)]
    if order == "cyclic":
        places.sort(key=lambda place: place[::-1])
    return [
        Cluster.from_environment(
            slurm(
                SLURM_STEP_NUM_TASKS=str(nodes * per_node),
                SLURM_STEP_NODELIST=f"n[1-{nodes}]",
                SLURM_STEP_TASKS_PER_NODE=f"{per_node}(x{nodes})",
                SLURM_PROCID=str(procid),
                SLURM_NODEID=str(node),
                SLURM_LOCALID=str(local),
            )
        )
        for procid, (node, local) in enumerate(places)
    ], places


@pytest.mark.parametrize("order", ["block", "cyclic"])
def test_all_tasks_of_a_slurm_step_agree_and_listen_where_they_run(order):
    clusters, places = slurm_tasks(order)
    assert {cluster.workers for cluster in clusters} == {clusters[0].workers}
    assert sorted(cluster.rank for cluster in clusters) == list(range(6))
    for cluster, (node, _) in zip(clusters, places, strict=True):
        assert split_address(cluster.address)[0] == f"n{node + 1}"


@pytest.mark.parametrize(
    ("seen", "own"),
    [("0,1,2,3", "2,3"), ("2", "2"), ("", "")],
)
def test_tasks_of_a_slurm_node_divide_the_gpus_that_all_of_them_see(
    monkeypatch, seen, own
):
    gpus = {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": seen}
    for name, value in slurm(**gpus).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for _ in range(2):
        assert find_cluster().num_workers == 7
        assert os.environ["CUDA_VISIBLE_DEVICES"] == own
    # Without its number among the tasks of the node, no part is that of this task.
    monkeypatch.delenv("SLURM_LOCALID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert find_cluster().num_workers == 7
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
    monkeypatch.setenv("TF_CONFIG", tf_config())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert find_cluster().num_workers == 2
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


def test_slurm_jobs_that_share_a_node_get_other_ports():
    blocks = {
        Cluster.from_environment(
            slurm(SLURM_JOB_ID=str(1234 + job), SLURM_STEP_ID=str(step))
        ).workers[0]
        for job in range(10)
        for step in range(3)
    }
    assert len(blocks) == 30


@pytest.mark.parametrize("job", ["0", "1", "9999999", "4294901760"])
def test_slurm_ports_lie_below_those_of_outgoing_connections(job):
    cluster = Cluster.from_environment(slurm(SLURM_JOB_ID=job))
    ports = [split_address(address)[1] for address in cluster.workers]
    assert min(ports) >= 10000
    assert max(ports) < 32768


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},
        # A batch script that runs Python without srun is one process.
        {"SLURM_STEP_NODELIST": None, "SLURM_STEP_NUM_TASKS": None},
        {"SLURM_PROCID": None},
    ],
)
def test_what_is_not_a_slurm_step_of_several_tasks_is_a_single_machine(changes):
    assert Cluster.from_environment(slurm(**changes)) is None


def test_the_number_of_slurm_tasks_may_come_from_slurm_ntasks():
    cluster = Cluster.from_environment(slurm(SLURM_STEP_NUM_TASKS=None))
    assert cluster.num_workers == 7


def test_without_node_and_local_id_the_rank_is_slurm_procid():
    environ = slurm(SLURM_NODEID=None, SLURM_LOCALID=None, SLURM_PROCID="5")
    assert Cluster.from_environment(environ).rank == 5


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"},
        {"SLURM_STEP_TASKS_PER_NODE": None},
        {"SLURM_STEP_NUM_TASKS": "8"},
        {"SLURM_STEP_NUM_TASKS": "many"},
        {"SLURM_NODEID": "4"},
        {"SLURM_LOCALID": "2"},
        {"SLURM_JOB_ID": "x"},
        {"SLURM_NODEID": None, "SLURM_PROCID": "7"},
    ],
)
def test_slurm_variables_that_do_not_fit_together_get_one_sentence(changes):
    with pytest.raises(ValueError) as caught:
        Cluster.from_environment(slurm(**changes))
    assert "Received: " in str(caught.value)


def test_tf_config_comes_before_slurm():
    environ = slurm(TF_CONFIG=tf_config())
    assert Cluster.from_environment(environ).workers == ("a:1000", "b:1000")
    assert Cluster.from_environment(slurm(TF_CONFIG="{}")).num_workers == 7


def listen_once(address: str) -> None:
    """Listens on a port as a task does, and stops at once."""
    sockets = listen(address)
    assert sockets
    for each in sockets:
        each.close()


def test_a_taken_port_is_named_within_a_second():
    taken = pytest.raises(ValueError, match=r"Port \d+.*already taken")
    with listening() as port, within(1), taken as caught:
        listen_once(f"localhost:{port}")
    assert str(port) in str(caught.value)


@pytest.mark.parametrize("host", ["localhost", "[::1]", "no-such-host.invalid"])
def test_a_port_taken_on_ipv6_alone_is_seen(host, monkeypatch):
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    if host == "localhost":  # on a machine that gives it both addresses
        both = ["127.0.0.1", "::1"]
        monkeypatch.setattr(ports, "addresses_of", lambda host: both)
    with socket.socket(socket.AF_INET6) as server:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        server.bind(("::", 0))
        server.listen()
        with pytest.raises(ValueError, match="already taken"):
            listen_once(f"{host}:{server.getsockname()[1]}")


def test_a_port_is_free_once_no_task_listens_on_it():
    port = unused_port()
    for _ in range(2):
        listen_once(f"no-such-host.invalid:{port}")


def test_a_port_whose_last_connection_was_just_closed_is_free():
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        server.listen()
        client = socket.create_connection(("127.0.0.1", port))
        peer, _ = server.accept()
        peer.close()  # the side that closes first keeps the port for a minute
        client.close()
    listen_once(f"localhost:{port}")


def test_unreachable_names_the_ranks_whose_port_does_not_answer():
    with listening() as port:
        silent = unused_port()
        cluster = Cluster(
            (f"127.0.0.1:{unused_port()}", f"127.0.0.1:{port}", f"127.0.0.1:{silent}")
        )
        with within(2):
            assert unreachable_workers(cluster, timeout_seconds=0.5) == [2]


def test_unreachable_waits_for_a_worker_that_starts_late():
    port = unused_port()
    cluster = Cluster((f"127.0.0.1:{unused_port()}", f"127.0.0.1:{port}"))

    def start_late():
        time.sleep(0.5)
        server.bind(("127.0.0.1", port))
        server.listen()

    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        threading.Thread(target=start_late).start()
        with within(10):
            assert unreachable_workers(cluster, timeout_seconds=20) == []


def test_unreachable_asks_every_worker_when_this_is_the_evaluator():
    cluster = Cluster((f"127.0.0.1:{unused_port()}",), "evaluator")
    assert unreachable_workers(cluster, timeout_seconds=0.2) == [0]


def test_unreachable_keeps_its_time_when_a_host_has_no_name():
    cluster = Cluster(("127.0.0.1:1", "no-such-host.invalid:1"))
    with within(2):
        assert unreachable_workers(cluster, timeout_seconds=0.5) == [1]


def test_a_connection_of_a_port_to_itself_is_no_answer(monkeypatch):
    # Simultaneous open: TCP connects a socket to its own port.
    port = unused_port()

    def connect_to_itself(address, timeout):
        connection = socket.socket()
        connection.bind(address)
        connection.connect(address)
        return connection

    monkeypatch.setattr(socket, "create_connection", connect_to_itself)
    assert probe_port(f"127.0.0.1:{port}", 1.0) is ProbeResult.REFUSED


def test_ports_are_not_drawn_from_the_generator_of_the_script():
    random.seed(1)
    before = random.getstate()
    first = free_ports(3)
    assert random.getstate() == before
    random.seed(1)
    assert free_ports(3) != first  # a seed of the script's does not repeat them
