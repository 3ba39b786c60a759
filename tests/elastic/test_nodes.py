"""`tfdp run --nodes MIN:MAX`: jobs that lose and gain whole nodes."""

from __future__ import annotations

import collections.abc
import itertools
import pathlib
import pickle

import pytest

from tests.cli.nodes import Nodes, ended, read_until
from tests.elastic import job
from tests.elastic.training import BATCH_SIZE, NUM_SAMPLES, STEPS_PER_EPOCH
from tests.harness.timing import wait_until

pytestmark = pytest.mark.processes

DEADLINE_SECONDS, EPOCHS = 150.0, 8
# While there is a file `hold`, steps last long enough for a node to come.
TRAINS = f"""
import pickle
from tests.elastic import training
class Time:
    time = time.time
    def sleep(seconds):
        time.sleep(5 * seconds if pathlib.Path("hold").exists() else seconds)
training.time = Time
result = training.train(
    RANK, ".", epochs={EPOCHS}, features=["rows"], step_seconds=0.4
)
path = pathlib.Path(f"result-{{os.getpid()}}")
path.write_bytes(pickle.dumps(result))
"""
# A worker without TensorFlow, which is in the job until its file is there.
BELONGS = """
from tfdp.communication.cluster import Cluster
from tfdp.communication.store import Membership, ask_job
cluster = Cluster.from_environment()
if ask_job(cluster) is None:
    member = Membership(cluster)
    member.join(30.0)
    time.sleep(2.5)  # node 0 asks once a second
    print("trains", flush=True)
else:
    print("is late", len(cluster.workers), ask_job(cluster, applies=True).workers)
wait_for(f"end-{RANK}")
"""


@pytest.fixture
def nodes(tmp_path) -> collections.abc.Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    nodes.count = "1:2"
    yield nodes
    nodes.close()


def test_a_node_is_lost_and_another_one_starts_workers_that_find_the_job(nodes):
    nodes.script(BELONGS)
    first = nodes.node("-n", "1", "--no-fork", "script.py")
    read_until(first, "this is node 0")
    second = nodes.node("-n", "1", "--no-fork", "script.py")
    read_until(second, "[worker 1] trains")
    read_until(first, "[worker 0] trains")
    second.kill()
    read_until(first, "training continues with 1 node")
    third = nodes.node("-n", "1", "--no-fork", "script.py")
    read_until(third, "[worker 1] is late 2")
    for rank in range(2):
        (nodes.folder / f"end-{rank}").touch()
    assert [ended(process)[0] for process in (first, third)] == [0, 0]
    nodes.assert_nothing_is_left()


def results_of(folder: pathlib.Path) -> list[dict]:
    """What each worker has returned that has ended without an error."""
    return [pickle.loads(path.read_bytes()) for path in folder.glob("result-*")]


def check(folder: pathlib.Path, number: int) -> None:
    """Compares the workers with one device, and each epoch's rows with the data."""
    arguments = {"epochs": EPOCHS, "features": ["rows"]}
    expected = job.on_one_device(folder / "one", **arguments)
    results = results_of(folder)
    assert len(results) == number
    for result in results:
        job.assert_same(result, expected)
    rows = job.rows_by_step(folder)
    for epoch in range(EPOCHS):
        batches = [rows[epoch, batch] for batch in range(STEPS_PER_EPOCH)]
        assert all(len(batch) == BATCH_SIZE for batch in batches)
        assert sorted(itertools.chain(*batches)) == list(range(NUM_SAMPLES))


def await_epoch(folder: pathlib.Path) -> None:
    """Wait until the workers have begun the second epoch."""
    wait_until(
        lambda: any("[0, 1, 0, " in p.read_text() for p in folder.glob("rows/*")),
        "a second epoch",
        DEADLINE_SECONDS,
    )


@pytest.mark.full
def test_a_job_that_loses_a_node_and_gains_one_ends_as_one_device_does(nodes):
    nodes.script(TRAINS)
    line = ("-n", "2", "script.py")
    first = nodes.node(*line)
    read_until(first, "this is node 0")
    second = nodes.node(*line)
    await_epoch(nodes.folder)
    second.kill()
    read_until(first, "Training continues with 2 workers instead of 4")
    (nodes.folder / "hold").touch()
    third = nodes.node(*line)
    read_until(first, "joined the job")
    (nodes.folder / "hold").unlink()
    code, output = ended(third, DEADLINE_SECONDS)
    assert (code, ended(first)[0]) == (0, 0), output
    check(nodes.folder, 4)
    replicas = [result["replicas"] for result in results_of(nodes.folder)]
    assert replicas == [4] * 4
    nodes.assert_nothing_is_left()


@pytest.mark.full
@pytest.mark.parametrize("comes_back", [False, True])
def test_the_others_continue_after_the_loss_of_the_node_of_the_rendezvous(
    nodes, comes_back
):
    nodes.script(TRAINS)
    line = ("-n", "2", "script.py")
    first = nodes.node(*line)
    read_until(first, "this is node 0")
    second = nodes.node(*line)
    await_epoch(nodes.folder)
    (nodes.folder / "hold").touch()
    first.kill()
    output = read_until(second, "Training continues with 2 workers instead of 4")
    again = nodes.node(*line) if comes_back else None
    if comes_back:
        output += read_until(second, "joined the job")
    (nodes.folder / "hold").unlink()
    code, rest = ended(second, DEADLINE_SECONDS)
    assert code == 0, rest
    output += rest
    assert output.count("the workers of this node continue, and no other") == 1
    if again is not None:
        assert ended(again)[0] == 0
    check(nodes.folder, 4 if comes_back else 2)
    nodes.assert_nothing_is_left()
