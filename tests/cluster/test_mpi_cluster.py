"""An MPI job is a cluster: who is in it, where they are, and what is said if not."""

from __future__ import annotations

import os
import re
import socket
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.harness.commands import run_command
from tests.harness.mpi import answers, is_open_mpi, needs_mpi, run_ranks, why_not
from tests.harness.tiers import full
from tfdp.communication.cluster import (
    Cluster,
    count_workers,
    find_cluster,
    mpi_cluster,
    mpi_start,
)
from tfdp.communication.cluster.gpus import gpu_environment
from tfdp.communication.cluster.launchers import LaunchedRank, mpi_rank
from tfdp.communication.cluster.mpi_cluster import ProcessPlacement, choose_hosts
from tfdp.communication.cluster.own_addresses import (
    answer_with_token,
    host_key,
    own_addresses,
    reachable_addresses,
)
from tfdp.communication.cluster.ports import reserved_ports

DEADLINE_SECONDS = 60.0
TF_CONFIG = (
    '{"cluster": {"worker": ["a:1", "b:1", "c:1"]},'
    ' "task": {"type": "worker", "index": 2}}'
)
EVALUATOR = TF_CONFIG.replace('"worker", "index": 2', '"evaluator", "index": 0')
PMI = {"PMI_SIZE": "2", "PMI_RANK": "1"}


@pytest.fixture
def environ(monkeypatch):
    """The environment without a word of a launcher, to be filled."""
    for name in list(os.environ):
        if re.match(r"TF_CONFIG|OMPI_|PMI_|PMIX_|SLURM_|CUDA_VISIBLE", name):
            monkeypatch.delenv(name)
    monkeypatch.setattr(mpi_cluster, "_agreed", [])
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "launcher", "rank", "size"),
    [
        (
            {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"},
            "MPI",
            3,
            4,
        ),
        (PMI, "MPICH", 1, 2),
        ({"PMIX_RANK": "1", "SLURM_STEP_NUM_TASKS": "8"}, "PMIx", 1, 8),
        ({"PMIX_RANK": "1", "SLURM_NTASKS": "8"}, "PMIx", 1, 8),
    ],
)
def test_the_launcher_of_each_mpi_tells_rank_and_size(variables, launcher, rank, size):
    found = mpi_rank(variables)
    assert found is not None
    assert (found.launcher, found.rank, found.size) == (launcher, rank, size)
    name, _, value = found.variable.partition("=")
    assert variables[name] == value


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"PMI_SIZE": "1", "PMI_RANK": "0"},
        {"PMI_SIZE": "2"},
        {"PMI_SIZE": "x", "PMI_RANK": "0"},
        {"PMI_SIZE": "2", "PMI_RANK": "-1"},
        {"PMIX_RANK": "0"},
    ],
)
def test_one_process_and_half_a_launcher_are_no_mpi_job(variables):
    assert mpi_rank(variables) is None


def fail(*_: Any) -> Any:
    raise AssertionError("MPI was started")


def slurm(**changes: str) -> dict[str, str]:
    return {
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_NODEID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_PROCID": "1",
        "SLURM_JOB_ID": "7",
        **changes,
    }


@pytest.mark.parametrize(
    ("variables", "workers"),
    [
        ({}, None),
        ({**PMI, "TF_CONFIG": TF_CONFIG}, 3),
        # `srun --mpi=pmi2`: what Slurm says is enough.
        ({**PMI, **slurm()}, 2),
        ({"PMIX_RANK": "1", **slurm()}, 2),
    ],
)
def test_mpi_is_not_started_where_the_cluster_is_known_without_it(
    variables, workers, environ
):
    environ.setattr(mpi_cluster, "start_job", fail)
    environ.setattr(mpi_cluster, "has_mpi4py", lambda: True)
    for name, value in variables.items():
        environ.setenv(name, value)
    cluster = find_cluster()
    assert (None if cluster is None else cluster.num_workers) == workers


@pytest.mark.parametrize(
    ("variables", "workers"),
    [
        ({}, 1),
        (PMI, 2),
        ({"TF_CONFIG": TF_CONFIG}, 3),
        ({"TF_CONFIG": EVALUATOR}, 1),
        ({**PMI, "TF_CONFIG": TF_CONFIG}, 3),
        ({"PMI_SIZE": "4", "PMI_RANK": "3", **slurm()}, 4),
    ],
)
def test_workers_are_counted_without_waiting_for_any(variables, workers, environ):
    environ.setattr(mpi_cluster, "start_job", fail)
    environ.setattr(mpi_cluster, "has_mpi4py", lambda: True)
    for name, value in variables.items():
        environ.setenv(name, value)
    assert count_workers() == workers


def test_without_mpi4py_a_rank_counts_itself_alone(environ):
    environ.setitem(sys.modules, "mpi4py", None)
    for name, value in PMI.items():
        environ.setenv(name, value)
    assert count_workers() == 1


@pytest.mark.parametrize(
    "variables",
    [
        PMI,
        {**PMI, "TF_CONFIG": "{}"},
        # mpiexec starts one process on each node by `srun`, and that one the ranks.
        {"PMI_SIZE": "4", "PMI_RANK": "3", **slurm()},
        {**PMI, **slurm(SLURM_PROCID="0", SLURM_NODEID="0")},
    ],
)
def test_the_ranks_of_mpiexec_agree_once_also_within_a_slurm_job(variables, environ):
    agreed = Cluster(("h:1", "h:2"), task_index=1)
    asked = []
    environ.setattr(mpi_cluster, "has_mpi4py", lambda: True)
    environ.setattr(mpi_cluster, "start_job", lambda seconds: asked.append(seconds))
    environ.setattr(mpi_cluster, "agree_on_cluster", lambda job, seconds: agreed)
    for name, value in variables.items():
        environ.setenv(name, value)
    assert find_cluster(5.0) == find_cluster(None) == agreed
    assert asked == [5.0]


@pytest.mark.parametrize("variables", [PMI, {**PMI, **slurm(SLURM_PROCID="0")}])
def test_without_mpi4py_the_ranks_of_mpiexec_are_apart(variables, environ):
    environ.setitem(sys.modules, "mpi4py", None)
    for name, value in variables.items():
        environ.setenv(name, value)
    assert find_cluster() is None
    with pytest.raises(ValueError, match=r"pip install tfdp\[mpi\]"):
        mpi_start.start_job()


def place(host: str, port: int, *addresses: str) -> ProcessPlacement:
    return ProcessPlacement(host, addresses, port, "token", ())


def test_ranks_of_one_host_meet_on_loopback():
    places = [place("a", 1, "10.0.0.1"), place("a", 2, "10.0.0.1")]
    assert choose_hosts(places, [{}, {}]) == ["127.0.0.1", "127.0.0.1"]


def test_each_host_gets_the_first_address_that_all_other_hosts_reach():
    bridge, lan = "172.17.0.1", ("10.0.0.1", "10.0.0.2", "10.0.0.3")
    places = [
        place("a", 1, bridge, lan[0]),
        place("b", 1, bridge, "192.168.1.2", lan[1]),
        place("a", 2, bridge, lan[0]),
        place("c", 1, bridge, lan[2]),
    ]
    views: list[dict[str, list[str]]] = [
        {"1": ["192.168.1.2", lan[1]], "3": [lan[2]]},
        {"0": [lan[0]], "3": [lan[2]]},
        {},
        {"0": [lan[0]], "1": [lan[1]]},
    ]
    assert choose_hosts(places, views) == [lan[0], lan[1], lan[0], lan[2]]


def test_a_host_that_another_one_does_not_reach_is_named():
    places = [place("a", 1, "10.0.0.1"), place("b", 9, "10.0.0.2", "10.1.0.2")]
    with pytest.raises(ValueError, match="The host of rank 1 has no address") as caught:
        choose_hosts(places, [{"1": []}, {"0": ["10.0.0.1"]}])
    text = str(caught.value)
    assert "the host of rank 0 reached the fewest" in text
    assert text.endswith("Received: addresses 10.0.0.2, 10.1.0.2, port 9")


def test_an_address_is_reached_only_if_the_process_itself_answers_there():
    with (
        reserved_ports(2) as (ports, (here, other)),
        answer_with_token(here) as token,
        answer_with_token(other) as other_token,
    ):
        found = reachable_addresses(
            {
                1: (["127.0.0.1", "::1"], ports[0], token),
                2: (["127.0.0.1"], ports[0], other_token),
                3: (["127.0.0.1"], ports[1], other_token),
            }
        )
    assert found[1][0] == "127.0.0.1"
    assert found[2] == []
    assert found[3] == ["127.0.0.1"]
    # Nothing is left of it: TensorFlow listens there next.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ports[0]), 1.0)


def test_ports_that_are_reserved_are_given_to_nobody_else():
    with reserved_ports(1) as ([port], [held]):
        assert held.getsockname()[1] == port
        with pytest.raises(OSError):
            socket.create_server(("127.0.0.1", port))


def test_own_addresses_are_those_that_other_hosts_understand():
    for address in own_addresses():
        assert not re.match(r"127\.|169\.254\.|::1$|fe80", address)
    assert host_key() == host_key()


def test_the_gpus_of_a_host_are_divided_between_its_ranks(environ):
    environ.setenv("CUDA_VISIBLE_DEVICES", "")
    gpus = ("0", "1", "2", "3")
    places = [
        ProcessPlacement("a", (), 1, "", gpus),
        ProcessPlacement("b", (), 1, "", gpus),
        ProcessPlacement("a", (), 2, "", gpus),
    ]
    chosen = []
    for rank in range(3):
        environ.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        mpi_cluster._divide_gpus(rank, places)
        chosen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
    # The rank that is alone on its host keeps all.
    assert chosen == ["0,1", None, "2,3"]
    assert gpu_environment(0, 3, ("0", "1")) == {}


def test_gpus_that_the_launcher_has_divided_stay_so(environ):
    environ.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    places = [
        ProcessPlacement("a", (), 1, "", ("0", "1")),
        ProcessPlacement("a", (), 2, "", ("2", "3")),
    ]
    mpi_cluster._divide_gpus(1, places)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.parametrize(
    ("launcher", "vendor"), [("MPI", "MPICH"), ("MPICH", "Open MPI")]
)
def test_the_mpi_of_another_launcher_is_refused_before_it_starts(
    launcher, vendor, environ
):
    environ.setattr(mpi_start, "_configuration", lambda: "")
    own = LaunchedRank(launcher, "SIZE=2", 0, 2)
    with pytest.raises(ValueError, match=f"mpi4py has loaded {vendor} 1.2, and") as e:
        mpi_start._check_library(own, vendor, f"{vendor} 1.2")
    assert str(e.value).endswith("Received: SIZE=2")


def test_an_mpi_that_does_not_see_the_other_processes_is_refused():
    own = LaunchedRank("MPICH", "PMI_SIZE=4", 0, 4)
    with pytest.raises(ValueError, match="the processes do not see each other"):
        mpi_start._check_size(own, 1, "MPICH 1.2")


# With MPI itself.


def run(num_ranks: int, mode: str, **environment: str) -> Any:
    return run_ranks(
        num_ranks,
        "-m",
        "tests.cluster.mpi_agreement",
        mode,
        deadline_seconds=DEADLINE_SECONDS,
        **environment,
    )


@needs_mpi
@pytest.mark.processes
@pytest.mark.parametrize("mode", ["all", "mpi_is_theirs"])
def test_the_ranks_of_a_job_agree_on_their_addresses(mode):
    finished = run(3, mode)
    found = sorted(answers(finished), key=lambda answer: answer["rank"])
    assert finished.code == 0, finished.output
    assert [answer["rank"] for answer in found] == [0, 1, 2]
    assert all(answer["workers"] == found[0]["workers"] for answer in found)
    assert all(answer["is_stable"] for answer in found)
    assert all(answer["secret"] is None for answer in found)
    assert len(set(found[0]["workers"])) == 3
    assert all(worker.startswith("127.0.0.1:") for worker in found[0]["workers"])


@needs_mpi
@pytest.mark.processes
@pytest.mark.parametrize(("mode", "num_answers"), [("dies", 2), full("comes_not", 1)])
def test_a_job_that_fails_leaves_no_shared_memory_and_no_file_of_another(
    mode, num_answers
):
    other = Path("/dev/shm", f"mpich_shm_{uuid.uuid4().hex[:8]}_0")
    other.write_text("another job's")
    try:
        finished = run(2, mode)
        assert finished.code != 0
        found = answers(finished)
        assert len(found) == num_answers, finished.output
        memory = {name for answer in found for name in answer["memory"]}
        assert len(memory) == (0 if is_open_mpi() else 1)
        assert not any(os.path.exists(name) for name in memory)
        assert other.read_text() == "another job's"
    finally:
        other.unlink()


def _is_mapped_by_nobody(name: str) -> bool:
    """Whether a file of MPICH's is no running job's; other tests may run beside."""
    maps = [_text_of(path) for path in Path("/proc").glob("[0-9]*/maps")]
    return name.startswith("mpich_shm_") and not any(name in text for text in maps)


def _text_of(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:  # it has just ended
        return ""


@needs_mpi
@pytest.mark.processes
@pytest.mark.full
def test_a_rank_that_does_not_start_mpi_ends_the_job_in_time_with_a_sentence():
    before = set(os.listdir("/dev/shm"))
    finished = run(2, "has_no_mpi")
    assert finished.code != 0
    left = set(os.listdir("/dev/shm")) - before
    assert not [name for name in left if _is_mapped_by_nobody(name)]
    assert "tfdp: Waited 4 s for MPI to start (rank 0 of 2)" in finished.output


@needs_mpi
@pytest.mark.processes
@pytest.mark.full
def test_a_rank_that_makes_no_strategy_is_named_in_time():
    finished = run(2, "comes_not")
    (answer,) = answers(finished)
    assert answer["error"] == "TimeoutError"
    assert answer["text"].startswith("Rank 1 of the MPI job did not create a strategy")
    assert answer["seconds"] < 15.0
    assert finished.code != 0


@needs_mpi
@pytest.mark.processes
@pytest.mark.full
def test_an_mpi_library_that_cannot_be_loaded_is_said_in_a_sentence():
    finished = run_command(
        *(sys.executable, "-m", "tests.cluster.mpi_agreement", "all"),
        deadline_seconds=DEADLINE_SECONDS,
        environment={**PMI, "MPI4PY_LIBMPI": "/there/is/no/libmpi.so"},
    )
    (answer,) = answers(finished)
    assert answer["error"] == "ValueError"
    assert answer["text"].startswith("mpi4py cannot load an MPI library (")


@needs_mpi
@pytest.mark.processes
@pytest.mark.full
def test_an_mpi_that_allows_one_thread_only_is_refused():
    finished = run(2, "funneled")
    assert finished.code != 0
    for answer in answers(finished):
        assert "Received: level 'funneled' of " in answer["text"]


@needs_mpi
@pytest.mark.processes
@pytest.mark.full
def test_ranks_that_run_different_programs_are_told_so(tmp_path):
    for name in ("train.py", "serve.py"):
        program = "from tests.cluster.mpi_agreement import main; main()"
        (tmp_path / name).write_text(program, "utf-8")
    finished = run_ranks(
        1,
        str(tmp_path / "train.py"),
        "all",
        *(":", "-n", "1", sys.executable, str(tmp_path / "serve.py"), "all"),
        deadline_seconds=DEADLINE_SECONDS,
    )
    assert finished.code != 0
    said = "Received: rank 0 runs 'train.py', rank 1 runs 'serve.py'"
    assert any(answer["text"].endswith(said) for answer in answers(finished))


@needs_mpi
@pytest.mark.processes
@pytest.mark.full
@pytest.mark.skipif(
    bool(why_not()) or not is_open_mpi(), reason="needs Open MPI, which has slots"
)
def test_more_ranks_than_slots_are_refused_by_the_launcher():
    count = 64 * (os.cpu_count() or 1)
    finished = run_ranks(
        count,
        *("-m", "tests.cluster.mpi_agreement", "all"),
        deadline_seconds=DEADLINE_SECONDS,
        is_strict=True,
    )
    assert finished.code != 0
    assert "not enough slots" in finished.output
    assert not answers(finished)
