"""`tfdp run --nodes`: two launchers of one job, with scripts without TensorFlow."""

from __future__ import annotations

import collections.abc
import json
import signal
import subprocess
import sys

import psutil
import pytest

from tests.cli.launcher import (
    DEADLINE_SECONDS,
    IGNORE_SIGNALS,
    STOPS_WITHIN_SECONDS,
    lines_of,
)
from tests.cli.nodes import Nodes, ended, read_until
from tests.harness.tiers import full
from tests.harness.timing import wait_until
from tests.strategy.trained import check_answers
from tfdp.communication.cluster import free_ports
from tfdp.communication.cluster.own_addresses import is_own
from tfdp.communication.coordination.preemption import PREEMPTED
from tools.bench import hosts_bed
from tools.bench.hosts_bed import TwoHosts

pytestmark = pytest.mark.processes


@pytest.fixture
def nodes(tmp_path) -> collections.abc.Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.close()


@pytest.mark.full
@pytest.mark.skipif(not is_own("::1"), reason="needs IPv6")
def test_nodes_meet_at_an_ipv6_address(nodes):
    nodes.place = f"[::1]:{free_ports(1)[0]}"
    nodes.script("print(json.dumps(CONFIG['cluster']['worker']))")
    outputs = nodes.both("-n", "1", "script.py")
    assert [code for code, _ in outputs] == [0, 0], outputs
    assert "node 1 of 2 starts worker 1 of 2; logs in" in outputs[1][1]
    shown = [
        json.loads(lines_of(out, rank)[0]) for rank, (_, out) in enumerate(outputs)
    ]
    assert shown[0] == shown[1]
    assert [address.rpartition(":")[0] for address in shown[0]] == ["[::1]"] * 2


@pytest.mark.full
@pytest.mark.skipif(bool(hosts_bed.missing()), reason=hosts_bed.missing())
@pytest.mark.parametrize("kind", ["addresses", full("training")])
def test_hosts_that_have_ipv6_only_are_one_cluster(nodes, kind):
    train = "from tests.strategy.mpi_train import main; main()"
    script = {"addresses": "print(json.dumps(CONFIG['cluster']['worker']))"}
    nodes.script(script.get(kind, train))
    with TwoHosts(is_ipv6=True) as bed:
        nodes.place = f"[{bed.addresses[0]}]:29400"
        line = ("-n", "1", "script.py", "auto_strategy")
        started = [
            nodes.node("--node-rank", str(rank), *line, before=bed.enter(rank))
            for rank in range(2)
        ]
        outputs = [ended(process) for process in started]
    assert [code for code, _ in outputs] == [0, 0], outputs
    assert "node 1 of 2 starts worker 1 of 2; logs in" in outputs[1][1]
    shown = [
        json.loads(lines_of(out, rank)[-1]) for rank, (_, out) in enumerate(outputs)
    ]
    if kind == "training":
        check_answers(shown, num_replicas=2, backend="direct")
    else:
        hosts = [address.rpartition(":")[0] for address in shown[0]]
        assert hosts == [f"[{address}]" for address in bed.addresses]


FAILS = """
pathlib.Path(f"ready-{RANK}").touch()
if RANK == int(sys.argv[1]):
    wait_for("ready-0"), wait_for("ready-1"), wait_for("ready-2")
    sys.exit(7)
time.sleep(600)
"""
WAITS = """
pathlib.Path(f"ready-{RANK}").touch()
print("ready", flush=True)
time.sleep(600)
"""
# All but the first attempt come to an end.
SECOND_TIME = """
tries = len(list(pathlib.Path(".").glob(f"try-{RANK}-*")))
pathlib.Path(f"try-{RANK}-{tries}").touch()
if tries == 0:
    print("waits", flush=True)
    time.sleep(600)
wait_for("try-0-1"), wait_for("try-1-1")
print("done", len(CONFIG["cluster"]["worker"]), flush=True)
"""


def test_two_nodes_get_one_cluster_and_show_their_own_workers(nodes):
    nodes.script("print(json.dumps([CONFIG, os.environ['OMP_NUM_THREADS']]))")
    # No rank: who can listen at the rendezvous is node 0.
    first = nodes.node("-n", "2", "--log-dir", "logs", "script.py")
    read_until(first, "this is node 0")
    second = nodes.node("-n", "1", "--log-dir", "logs", "script.py")
    outputs = [ended(first), ended(second)]
    assert [code for code, _ in outputs] == [0, 0], outputs
    shown = [lines_of(outputs[0][1], 0), lines_of(outputs[0][1], 1)]
    shown.append(lines_of(outputs[1][1], 2))
    assert "[worker 2]" not in outputs[0][1]
    assert "[worker 0]" not in outputs[1][1]
    configs, threads = zip(*(json.loads(lines[0]) for lines in shown), strict=True)
    addresses = configs[0]["cluster"]["worker"]
    assert len(set(addresses)) == 3
    for rank, config in enumerate(configs):
        assert config["cluster"] == {"worker": addresses}
        assert config["task"] == {"type": "worker", "index": rank}
    # Cores are divided among the workers of a node.
    assert int(threads[2]) >= int(threads[0])
    assert sorted(path.name for path in nodes.folder.glob("logs/*")) == [
        f"worker-{rank}.log" for rank in range(3)
    ]
    nodes.assert_nothing_is_left()


# The launcher does not see these imports, before which it would import TensorFlow.
JOINS = """
import importlib
if RANK:
    cluster = importlib.import_module("tfdp.communication.cluster").find_cluster()
    importlib.import_module("tfdp.communication.store").Membership(cluster).join(None)
"""


def test_a_node_does_not_wait_for_one_whose_workers_have_ended_with_code_0(nodes):
    nodes.script(JOINS)
    (first_code, first), (second_code, second) = nodes.both("-n", "1", "script.py")
    early = "the workers of node 0 ended with exit code 0 without creating a strategy"
    assert (first_code, second_code) == (1, 1), (first, second)
    assert f"tfdp: {early}, as seen on node 1 (" in first
    assert f"tfdp: {early}, for which the rest of the job waits." in second
    nodes.assert_nothing_is_left()


@pytest.mark.parametrize("rank", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_worker_that_fails_ends_all_nodes_with_one_sentence(nodes, rank):
    nodes.script(FAILS)
    first = nodes.node("--node-rank", "0", "-n", "2", "script.py", str(rank))
    second = nodes.node("--node-rank", "1", "-n", "1", "script.py", str(rank))
    for code, output in (ended(first), ended(second)):
        assert code == 7
        assert output.count("failed with exit code 7") == 1
        node = 1 if rank == 2 else 0
        assert f"tfdp: worker {rank} on node {node} (" in output
        assert "; the workers of all nodes were stopped. Full output of" in output
        assert f"of worker {rank}, there: " in output
        assert f"/worker-{rank}.log" in output
    nodes.assert_nothing_is_left()


@pytest.mark.full
def test_all_nodes_start_again_together(nodes):
    nodes.script(
        SECOND_TIME.replace(
            "time.sleep(600)",
            # Worker 0 must have begun, or it would take its second start for the first.
            "(wait_for('try-0-0'), sys.exit(3)) if RANK else time.sleep(9)",
        )
    )
    outputs = nodes.both(
        *("-n", "1", "--max-restarts", "2", "--log-dir", "logs", "script.py")
    )
    assert [code for code, _ in outputs] == [0, 0], outputs
    for rank, (_, output) in enumerate(outputs):
        assert lines_of(output, rank)[-1] == "done 2"
        assert output.count("restart 1 of 2: worker 1 failed with exit code 3") == 1
        assert "2 workers start again in 0.1 s" in output
    history = (nodes.folder / "logs" / "restarts.log").read_text().splitlines()
    assert len(history) == 1
    nodes.assert_nothing_is_left()


@pytest.mark.full
def test_a_node_that_is_killed_ends_the_others_and_is_named(nodes):
    nodes.script(WAITS)
    first, second = nodes.both_ready("-n", "1", "script.py")
    second.kill()
    code, output = ended(first)
    assert code == 69
    assert output.count("tfdp: node 1 (") == 1
    assert "was lost: it has closed its connection; the workers of all" in output
    nodes.assert_nothing_is_left(within_seconds=STOPS_WITHIN_SECONDS)


@pytest.mark.full
def test_a_node_0_that_is_killed_ends_the_others(nodes):
    nodes.script(WAITS)
    first = nodes.node("-n", "1", "script.py")
    read_until(first, "this is node 0")
    second = nodes.node("-n", "1", "script.py")
    read_until(second, "[worker 1] ready")
    first.kill()
    code, output = ended(second)
    assert code == 69
    assert f"tfdp: node 0 at {nodes.place} has closed its connection" in output
    nodes.assert_nothing_is_left(within_seconds=STOPS_WITHIN_SECONDS)


@pytest.mark.full
def test_a_node_that_comes_back_joins_at_the_next_start(nodes):
    nodes.script(SECOND_TIME)
    line = ("-n", "1", "--max-restarts", "1", "script.py")
    first, second = nodes.both_ready(*line, word="waits")
    second.kill()
    read_until(first, "to come back; 1 of 2 nodes has joined")
    again = nodes.node(*line)
    code, output = ended(first)
    assert (code, lines_of(output, 0)[-1]) == (0, "done 2")
    code, output = ended(again)
    assert (code, lines_of(output, 1)[-1]) == (0, "done 2")


@pytest.mark.full
@pytest.mark.parametrize(
    ("signum", "node"), [(signal.SIGINT, 1), (signal.SIGTERM, 0), (signal.SIGHUP, 1)]
)
def test_a_signal_to_one_launcher_ends_all(nodes, signum, node):
    nodes.script(WAITS)
    started = nodes.both_ready("-n", "1", "--max-restarts", "3", "script.py")
    started[node].send_signal(signum)
    outputs = [ended(process) for process in started]
    assert [code for code, _ in outputs] == [128 + signum] * 2
    name = signum.name
    assert f"tfdp: {name} received, stopping the worker" in outputs[node][1]
    assert f"tfdp: {name} received on node {node} (" in outputs[1 - node][1]
    assert all("Traceback" not in output for _, output in outputs)
    nodes.assert_nothing_is_left()


@pytest.mark.full
def test_a_second_ctrl_c_kills_the_workers_of_a_node_at_once(nodes):
    nodes.script(IGNORE_SIGNALS + WAITS)
    started = nodes.both_ready("-n", "1", "--grace", "600", "script.py")
    for process in started:
        process.send_signal(signal.SIGINT)
    for process in started:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)
    for process in started:
        process.send_signal(signal.SIGINT)
    outputs = [ended(process, STOPS_WITHIN_SECONDS) for process in started]
    assert [code for code, _ in outputs] == [130, 130], outputs
    nodes.assert_nothing_is_left()


@pytest.mark.full
@pytest.mark.parametrize("node", [0, 1])
def test_training_that_was_saved_ends_all_nodes_with_code_75(nodes, node):
    nodes.script(
        f"signal.signal(signal.SIGTERM, lambda *_: sys.exit({PREEMPTED}))" + WAITS
    )
    started = nodes.both_ready("-n", "1", "--max-restarts", "3", "script.py")
    started[node].send_signal(signal.SIGTERM)
    outputs = [ended(process) for process in started]
    assert [code for code, _ in outputs] == [PREEMPTED] * 2, outputs
    assert "training was preempted and is saved" in outputs[node][1]
    assert all("restart " not in output for _, output in outputs)


@pytest.mark.full
def test_a_node_that_is_done_can_end_the_others(nodes):
    nodes.script("if RANK == 0:\n    time.sleep(600)\nprint('done')")
    started = nodes.start_both("-n", "1", "script.py")
    read_until(started[1], "[worker 1] done")
    launcher = psutil.Process(started[1].pid)
    wait_until(lambda: not launcher.children(), "a launcher without a worker")
    started[1].send_signal(signal.SIGINT)
    outputs = [ended(process) for process in started]
    assert [code for code, _ in outputs] == [130, 130], outputs
    nodes.assert_nothing_is_left()


@pytest.mark.full
def test_who_waits_for_others_can_be_interrupted_and_gives_up_in_time(nodes):
    nodes.script(WAITS)
    process = nodes.node("-n", "1", "script.py")
    read_until(process, "this is node 0")
    process.send_signal(signal.SIGINT)
    assert process.wait(STOPS_WITHIN_SECONDS) == 130
    code, output = ended(nodes.node("-n", "1", "--join-timeout", "1", "script.py"))
    assert code == 69
    assert "tfdp: waited 1 s for 2 nodes, but 1 joined: node 0 (" in output
    line = ("--node-rank", "1", "--join-timeout", "1", "-n", "1", "script.py")
    code, output = ended(nodes.node(*line))
    assert code == 69
    assert (
        f"tfdp: waited 1 s for node 0, and nothing answers at {nodes.place}" in output
    )
    process = nodes.node("--node-rank", "1", "-n", "1", "script.py")
    read_until(process, "this node joins")
    process.send_signal(signal.SIGINT)
    assert process.wait(STOPS_WITHIN_SECONDS) == 130


@pytest.mark.full
def test_the_timeout_of_one_node_ends_all(nodes):
    nodes.script(WAITS)
    first = nodes.node("-n", "1", "script.py")
    read_until(first, "this is node 0")
    second = nodes.node("-n", "1", "--timeout", "5", "script.py")
    outputs = [ended(first), ended(second)]
    assert [code for code, _ in outputs] == [124, 124], outputs
    assert "tfdp: --timeout is over on node 1 (" in outputs[0][1]
    assert "not done within --timeout, stopping the worker" in outputs[1][1]
    nodes.assert_nothing_is_left()


@pytest.mark.full
def test_the_line_that_node_0_prints_gives_the_others_the_secret(nodes):
    nodes.script("print('hello', RANK)")
    del nodes.environment["TFDP_JOB_SECRET_FILE"]
    code, output = ended(nodes.node("--node-rank", "1", "-n", "1", "script.py"))
    assert code == 2
    assert output.count("\n") == 1
    assert "and does not have the job's secret: paste the line" in output
    first = nodes.node("-n", "1", "script.py")
    output = read_until(first, "export TFDP_JOB_SECRET_FILE=")
    line = output.splitlines()[-1]
    rest = f"--nodes 2 --rendezvous {nodes.place} -n 1 script.py"
    done = subprocess.run(
        ["sh", "-c", f"{line}\nexec {sys.executable} -m tfdp run {rest}"],
        cwd=nodes.folder,
        env=nodes.environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert lines_of(done.stdout, 1) == ["hello 1"]
    assert ended(first)[0] == 0
    assert (nodes.folder / ".tfdp-job-secret").stat().st_mode & 0o777 == 0o600


AN_HOUR_AHEAD = """
import time
now = time.time
time.time = lambda: now() + 3600
from tfdp.launch.cli.main import main
"""


@pytest.mark.full
def test_a_node_whose_clock_is_an_hour_ahead_joins_and_fails_like_any(nodes):
    nodes.script(FAILS.replace('wait_for("ready-2")', "None"))
    first = nodes.node("-n", "1", "script.py", "1")
    read_until(first, "this is node 0")
    line = f"--nodes 2 --rendezvous {nodes.place} -n 1 script.py 1".split()
    second = nodes.python(f"{AN_HOUR_AHEAD}main({['run', *line]!r})")
    for code, output in (ended(first), ended(second)):
        assert code == 7
        assert "worker 1 on node 1 (" in output
    nodes.assert_nothing_is_left()


OTHER_VERSION = (
    "import tfdp; tfdp.__version__ = '9.9'; from tfdp.launch.cli.main import main; "
)


@pytest.mark.full
def test_a_node_that_does_not_fit_gets_one_sentence_and_the_others_wait(nodes):
    nodes.script("print('hello', RANK)")
    first = nodes.node("-n", "1", "script.py")
    read_until(first, "this is node 0")
    line = f"--nodes 2 --rendezvous {nodes.place} -n 1 script.py".split()
    (nodes.folder / "other").write_text("f" * 16)
    (nodes.folder / "other").chmod(0o600)
    other = {
        **nodes.environment,
        "TFDP_JOB_SECRET_FILE": str(nodes.folder / "other"),
    }
    refused = [
        (nodes.node("--node-rank", "0", "-n", "1", "script.py"), "Node 0 cannot open"),
        (nodes.node("-n", "1", "script.py", env=other), "The secret of this node"),
        (
            nodes.python(f"{OTHER_VERSION}main({['run', *line]!r})"),
            "has tfdp 9.9. Install the same version on all machines.",
        ),
    ]
    for process, words in refused:
        code, output = ended(process)
        assert code == 2, output
        assert "tfdp: error: " in output.splitlines()[-1]
        assert words in output.splitlines()[-1]
    assert ended(nodes.node("-n", "1", "script.py"))[0] == 0
    assert ended(first)[0] == 0
