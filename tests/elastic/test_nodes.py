"""`tfdp run --nodes MIN:MAX`: jobs that lose and gain whole nodes."""

from __future__ import annotations

import collections.abc
import itertools
import pathlib
import pickle
import subprocess

import pytest

from tests.cli.launcher import IMPATIENT
from tests.cli.nodes import Nodes, ended, read_until
from tests.elastic import job
from tests.elastic.training import BATCH_SIZE, NUM_SAMPLES, STEPS_PER_EPOCH
from tests.harness.timing import wait_until
from tfdp.launch.rendezvous.failure import NODE_LOST

pytestmark = pytest.mark.processes

LINE = ("-n", "2", "script.py")
DEADLINE_SECONDS = 150.0
# While there is a file `hold`, steps last long enough for a node to come.
TRAINS = """
import pickle
from tests.elastic import training
class Time:
    time = time.time
    def sleep(seconds):
        time.sleep(20 * seconds if pathlib.Path("hold").exists() else seconds)
training.time = Time
result = training.train(
    RANK, ".", epochs=EPOCHS, features=["rows"], step_seconds=0.1
)
path = pathlib.Path(f"result-{os.getpid()}")
path.write_bytes(pickle.dumps(result))
"""
# A worker without TensorFlow, which is in the job until its file is there.
BELONGS = """
from tfdp.communication.cluster import Cluster
from tfdp.communication.store import Membership, ask_job
cluster = Cluster.from_environment()
print("starts", flush=True)
wait_for(f"go-{RANK}")
# The job may end between the question and the application.
if not ask_job(cluster) or not (found := ask_job(cluster, applies=True)):
    member = Membership(cluster)
    member.join(None, may_run_already=True)
    print("belongs", flush=True)
    time.sleep(2.5)  # node 0 asks once a second
    print("trains", flush=True)
else:
    print("is late", len(cluster.workers), found.workers)
wait_for(f"end-{RANK}")
"""
ONE_WORKER = ("-n", "1", "--no-fork", "script.py")


@pytest.fixture
def nodes(tmp_path) -> collections.abc.Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    nodes.count = "1:2"
    yield nodes
    nodes.close()


def two_nodes(nodes: Nodes, *line: str) -> tuple[subprocess.Popen, subprocess.Popen]:
    """Starts node 0, and then another one."""
    first = nodes.node(*line)
    read_until(first, "this is node 0")
    return first, nodes.node(*line)


def belong(nodes: Nodes, *ranks: int) -> None:
    """Lets workers be in the job without TensorFlow, these ones at once."""
    nodes.script(BELONGS)
    for rank in ranks:
        (nodes.folder / f"go-{rank}").touch()


def test_a_node_is_lost_and_another_one_starts_workers_that_find_the_job(nodes):
    belong(nodes, 0, 1)
    first, second = two_nodes(nodes, *ONE_WORKER)
    read_until(second, "[worker 1] trains")
    read_until(first, "[worker 0] trains")
    second.kill()
    read_until(first, "training continues with 1 node")
    third = nodes.node(*ONE_WORKER)
    read_until(third, "[worker 1] is late 2")
    for rank in range(2):
        (nodes.folder / f"end-{rank}").touch()
    assert [ended(process)[0] for process in (first, third)] == [0, 0]
    nodes.assert_nothing_is_left()


def test_workers_continue_whose_node_0_is_lost_before_it_has_seen_them_train(nodes):
    belong(nodes, 0, 1)
    first, second = two_nodes(nodes, *ONE_WORKER)
    read_until(second, "[worker 1] belongs")
    first.kill()
    read_until(second, "the workers of this node continue")
    (nodes.folder / "end-1").touch()
    assert ended(second)[0] == 0
    nodes.assert_nothing_is_left()


@pytest.mark.full
@pytest.mark.parametrize("comes_back", [True, False])
def test_a_node_without_workers_that_train_waits_for_a_new_node_0(nodes, comes_back):
    belong(nodes)
    seconds = "60" if comes_back else "2"
    first, second = two_nodes(nodes, "--join-timeout", seconds, *ONE_WORKER)
    read_until(second, "[worker 1] starts")
    first.kill()
    read_until(second, f"this node waits up to {seconds} s until the same")
    if not comes_back:
        code, output = ended(second)
        assert (code, output.count("nothing answers")) == (NODE_LOST, 1), output
        return
    for name in ("go-0", "go-1", "end-0", "end-1"):
        (nodes.folder / name).touch()
    again = nodes.node(*ONE_WORKER)
    read_until(again, "[worker 0] trains")
    assert [ended(process)[0] for process in (again, second)] == [0, 0]
    nodes.assert_nothing_is_left()


@pytest.mark.full
def test_a_worker_that_starts_while_all_others_are_lost_does_not_wait_for_them(nodes):
    nodes.count = "1:3"
    belong(nodes, 0, 1)
    first, second = two_nodes(nodes, *ONE_WORKER)
    read_until(second, "[worker 1] trains")
    where = ("--nodes", nodes.count, "--rendezvous", nodes.place)
    third = nodes.python(f"{IMPATIENT}main({['run', *where, *ONE_WORKER]!r})")
    read_until(third, "[worker 2] starts")
    first.kill()
    read_until(third, "the workers of this node continue")
    second.kill()
    (nodes.folder / "go-2").touch()
    code, output = ended(third)
    assert code == NODE_LOST
    assert output.count("no worker has trained for") == 1
    nodes.assert_nothing_is_left()


def results_of(folder: pathlib.Path) -> list[dict]:
    """What each worker has returned that has ended without an error."""
    return [pickle.loads(path.read_bytes()) for path in folder.glob("result-*")]


def check(folder: pathlib.Path, number: int, epochs: int) -> None:
    """Compares the workers with one device, and each epoch's rows with the data."""
    arguments = {"epochs": epochs, "features": ["rows"]}
    expected = job.on_one_device(folder / "one", **arguments)
    results = results_of(folder)
    assert len(results) == number
    for result in results:
        job.assert_same(result, expected)
        assert result["replicas"] == number
    rows = job.rows_by_step(folder)
    for epoch in range(epochs):
        batches = [rows[epoch, batch] for batch in range(STEPS_PER_EPOCH)]
        assert all(len(batch) == BATCH_SIZE for batch in batches)
        assert sorted(itertools.chain(*batches)) == list(range(NUM_SAMPLES))


def await_epoch(folder: pathlib.Path) -> None:
    """Waits until the workers have begun the second epoch."""
    wait_until(
        lambda: any("[0, 1, 0, " in p.read_text() for p in folder.glob("rows/*")),
        "a second epoch",
        DEADLINE_SECONDS,
    )


def training_nodes(
    nodes: Nodes, epochs: int
) -> tuple[subprocess.Popen, subprocess.Popen]:
    """Starts two nodes, and lets them begin the second epoch."""
    nodes.script(TRAINS.replace("EPOCHS", str(epochs)))
    both = two_nodes(nodes, *LINE)
    await_epoch(nodes.folder)
    (nodes.folder / "hold").touch()
    return both


@pytest.mark.full
def test_a_job_that_loses_each_node_and_gains_others_ends_as_one_device_does(nodes):
    first, second = training_nodes(nodes, 6)
    first.kill()
    output = read_until(second, "Training continues with 2 workers instead of 4")
    again = nodes.node(*LINE)
    output += read_until(second, "joined the job")
    assert output.count("the workers of this node continue, and no other") == 1
    second.kill()
    read_until(again, "Training continues with 2 workers instead of 4")
    third = nodes.node(*LINE)
    read_until(again, "joined the job")
    (nodes.folder / "hold").unlink()
    code, output = ended(third, DEADLINE_SECONDS)
    assert (code, ended(again)[0]) == (0, 0), output
    check(nodes.folder, 4, 6)
    nodes.assert_nothing_is_left()


@pytest.mark.full
def test_the_others_continue_after_the_loss_of_the_node_of_the_rendezvous(nodes):
    first, second = training_nodes(nodes, 3)
    first.kill()
    output = read_until(second, "Training continues with 2 workers instead of 4")
    (nodes.folder / "hold").unlink()
    code, rest = ended(second, DEADLINE_SECONDS)
    assert code == 0, rest
    output += rest
    assert output.count("the workers of this node continue, and no other") == 1
    check(nodes.folder, 2, 3)
    nodes.assert_nothing_is_left()
