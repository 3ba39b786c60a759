"""`tools/two_hosts`: two hosts on this machine, a slow link, and nothing left after."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.harness.commands import run_python
from tests.harness.tiers import full
from tests.harness.timing import wait_until
from tools.bench import hosts_bed
from tools.bench.hosts_bed import BedError, TwoHosts
from tools.bench.published_models import resnet50

ROOT = Path(__file__).resolve().parents[2]
# Nothing else makes hosts while these tests look for what is left of them.
PROCESS_GROUP = "hosts"
DEADLINE_SECONDS = 30
MB = 2**20
SCRIPT = str(ROOT / "tools" / "two_hosts")
SEND = """
import json, os, socket, sys, time
config = json.loads(os.environ["TF_CONFIG"])
rank, num_bytes = config["task"]["index"], int(sys.argv[1])
host, port = config["cluster"]["worker"][1].split(":")
if rank == 1:
    connection, _ = socket.create_server((host, int(port))).accept()
    begin = time.perf_counter()
    while num_bytes > 0:
        num_bytes -= len(connection.recv(1 << 20))
    print("seconds", time.perf_counter() - begin)
else:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection((host, int(port)))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    connection.sendall(bytes(num_bytes))
"""


def why_not() -> str:
    """Why there can be no hosts here, or `""`."""
    if reason := hosts_bed.missing():
        return reason
    try:
        with TwoHosts():
            return ""
    except BedError as error:  # a container may be root and still not be allowed to
        return str(error)


@pytest.fixture(scope="module")
def possible() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def run(possible, tmp_path):
    """Runs the script to its end, and checks that nothing is left behind."""

    def run_script(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, SCRIPT, "--log-dir", str(tmp_path), *arguments],
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )

    before = hosts_in_use()
    yield run_script
    assert hosts_in_use() == before


def hosts_in_use() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True)
    return {line.split()[0] for line in listed.stdout.splitlines()}


def bytes_sent(output: str) -> tuple[int, int]:
    found = re.search(r"host 0 sent ([\d,]+) bytes, host 1 sent ([\d,]+) bytes", output)
    assert found, output
    there, back = (int(number.replace(",", "")) for number in found.groups())
    return there, back


@pytest.mark.full
def test_each_worker_finds_itself_on_its_host_by_its_tf_config(run):
    show = 'echo "$TF_CONFIG"; hostname -I; cat /sys/class/net/lo/operstate'
    done = run("--devices-per-worker", "3", "--", "sh", "-c", show)
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        prefix = f"[worker {rank}] "
        lines = [line for line in done.stdout.splitlines() if line.startswith(prefix)]
        config = json.loads(lines[0].removeprefix(prefix))
        assert config["task"] == {"type": "worker", "index": rank}
        assert config["tfdp"]["devices_per_worker"] == 3
        workers = config["cluster"]["worker"]
        assert len(set(workers)) == 4
        assert workers[rank].split(":")[0] == lines[1].removeprefix(prefix).strip()
    hosts = [address.split(":")[0] for address in workers]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
    assert "exit codes of the workers: 0, 0, 0, 0" in done.stderr


@pytest.mark.full
def test_the_counters_count_a_transfer_and_the_link_holds_its_rate(run):
    num_bytes = 4 * MB
    send = ["--", sys.executable, "-c", SEND, str(num_bytes)]
    done = run("--rate", "50mbit", "--workers-per-host", "1", *send)
    assert done.returncode == 0, done.stderr
    there, back = bytes_sent(done.stderr)
    assert num_bytes <= there <= 1.08 * num_bytes
    assert back <= 0.08 * num_bytes
    # 0.67 s, less what the bucket of the limit holds.
    assert float(done.stdout.split("seconds")[1]) >= 0.5


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("exit 7", 7, "failed with exit code 7"),
        full("kill -KILL $$", 137, "was killed by SIGKILL"),
    ],
)
def test_the_first_failing_code_is_the_scripts_own(run, end, code, words):
    fail = f"case $TF_CONFIG in *'\"index\": 2'*) {end};; esac; exec sleep 60"
    done = run("--", "sh", "-c", fail)
    assert done.returncode == code
    assert f"worker 2 {words}" in done.stderr
    assert f"143, 143, {code}, 143" in done.stderr


@pytest.mark.parametrize(
    "signum", [signal.SIGTERM, full(signal.SIGINT), full(signal.SIGKILL)]
)
def test_a_signal_leaves_no_host_and_no_process_behind(possible, tmp_path, signum):
    before = hosts_in_use()
    mark = f"1000.{os.getpid()}"  # seconds, of a sleep like no other
    command = ["--log-dir", str(tmp_path), "--", "sleep", mark]
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: len(sleepers(mark)) == 4, "all workers", DEADLINE_SECONDS)
        assert len(hosts_in_use() - before) == 2
    finally:
        process.send_signal(signum)
        code = process.wait(DEADLINE_SECONDS)
    assert code == (-signum if signum == signal.SIGKILL else 128 + signum)
    # Once the script is killed, its keeper needs a moment.
    patience = 10.0 if signum == signal.SIGKILL else 0.0
    wait_until(
        lambda: hosts_in_use() == before and not sleepers(mark), "the end", patience
    )


def sleepers(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline() == ["sleep", mark]:
                found.append(process)
    return found


def test_what_runs_on_a_host_ends_with_the_bed(possible):
    with TwoHosts() as bed:
        process = subprocess.Popen([*bed.enter(1), "sleep", "1000"])
        names = set(bed.names)
        assert names <= hosts_in_use()
    assert process.wait(1.0) == -signal.SIGKILL
    assert not names & hosts_in_use()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "fast", "--", "true"], "Received: rate='fast'"),
        full(["--rate", "0mbit", "--", "true"], "Received: rate='0mbit'"),
        full(
            ["--workers-per-host", "0", "--", "true"], "--workers-per-host must be at"
        ),
        full(
            ["--devices-per-worker", "-1", "--", "true"],
            "--devices-per-worker must be",
        ),
        (["--", "no-such-command"], "Received: no-such-command"),
        full([], "There must be a command to run after --"),
    ],
)
def test_a_wrong_command_line_gets_one_sentence(run, arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]


def test_who_is_not_root_or_lacks_iproute2_is_told_so(monkeypatch):
    monkeypatch.setattr(hosts_bed.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(hosts_bed.shutil, "which", lambda name: None)
    assert hosts_bed.missing() == (
        "Two hosts on one machine need root and iproute2 (the commands ip and tc). "
        "Received: user 1000, ip and tc missing"
    )
    with pytest.raises(BedError, match="need root and iproute2"), TwoHosts():
        pass


@pytest.mark.full
@pytest.mark.slow
def test_gradients_of_a_model_cross_the_link_once_for_each_direction(
    possible, tmp_path
):
    before = hosts_in_use()
    file = tmp_path / "found.json"
    done = run_python(
        *("-m", "tools.bench", "hosts-models", "--models", "resnet50", "--blocks", "1"),
        *("--rates", "1gbit", "--workers-per-host", "1", "--out", str(file)),
        deadline_seconds=300,
    )
    assert done.code == 0, done.output
    assert hosts_in_use() == before
    content = json.loads(file.read_text("utf-8"))
    figures = {figure["name"]: figure for figure in content["figures"]}
    title = "2 x 1, 1gbit, resnet50"
    model_bytes = resnet50().num_bytes
    for backend in ("direct", "ring"):
        for algorithm in ("ring", "tree", "halving_doubling"):
            name = f"{title}, {algorithm}, {backend}"
            assert sum(content["bucket_bytes"][name]) == model_bytes
            share = figures[
                f"{name}: bytes over the link per direction, as a share of the model"
            ]
            assert 0.9 <= share["value"] <= 1.1
            bound = figures[f"{name}: throughput as a share of the link's bound"]
            assert 0 < bound["value"]["median"] < 1.1
    assert all(figure["met"] is not False for figure in content["figures"])
    assert done.output.count("; 0 elements wrong") == 6
