"""`tfdp run --hosts`, with an `ssh` that starts local processes."""

from __future__ import annotations

import collections.abc
import contextlib
import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys

import psutil
import pytest

from tests.cli.launcher import (
    DEADLINE_SECONDS,
    IGNORE_SIGNALS,
    STOPS_WITHIN_SECONDS,
    Launcher,
    lines_of,
)
from tests.cli.nodes import ended, read_until
from tests.cli.test_nodes import FAILS, SECOND_TIME, WAITS
from tests.harness.timing import wait_until
from tfdp.communication.cluster import free_ports
from tfdp.launch.cli.hosts import Host
from tfdp.launch.cli.remote_line import BEAT, order
from tfdp.launch.cli.ssh import describe_failure, ssh_command

pytestmark = pytest.mark.processes

# What it is given is kept; a line for each call.
SSH = """#!/bin/sh
echo "$@" >> calls
if [ "$1" = "-G" ]; then echo "hostname 127.0.0.1"; exit 0; fi
for last; do :; done
case "$*" in
    *" lost "*) echo "ssh: Could not resolve hostname lost: Name not known" >&2
        exit 255;;
    *" closed "*) echo "me@closed: Permission denied (publickey,password)." >&2
        exit 255;;
    *" held "*) sleep 60 & ;;
    *" chatty "*) echo "Welcome to chatty!"; echo '{"news": 1}';;
esac
exec sh -c "$last"
"""


@pytest.fixture
def launcher(tmp_path) -> collections.abc.Iterator[Launcher]:
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(SSH)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    launcher = Launcher(tmp_path)
    launcher.environment["PATH"] = f"{program.parent}:{os.environ['PATH']}"
    yield launcher
    launcher.close()


@pytest.mark.full
def test_all_hosts_show_their_workers_on_one_terminal(launcher):
    launcher.script("print(json.dumps([CONFIG, sys.argv[1:]]))")
    arguments = ["-D", "2", "--rebalance", "script.py", "a b", "-n", "$HOME"]
    result = launcher.run("--hosts", "chatty:2,me@b", "-n", "1", *arguments)
    assert result.returncode == 0, result.stdout
    found = [json.loads(lines_of(result.stdout, rank)[0]) for rank in range(3)]
    addresses = found[0][0]["cluster"]["worker"]
    assert len(set(addresses)) == 3
    for rank, (config, own) in enumerate(found):
        assert config["cluster"]["worker"] == addresses
        assert config["task"]["index"] == rank
        assert config["tfdp"]["devices_per_worker"] == 2
        assert config["tfdp"]["rebalance"] is True
        assert own == ["a b", "-n", "$HOME"]
    assert "Welcome" not in result.stdout
    calls = (launcher.folder / "calls").read_text()
    assert "BatchMode=yes" in calls
    assert "ConnectTimeout=10" in calls
    assert " me@b " in calls
    # The secret is 32 of these.
    assert not re.search("[0-9a-f]{32}", calls)
    launcher.assert_nothing_is_left()


@pytest.mark.full
def test_arguments_longer_than_a_pipe_holds_reach_all_hosts(launcher):
    launcher.script("print(len(sys.argv), sum(map(len, sys.argv)))")
    words = ["x" * 50_000] * 6
    result = launcher.run("--hosts", "a:1,b:1", "script.py", *words)
    assert result.returncode == 0, result.stdout[-2000:]
    expected = f"7 {300_000 + len('script.py')}"
    assert lines_of(result.stdout, 0) == lines_of(result.stdout, 1) == [expected]


@pytest.mark.full
def test_arguments_that_no_host_would_read_are_told(launcher):
    launcher.script("")
    words = ["x" * 100_000] * 11
    result = launcher.run("--hosts", "a:1,b:1", "script.py", *words)
    assert result.returncode == 2
    assert "are too long for --hosts: pass them in a file" in result.stdout
    assert re.search(r"Received: 1,100,\d{3} bytes", result.stdout)


@pytest.mark.full
def test_a_worker_that_fails_ends_all_hosts_with_one_sentence(launcher):
    launcher.script(FAILS)
    result = launcher.run("--hosts", "a:2,b:1", "script.py", "2")
    assert result.returncode == 7
    assert result.stdout.count("worker 2 on node 1 (") == 1
    assert result.stdout.count("were stopped") == 1
    launcher.assert_nothing_is_left()


@pytest.mark.full
def test_all_hosts_start_again_together(launcher):
    # Neither ends before the other has said its word.
    launcher.script(
        """
        tries = len(list(pathlib.Path(".").glob(f"try-{RANK}-*")))
        print("try", flush=True)
        pathlib.Path(f"try-{RANK}-{tries}").touch()
        wait_for(f"try-0-{tries}"), wait_for(f"try-1-{tries}")
        sys.exit(3)
        """
    )
    result = launcher.run("--hosts", "a:1,b:1", "--max-restarts", "1", "script.py")
    assert result.returncode == 3
    assert lines_of(result.stdout, 0) == lines_of(result.stdout, 1) == ["try"] * 2
    assert result.stdout.count("restart 1 of 1") == 1
    assert result.stdout.count("were stopped") == 2
    launcher.assert_nothing_is_left()


@pytest.mark.full
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_hosts(launcher, signum):
    launcher.script(WAITS)
    process = launcher.start("--hosts", "a:1,b:1", "script.py")
    output = read_until(process, "] ready")
    output += read_until(process, "] ready")
    process.send_signal(signum)
    code, rest = ended(process)
    assert code == 128 + signum
    assert f"{signum.name} received" in rest
    assert "was lost" not in rest
    launcher.assert_nothing_is_left()


@pytest.mark.full
def test_a_second_ctrl_c_kills_on_all_hosts_at_once(launcher):
    launcher.script(IGNORE_SIGNALS + WAITS)
    process = launcher.start("--hosts", "a:1,b:1", "--grace", "600", "script.py")
    read_until(process, "] ready")
    read_until(process, "] ready")
    process.send_signal(signal.SIGINT)
    read_until(process, "SIGINT received")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2.0)
    process.send_signal(signal.SIGINT)
    code, output = ended(process, STOPS_WITHIN_SECONDS)
    assert code == 130, output
    launcher.assert_nothing_is_left()


@pytest.mark.full
def test_nothing_is_left_when_the_terminals_launcher_is_killed(launcher):
    launcher.script(WAITS)
    process = launcher.start("--hosts", "a:1,b:1", "script.py")
    read_until(process, "] ready")
    read_until(process, "] ready")
    process.kill()
    process.wait()
    launcher.assert_nothing_is_left(within_seconds=STOPS_WITHIN_SECONDS)


SILENT = """
from tfdp.launch.cli import remote
remote.SILENT_SECONDS = 1.0
remote.main()
"""


@pytest.mark.full
def test_a_connection_that_is_silent_ends_what_runs_behind_it(launcher):
    launcher.script(WAITS)
    process = subprocess.Popen(
        [sys.executable, "-c", SILENT],
        cwd=launcher.folder,
        env=launcher.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    place = f"127.0.0.1:{free_ports(1)[0]}"
    words = ["run", "--nodes", "1", "--rendezvous", place, "-n", "1", "script.py"]
    process.stdin.write(order(words, "0123456789abcdef", 5.0))
    process.stdin.flush()

    def is_ready() -> bool:
        process.stdin.write(BEAT)
        process.stdin.flush()
        return (launcher.folder / "ready-0").exists()

    wait_until(is_ready, "a worker", DEADLINE_SECONDS)
    # The pipe stays open, as that of an sshd whose network has gone.
    assert process.wait(STOPS_WITHIN_SECONDS) == 128 + signal.SIGHUP
    launcher.assert_nothing_is_left()
    process.stdin.close()
    process.stdout.close()


@pytest.mark.full
@pytest.mark.parametrize("host", [0, 1])
def test_a_host_that_is_killed_is_named_and_ends_all(launcher, host):
    launcher.script(WAITS)
    process = launcher.start("--hosts", "a:1,b:1", "script.py")
    read_until(process, "] ready")
    read_until(process, "] ready")
    launchers_of(process.pid)[host].kill()
    code, output = ended(process)
    assert code in (69, 137)
    assert output.count("were stopped") == 1
    launcher.assert_nothing_is_left(within_seconds=STOPS_WITHIN_SECONDS)


@pytest.mark.full
# The other has a process of ssh's that holds its output open, as a ProxyCommand may.
@pytest.mark.parametrize("host", ["b", "held"])
def test_a_host_that_was_lost_is_started_again_and_joins(launcher, host):
    launcher.script(SECOND_TIME)
    line = ("--hosts", f"a:1,{host}:1", "--max-restarts", "1", "script.py")
    process = launcher.start(*line)
    read_until(process, "] waits")
    read_until(process, "] waits")
    launchers_of(process.pid)[1].kill()
    code, output = ended(process)
    assert code == 0, output
    for rank in range(2):
        assert lines_of(output, rank)[-1] == "done 2"
    assert f"the connection to {host} was lost; its launcher is started again" in output
    assert output.count("restart 1 of 1: worker 1 was lost with node 1 (") == 1
    if host != "held":
        launcher.assert_nothing_is_left()


def launchers_of(pid: int) -> list[psutil.Process]:
    """The launchers of the hosts, in their order."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):
            if "tfdp.launch.cli.remote" in child.cmdline():
                found.append(child)
    return sorted(found, key=lambda child: child.pid)


@pytest.mark.full
@pytest.mark.parametrize(
    ("hosts", "options", "words"),
    [
        ("a:1,lost:1", (), "The host name lost does not resolve here (ssh: Could"),
        ("a:1,closed:1", (), "closed requires a password or a key that ssh does"),
        ("a:1", ("--remote-python", "/no/python"), "a has no Python at /no/python"),
    ],
)
def test_a_host_that_cannot_be_used_is_told_at_once(launcher, hosts, options, words):
    launcher.script(WAITS)
    result = launcher.run("--hosts", hosts, *options, "script.py")
    assert result.returncode == 2
    assert f"tfdp: error: {words}" in result.stdout
    assert result.stdout.count("tfdp: error: ") == 1
    launcher.assert_nothing_is_left(within_seconds=STOPS_WITHIN_SECONDS)


@pytest.mark.full
def test_a_host_with_another_version_or_no_tfdp_is_told(launcher):
    launcher.script(WAITS)
    python = launcher.folder / "python"
    for body, words in (
        ('echo \'{"tfdp": "9.9"}\'; exec sleep 30', "has tfdp 9.9, this machine has"),
        (f'exec {sys.executable} -I -S "$@"', "has no tfdp, or another version"),
    ):
        python.write_text(f"#!/bin/sh\n{body}\n")
        python.chmod(0o700)
        line = ("--hosts", "a:1,b:1", "--remote-python", str(python), "script.py")
        result = launcher.run(*line)
        assert result.returncode == 2, result.stdout
        assert re.search(f"tfdp: error: [ab] {words}", result.stdout), result.stdout
    launcher.assert_nothing_is_left(within_seconds=STOPS_WITHIN_SECONDS)


def test_without_ssh_the_user_is_told_so(launcher):
    launcher.script(WAITS)
    launcher.environment["PATH"] = str(launcher.folder)
    result = launcher.run("--hosts", "a:1,b:1", "script.py")
    assert result.returncode == 2
    assert "need the command ssh, which is not installed" in result.stdout


def test_the_command_of_ssh_quotes_what_it_carries():
    command = ssh_command(
        Host("b", "me"), "/my python", "/it's", {"PYTHONPATH": "/x y"}
    )
    assert command[0] == "ssh"
    assert command[-2] == "me@b"
    assert command[-1].startswith("exec sh -c ")
    said = shlex.split(shlex.split(command[-1])[-1].replace(";", " ; "))
    assert said[:2] == ["cd", "/it's"]
    assert said[-5:] == [
        "PYTHONPATH=/x y",
        "exec",
        "/my python",
        "-m",
        "tfdp.launch.cli.remote",
    ]


@pytest.mark.parametrize(
    ("code", "said", "words"),
    [
        (255, ["Host key verification failed."], "The host key of b is not known"),
        (255, ["connect to host b port 22: Connection timed out"], "cannot be reached"),
        (255, [], "b cannot be reached by ssh (no reason given)"),
        (96, [], "b has no folder /work"),
        (126, ["Permission denied"], "b has no Python at python"),
        (
            1,
            ["ValueError: x"],
            "The launcher on b exited with code 1: ValueError: x",
        ),
    ],
)
def test_what_ssh_says_is_put_into_a_sentence(code, said, words):
    assert words in describe_failure(Host("b"), code, said, "python", "/work")
