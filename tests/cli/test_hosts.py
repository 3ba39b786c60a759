"""`tfdp run` on two hosts with an `sshd` each: training, and faults of every kind."""

from __future__ import annotations

import collections.abc
import contextlib
import json
import pathlib
import re
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.cli.launcher import PRELUDE
from tests.cli.nodes import ended, read_until
from tests.cli.sshd_bed import (
    DEADLINE_SECONDS,
    FAULTS,
    NAMED,
    WAITS,
    SshdBed,
    sshd_bed,
    strike,
    why_not,
)
from tests.cli.test_island_launchers import SCRIPT as ISLAND
from tests.harness.commands import HEEDING, ROOT, run_python

# Nothing else makes hosts while other tests look for what is left of them.
PROCESS_GROUP = "hosts"
pytestmark = [pytest.mark.full, pytest.mark.processes, pytest.mark.slow]

SCRIPT = "tests/cli/train_on_hosts.py"
# A connection that is silent is given up after 15 s, by ssh and by the launchers.
STOPS_WITHIN_SECONDS = 45.0


@pytest.fixture(scope="module")
def bed(
    tmp_path_factory: pytest.TempPathFactory,
) -> collections.abc.Iterator[SshdBed]:
    if reason := why_not():
        pytest.skip(reason)
    with sshd_bed(tmp_path_factory.mktemp("hosts")) as bed:
        yield bed


@pytest.fixture(scope="module")
def weights() -> list[np.ndarray]:
    """What one device learns."""
    done = run_python(SCRIPT, "alone", deadline_seconds=DEADLINE_SECONDS)
    return weights_in(done.output, num_replicas=1)


@contextlib.contextmanager
def shared_secret(bed: SshdBed) -> collections.abc.Iterator[None]:
    """Give both hosts a secret in a file."""
    secret = bed.folder / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    bed.environment["TFDP_JOB_SECRET_FILE"] = str(secret)
    yield
    del bed.environment["TFDP_JOB_SECRET_FILE"]


def weights_in(output: str, num_replicas: int) -> list[np.ndarray]:
    found = re.findall(r"WEIGHTS (\d+) (\[.*\])", output)
    assert len(found) == 1, output
    assert int(found[0][0]) == num_replicas
    return [np.array(weight) for weight in json.loads(found[0][1])]


def assert_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        scale = max(np.abs(other).max(), 1e-3)
        assert np.abs(one - other).max() / scale <= 1e-5


def test_two_commands_train_as_one_device_does(bed: SshdBed, weights):
    line = ("--nodes", "2", "--rendezvous", f"{bed.bed.addresses[0]}:29400")
    script = str(ROOT / SCRIPT)
    with shared_secret(bed):
        first = bed.start(0, *line, "-n", "2", script)
        second = bed.start(1, *line, "-n", "1", script)
        outputs = [ended(process, DEADLINE_SECONDS) for process in (first, second)]
    assert [code for code, _ in outputs] == [0, 0], outputs
    assert_equal(weights_in(outputs[0][1], num_replicas=3), weights)
    bed.wait_until_empty(0.5)


def test_one_command_over_ssh_trains_as_one_device_does(bed: SshdBed, weights):
    hosts = bed.folder / "hosts"
    hosts.write_text("host0 slots=1  # the first\nhost1:2\n")
    process = bed.start(0, "--hostfile", str(hosts), str(ROOT / SCRIPT))
    code, output = ended(process, DEADLINE_SECONDS)
    assert code == 0, output
    assert_equal(weights_in(output, num_replicas=3), weights)
    assert min(bed.bed.bytes_sent()) > 10_000
    bed.wait_until_empty(5.0)


def test_the_commands_of_the_tutorial_train_on_both_hosts(bed: SshdBed):
    page = (ROOT / "docs/tutorials/two_machines.md").read_text("utf-8")
    script = re.search(r"<!-- file: train.py -->\n```python\n(.*?)```", page, re.S)
    assert script
    folder = bed.folder / "tutorial"
    folder.mkdir()
    (bed.folder / "train.py").write_text(script[1], "utf-8")
    found = re.findall(r"^tfdp run (--(?:nodes|hosts) .*)$", page, re.M)
    nodes, hosts = (line.replace("/mnt/shared", str(folder)).split() for line in found)
    nodes[nodes.index("a")] = bed.bed.addresses[0]
    hosts[hosts.index("a:1,b:1")] = "host0:1,host1:1"
    with shared_secret(bed):
        started = [bed.start(host, *nodes) for host in range(2)]
        outputs = [ended(process, DEADLINE_SECONDS) for process in started]
    outputs.append(ended(bed.start(0, *hosts), DEADLINE_SECONDS))
    assert [code for code, _ in outputs] == [0, 0, 0], outputs
    for _, output in (outputs[0], outputs[2]):
        assert "[worker 0] 2 replicas" in output
        assert "1 all-reduce of 19,240 bytes over 2 replicas" in output
    assert (folder / "digits.keras").exists()
    bed.wait_until_empty(5.0)


def test_two_hosts_of_sagemaker_train_as_one_device_does(bed: SshdBed, weights):
    hosts = list(bed.bed.addresses)
    started = [
        subprocess.Popen(
            [*bed.bed.enter(host), *HEEDING, sys.executable, str(ROOT / SCRIPT)],
            env=bed.environment
            | {"SM_HOSTS": json.dumps(hosts), "SM_CURRENT_HOST": hosts[host]},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in range(2)
    ]
    outputs = [ended(process, DEADLINE_SECONDS) for process in started]
    assert [code for code, _ in outputs] == [0, 0], outputs
    assert_equal(weights_in(outputs[0][1], num_replicas=2), weights)
    assert "WEIGHTS" not in outputs[1][1]
    bed.wait_until_empty(0.5)


def test_training_goes_on_after_a_worker_was_killed_and_ends_as_one_device_does(
    bed: SshdBed, weights
):
    folder = bed.folder / "saved"
    folder.mkdir()
    line = ("--hosts", "host0:1,host1:1", "--max-restarts", "1")
    process = bed.start(0, *line, str(ROOT / SCRIPT), str(folder))
    code, output = ended(process, DEADLINE_SECONDS)
    assert code == 0, output
    assert output.count("restart 1 of 1: worker 1 was killed by SIGKILL") == 1
    assert (folder / "has died").exists()
    assert_equal(weights_in(output, num_replicas=2), weights)
    bed.wait_until_empty(5.0)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_ends_all_and_leaves_nothing(bed: SshdBed, name: str):
    code, output, seconds, left_seconds = strike(bed, name)
    _, expected, words = FAULTS[name]
    assert code == expected, output
    assert not words or len(re.findall(words, output)) == 1, output
    assert output.count("were stopped") == (name in NAMED)
    assert seconds < STOPS_WITHIN_SECONDS
    # Who lost its terminal without a word notices by the silence at the latest.
    assert left_seconds < STOPS_WITHIN_SECONDS


def test_a_network_that_is_cut_ends_two_commands(bed: SshdBed):
    (bed.folder / "waits.py").write_text(WAITS)
    line = ("--nodes", "2", "--rendezvous", f"{bed.bed.addresses[0]}:29400")
    with shared_secret(bed):
        started = [bed.start(host, *line, "-n", "1", "waits.py") for host in range(2)]
    for host, process in enumerate(started):
        read_until(process, f"[worker {host}] ready")
    bed.set_link("down")
    begin = time.monotonic()
    try:
        outputs = [ended(process) for process in started]
    finally:
        bed.set_link("up")
    assert time.monotonic() - begin < STOPS_WITHIN_SECONDS
    assert [code for code, _ in outputs] == [69, 69]
    assert "node 1 (" in outputs[0][1]
    assert "was lost: it has not answered for 15 s" in outputs[0][1]
    assert "node 0 at 10.77.0.1:29400 has not answered for 15 s" in outputs[1][1]
    bed.wait_until_empty(0.5)


def test_a_hub_that_is_cut_off_ends_the_islands_of_both_hosts(bed: SshdBed):
    # A minute each, of the launcher and in an island.
    silence = "from tfdp.features.islands import hub_connection as hub\n"
    silence += "hub.SILENT_SECONDS = 4\n"
    silence += "hub.BEAT_SECONDS = 0.5\n"
    (bed.folder / "island.py").write_text(f"{PRELUDE}{silence}{ISLAND}")
    address = f"{bed.bed.addresses[0]}:29410"
    line = ["run", "-n", "1", "--islands", "--hub", address, "--num-islands", "2"]
    started = []
    with shared_secret(bed):
        for host in range(2):
            arguments = [*line, "--first-island", str(host), "island.py"]
            code = (
                f"{silence}from tfdp.launch.cli.main import main\nmain({arguments!r})"
            )
            started.append(bed.start_python(host, code))
    for host, process in enumerate(started):
        read_until(process, f"[worker {host}] has met 2")
    bed.set_link("down")
    begin = time.monotonic()
    try:
        read_until(started[0], "tfdp: island 1 is lost: neither it nor its launcher")
        (bed.folder / "is-over-0").touch()
        outputs = [ended(process) for process in started]
    finally:
        bed.set_link("up")
    assert time.monotonic() - begin < STOPS_WITHIN_SECONDS
    assert [code for code, _ in outputs] == [0, 1], outputs
    assert "is through" in outputs[0][1]
    assert "is suspended, or is cut off from the network" in outputs[1][1]
    bed.wait_until_empty(0.5)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        ({"key": "other_key"}, "host[01] requires a password or a key that ssh"),
        (
            {"known": "no_hosts"},
            "The host key of host[01] is not known, or has",
        ),
    ],
)
def test_an_ssh_that_would_ask_is_an_error_at_once(bed: SshdBed, use, words):
    bed.use(**use)
    try:
        begin = time.monotonic()
        code, output = ended(bed.start(0, "--hosts", "host0:1,host1:1", SCRIPT))
    finally:
        bed.use()
    assert code == 2
    assert len(re.findall(f"tfdp: error: {words}", output)) == 1, output
    assert time.monotonic() - begin < 30
    bed.wait_until_empty(5.0)


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ("host0:1,nosuchhost.invalid:1", "The host name nosuchhost.invalid does not"),
        ("host0:1,10.77.0.9:1", "10.77.0.9 cannot be reached by ssh (ssh: connect"),
    ],
)
def test_a_host_that_is_not_there_is_named(bed: SshdBed, hosts: str, words: str):
    (bed.folder / "waits.py").write_text(WAITS)
    code, output = ended(bed.start(0, "--hosts", hosts, "waits.py"))
    assert code == 2
    assert f"tfdp: error: {words}" in output
    bed.wait_until_empty(5.0)


def test_a_host_without_tfdp_or_without_the_folder_is_named(bed: SshdBed):
    bad = {
        "/usr/bin/env": "exited with code|has no tfdp",
        "/no/python": "has no Python at /no/python",
    }
    for python, words in bad.items():
        line = ("--hosts", "host0:1,host1:1", "--remote-python", python, "waits.py")
        code, output = ended(bed.start(0, *line))
        assert code == 2
        assert len(re.findall(f"tfdp: error: .*({words})", output)) == 1, output
    bed.wait_until_empty(5.0)


def test_what_is_kept_on_the_hosts_are_the_logs_alone(bed: SshdBed):
    folder = pathlib.Path(bed.folder) / "kept"
    folder.mkdir()
    (bed.folder / "says.py").write_text("print('hello')")
    process = bed.start(
        0, "--hosts", "host0:1,host1:1", "--log-dir", str(folder), "says.py"
    )
    assert ended(process)[0] == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        "worker-0.log",
        "worker-1.log",
    ]
