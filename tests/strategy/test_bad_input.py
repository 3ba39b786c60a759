"""Bad input at start-up: one clear sentence, on every worker, and soon."""

from __future__ import annotations

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest

from tests.harness import forks
from tests.harness.commands import ROOT, run_python
from tests.harness.forks import Answer, Start
from tests.harness.tf_config import cluster_configs
from tests.harness.tiers import full
from tests.harness.timing import wait_until

pytestmark = pytest.mark.processes

WITHIN_SECONDS = 10.0
START_TIMEOUT_SECONDS = 4.0


# What the processes do. TensorFlow is imported in them only.


def auto_strategy(**options) -> int:
    import tfdp

    communication = tfdp.CommunicationOptions(**options)
    return tfdp.auto_strategy(communication=communication).num_replicas_in_sync


def multi_worker(devices=None, **options) -> int:
    import tfdp

    communication = tfdp.CommunicationOptions(**options)
    strategy = tfdp.MultiWorkerMirroredStrategy(
        devices=devices, communication=communication
    )
    return strategy.num_replicas_in_sync


def mirrored(devices=None, logical_cpus=2, **options) -> int:
    import tfdp

    tfdp.testing.logical_cpus(logical_cpus)
    communication = tfdp.CommunicationOptions(**options)
    return tfdp.MirroredStrategy(
        devices, communication=communication
    ).num_replicas_in_sync


def multi_worker_after_tensorflow(starts: bool, **options) -> int:
    import tensorflow as tf

    if starts:
        tf.constant(1)
    return multi_worker(**options)


def logical_cpus_after_tensorflow(count: int) -> list[str]:
    import tensorflow as tf

    import tfdp

    tf.constant(1)
    return tfdp.testing.logical_cpus(count)


def logical_cpus(count) -> list[str]:
    import tfdp

    return tfdp.testing.logical_cpus(count)


def check_sentence(answer: Answer, error: str = "ValueError") -> None:
    """One sentence or few, in time, that does not quote the runtime's innards."""
    assert answer.error == error, answer
    assert answer.seconds < WITHIN_SECONDS
    assert len(answer.text) < 500
    assert "\n" not in answer.text
    assert answer.text.rstrip().endswith((".", "'", '"', "]", ")", "}")) or (
        "Received: " in answer.text
    )


def refused(*starts: Start, error: str = "ValueError") -> list[str]:
    """Runs the workers and returns what each of them was told."""
    answers = forks.run(starts, deadline_seconds=WITHIN_SECONDS)
    for answer in answers:
        check_sentence(answer, error)
    return [answer.text for answer in answers]


def config(cluster, task_type="worker", index=0) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": task_type, "index": index}})


TWO = ["localhost:2222", "localhost:2223"]
SAME = ["localhost:2222", "localhost:2222"]
# Each with the TF_CONFIG of every task that is there.
BAD_CONFIGS = {
    "not JSON": (["{'cluster': {}}"], "not valid JSON"),
    "not an object": (["[1, 2]"], "JSON object"),
    "no task": ([json.dumps({"cluster": {"worker": TWO}})], "'task' must be"),
    "index out of range": ([config({"worker": TWO}, index=2)], "from 0 to 1"),
    "negative index": ([config({"worker": TWO}, index=-1)], "from 0 to 1"),
    "two equal addresses": (
        [config({"worker": SAME}, index=0), config({"worker": SAME}, index=1)],
        "same address",
    ),
    "an unknown job": (
        [config({"workers": TWO}, "workers"), config({"workers": TWO}, "workers", 1)],
        "Received: 'workers'",
    ),
    "a parameter server": (
        [
            config({"worker": TWO, "ps": ["localhost:2224"]}),
            config({"worker": TWO, "ps": ["localhost:2224"]}, index=1),
            config({"worker": TWO, "ps": ["localhost:2224"]}, "ps"),
        ],
        "Parameter servers are not supported",
    ),
    "an address without a port": (
        [config({"worker": ["localhost", "localhost:2223"]})],
        "host:port",
    ),
}


@pytest.mark.parametrize("action", [auto_strategy, full(multi_worker)])
@pytest.mark.parametrize("what", BAD_CONFIGS)
def test_wrong_tf_config_is_refused_by_every_task(what: str, action: Callable):
    texts, expected = BAD_CONFIGS[what]
    for text in refused(*(Start(action, config) for config in texts)):
        assert expected in text


def test_a_tf_config_without_a_cluster_is_a_single_machine():
    starts = [Start(mirrored, text) for text in ("", '{"cluster": null, "task": null}')]
    answers = forks.run(starts, deadline_seconds=120.0)
    assert [(answer.value, answer.text) for answer in answers] == [(2, "")] * 2


# Workers that do not fit together.


@pytest.mark.parametrize("action", [auto_strategy, multi_worker])
def test_worker_that_never_starts_is_named_by_all_the_others(action: Callable):
    first, second = cluster_configs(2), cluster_configs(2)
    of_three = cluster_configs(3)
    options = {"timeout_seconds": START_TIMEOUT_SECONDS}
    waiting = {
        "worker 1 ": [first[0]],
        "worker 0 ": [second[1]],
        "worker 2 ": of_three[:2],
    }
    starts = [(name, text) for name, texts in waiting.items() for text in texts]
    texts = refused(
        *(Start(action, text, options) for _, text in starts), error="TimeoutError"
    )
    for (name, _), text in zip(starts, texts, strict=True):
        assert text.startswith(f"Waited {START_TIMEOUT_SECONDS:.0f} s for {name}(")
        assert len(re.findall(r"worker \d \(", text)) == 1, "only the silent one"


@pytest.mark.full
def test_worker_that_never_starts_ends_the_script_of_the_others():
    script = (
        "import tfdp\n"
        f"tfdp.auto_strategy(communication=tfdp.CommunicationOptions("
        f"timeout_seconds={START_TIMEOUT_SECONDS}))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env={**os.environ, "TF_CONFIG": text, "TF_CPP_MIN_LOG_LEVEL": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for text in cluster_configs(3)[:2]
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=150)
            assert process.returncode == 1, output
            last = output.strip().splitlines()[-1]
            assert last.startswith("TimeoutError: ")
            assert "worker 2 " in last
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_workers_that_start_late_are_waited_for():
    texts = cluster_configs(2)
    answers = forks.run(
        [
            Start(multi_worker, texts[0], {"timeout_seconds": 9.0}),
            Start(multi_worker_later, texts[1], {"seconds": 3.0}),
        ],
        deadline_seconds=2 * WITHIN_SECONDS,
    )
    assert [answer.value for answer in answers] == [2, 2]


def multi_worker_later(seconds: float) -> int:
    time.sleep(seconds)
    return multi_worker(timeout_seconds=9.0)


def test_workers_with_different_numbers_of_devices_are_refused_by_all():
    texts = cluster_configs(3, devices_per_worker=[1, 2, 1])
    for text in refused(*(Start(auto_strategy, config) for config in texts)):
        assert "worker 0 has 1 x CPU" in text
        assert "worker 1 has 2 x CPU" in text


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("bucket_mb", (25.0, 8.0)),
        full("algorithm", ("ring", "hierarchical")),
        full("compression", ("bf16", None)),
        full("uneven", ("join", "stop")),
    ],
)
def test_workers_that_disagree_on_options_are_refused_by_all(option: str, values):
    starts = [
        Start(auto_strategy, text, {option: value})
        for text, value in zip(cluster_configs(2), values, strict=True)
    ]
    for text in refused(*starts):
        assert f"different `{option}` options" in text
        assert f"worker 0 has {values[0]!r}, worker 1 has {values[1]!r}" in text


def auto_strategy_of(**versions: str) -> int:
    import keras

    from tfdp.communication.store import membership

    keras.__version__ = versions.get("Keras", keras.__version__)
    own = versions.get("tfdp", "1.0")
    membership.own_version = lambda: own
    return auto_strategy()


@pytest.mark.parametrize("name", ["Keras", "tfdp"])
def test_workers_with_different_versions_are_refused_by_all(name: str):
    starts = [
        Start(auto_strategy_of, text, {name: version})
        for text, version in zip(cluster_configs(2), ("9.1", "9.2"), strict=True)
    ]
    for text in refused(*starts):
        assert f"different {name} version: worker 0 has 9.1, worker 1 has 9.2" in text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"node_size": 3}, "must divide the number of replicas, 2"),
        ({"nodes": ["a"]}, "each of the 2 workers"),
    ],
)
def test_nodes_that_do_not_fit_the_workers_are_refused_by_all(options, expected):
    starts = [Start(auto_strategy, text, options) for text in cluster_configs(2)]
    for text in refused(*starts):
        assert expected in text


def test_port_already_taken_is_named_and_so_is_its_worker_where_others_wait():
    texts = cluster_configs(2)
    address = json.loads(texts[1])["cluster"]["worker"][1]
    port = int(address.rpartition(":")[2])
    options = {"timeout_seconds": 1.0}
    with socket.create_server(("", port)):
        starts = [Start(auto_strategy, text, options) for text in texts]
        first, second = forks.run(starts, deadline_seconds=WITHIN_SECONDS)
    check_sentence(first, "TimeoutError")
    assert f"for worker 1 ({address}), which did not start" in first.text
    check_sentence(second)
    assert f"Port {port}, on which this task has to listen" in second.text
    assert "is already taken by another process" in second.text


def train_until(folder: pathlib.Path, name: str) -> list[float]:
    """Trains, says so, and trains again once a file of each other job is there."""
    import keras

    import tfdp

    with tfdp.auto_strategy().scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    losses = []
    for _ in range(2):
        losses += model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0).history["loss"]
        (folder / name).touch()
        wait_until(lambda: len(list(folder.glob("refused*"))) == 2, seconds=60.0)
    return losses


def join_beside(folder: pathlib.Path, name: str) -> int:
    """Starts a job once the workers of another one train."""
    wait_until(lambda: len(list(folder.glob("trains*"))) == 2, seconds=60.0)
    try:
        return auto_strategy(timeout_seconds=START_TIMEOUT_SECONDS)
    finally:
        (folder / name).touch()


@pytest.mark.full
@pytest.mark.parametrize("shares_all", [True, False])
def test_a_second_job_on_a_port_says_so_and_the_first_trains_on(
    tmp_path, shares_all: bool
):
    first = cluster_configs(2)
    workers = json.loads(first[0])["cluster"]["worker"]
    port = workers[0].rpartition(":")[2]
    # Two jobs with the same TF_CONFIG, or with one port in common.
    second = first if shares_all else cluster_configs(2)
    if not shares_all:
        others = [workers[0], json.loads(second[1])["cluster"]["worker"][1]]
        second = [config({"worker": others}, index=rank) for rank in range(2)]
    starts = [
        *(
            Start(train_until, text, {"folder": tmp_path, "name": f"trains {rank}"})
            for rank, text in enumerate(first)
        ),
        *(
            Start(join_beside, text, {"folder": tmp_path, "name": f"refused {rank}"})
            for rank, text in enumerate(second)
        ),
    ]
    answers = forks.run(starts, deadline_seconds=60.0)
    for answer in answers[:2]:
        assert answer.error == "", answer
        assert answer.value[1] < answer.value[0]
    assert answers[0].value == answers[1].value
    texts = [answer.text for answer in answers[2:]]
    assert [answer.error for answer in answers[2:]] == ["ValueError"] * 2
    assert f"Port {port}, on which this task has to listen" in texts[0]
    if shares_all:
        assert "is already taken by another process" in texts[1]
    else:
        assert (
            f"Another program listens on the port of worker 0 ({workers[0]})"
            in (texts[1])
        )
        assert "whether another job uses the port" in texts[1]


# Devices.

DEVICES = {
    "does not exist": (["CPU:0", "CPU:7"], "There is no device 'CPU:7'"),
    "a GPU that is not there": (["GPU:0"], "There is no device 'GPU:0'"),
    "not a device": (["CPU:0", "abacus"], "There is no device 'abacus'"),
    "listed twice": (["CPU:0", "CPU:0"], "'CPU:0' is listed twice"),
    "listed twice in two ways": (["/cpu:0", "CPU:0"], "is listed twice"),
    "no list": ("CPU:0", "must be a list"),
    "a number": (2, "must be a list"),
    "none at all": ([], "must be a list"),
}


@pytest.mark.parametrize("what", DEVICES)
def test_wrong_devices_are_refused_by_a_mirrored_strategy(what: str):
    devices, expected = DEVICES[what]
    (text,) = refused(Start(mirrored, None, {"devices": devices}))
    assert expected in text
    assert "Received: devices=" in text


@pytest.mark.parametrize(
    "what", ["does not exist", *(full(what) for what in [*DEVICES][1:])]
)
def test_wrong_devices_are_refused_by_every_worker(what: str):
    devices, expected = DEVICES[what]
    starts = [
        Start(multi_worker, text, {"devices": devices})
        for text in cluster_configs(2, devices_per_worker=2)
    ]
    for text in refused(*starts):
        assert expected in text


def multi_worker_by_options() -> None:
    import tfdp

    tfdp.MultiWorkerMirroredStrategy(tfdp.CommunicationOptions())


def test_options_in_the_place_of_a_resolver_are_refused():
    (text,) = refused(Start(multi_worker_by_options))
    assert "Received: cluster_resolver=CommunicationOptions(" in text


def test_tensorflow_that_has_started_is_refused_before_logical_devices():
    (text,) = refused(Start(logical_cpus_after_tensorflow, None, {"count": 2}))
    assert "already started, with 1 logical CPU device, at " in text
    assert "Received: 2" in text


def test_logical_devices_that_are_there_already_are_no_error():
    (answer,) = forks.run(
        [Start(logical_cpus_after_tensorflow, None, {"count": 1})], WITHIN_SECONDS
    )
    assert answer.value == ["CPU:0"]


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_tensorflow_that_has_started_is_refused_by_every_worker(ranks: tuple[int, ...]):
    # With `backend="ring"` all workers start TensorFlow's server.
    starts = [
        Start(
            multi_worker_after_tensorflow,
            text,
            {"starts": rank in ranks, "backend": "ring"},
        )
        for rank, text in enumerate(cluster_configs(2))
    ]
    begin = f"TensorFlow has already started on worker {ranks[0]}, at "
    for text in refused(*starts):
        assert text.startswith(begin)
        assert re.search(r", at .*:\d+: `tf.constant\(1\)`\. GPUs and", text)


def auto_strategy_after_keras() -> tuple[int, list[str]]:
    import warnings

    import keras

    import tfdp

    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        replicas = tfdp.auto_strategy().num_replicas_in_sync
    return replicas, [str(w.message) for w in caught if w.filename == __file__]


def test_fewer_replicas_after_keras_was_used_are_warned_of():
    (answer,) = forks.run([Start(auto_strategy_after_keras)], WITHIN_SECONDS)
    replicas, (text,) = answer.value
    assert replicas == 1
    start = r"TensorFlow has already started, at .*:\d+: `keras.Sequential\(.*`: "
    assert re.match(start + "training uses 1 replica instead of 2", text)


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2", None])
def test_wrong_number_of_logical_devices_is_refused(count: object):
    (text,) = refused(Start(logical_cpus, None, {"count": count}))
    assert f"Received: {count!r}" in text


def test_nccl_without_gpus_is_refused_by_a_mirrored_strategy():
    (text,) = refused(Start(mirrored, None, {"backend": "nccl"}))
    assert 'backend="nccl"' in text
    assert "GPU" in text


def test_nccl_without_gpus_is_refused_by_every_worker():
    starts = [
        Start(multi_worker, text, {"backend": "nccl"}) for text in cluster_configs(2)
    ]
    for text in refused(*starts):
        assert 'backend="nccl"' in text


@pytest.mark.parametrize(
    "options",
    [{"bucket_mb": 0}, {"algorithm": "star"}, {"backend": "smoke"}, {"uneven": "pad"}],
)
def test_wrong_options_are_refused_by_every_worker(options: dict):
    for text in refused(
        *(Start(auto_strategy, text, options) for text in cluster_configs(2))
    ):
        (name, value), *_ = options.items()
        assert f"Received: {name}={value!r}" in text


def test_error_at_start_up_is_the_last_line_that_a_script_prints():
    done = run_python(
        "-c",
        "import tfdp; tfdp.CommunicationOptions(bucket_mb=0)",
        deadline_seconds=60,
    )
    assert done.code == 1
    last = done.output.strip().splitlines()[-1]
    assert last.startswith("ValueError: ")
    assert last.endswith("Received: bucket_mb=0")


def strategy_under(name: str, variables: dict[str, str]) -> list[str]:
    import os
    import sys
    import warnings

    import tfdp

    sys.modules["mpi4py"] = None  # type: ignore[assignment]  # not installed
    os.environ |= variables
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        getattr(tfdp, name)()
    return [str(w.message) for w in caught if w.filename == __file__]


@pytest.mark.parametrize("name", ["auto_strategy", "MultiWorkerMirroredStrategy"])
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "MPI has started"),
        ({"WORLD_SIZE": "4", "RANK": "1"}, "torchrun has started 4 processes"),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, ""),
        ({"WORLD_SIZE": "4", "PMI_SIZE": "x", "PMI_RANK": "0"}, ""),
    ],
)
def test_processes_of_another_launcher_that_train_apart_are_warned_of(
    variables, said, name
):
    start = Start(strategy_under, None, {"name": name, "variables": variables})
    (answer,) = forks.run([start], WITHIN_SECONDS)
    assert len(answer.value) == bool(said), answer
    assert all(text.startswith(said) for text in answer.value)
