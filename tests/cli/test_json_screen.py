"""`tfdp run --log-format json`: each line of the output is a JSON object."""

from __future__ import annotations

import datetime
import json
import subprocess

import pytest

from tests.cli.launcher import DEADLINE_SECONDS, logs_of
from tests.cli.nodes import Nodes, ended
from tests.cli.test_ssh import launcher as ssh_launcher  # noqa: F401  a fixture
from tests.harness.tiers import full
from tfdp.launch.cli.screen import JsonScreen

pytestmark = pytest.mark.processes

JSON = ("--log-format", "json")
FIELDS = ["time", "level", "stream", "node", "rank", "message"]
# What a worker may write, and the messages that become of it.
OUTPUT = r"""
write = sys.stdout.buffer.write
write(b"par"), sys.stdout.flush(), time.sleep(0.2), write(b"tial\n\n")
write(b"1/3\r2/3\r\x1b[1m3/3\x1b[0m\n")
write(b'latin \xe9, "quoted" \xc3\xa9\x00\n{"own": 1}\n')
write(b"  indented  \nno end"), sys.stdout.flush()
"""
MESSAGES = [
    *("partial", "", "3/3"),
    *('latin \ufffd, "quoted" \xe9\x00', '{"own": 1}', "  indented", "no end"),
]
FAILS = """
pathlib.Path(f"ready-{RANK}").touch()
wait_for("ready-0"), wait_for("ready-1")
if RANK == 1:
    print("Traceback (most recent call last):", flush=True)
    sys.exit(7)
time.sleep(600)
"""


def entries(output: str) -> list[dict]:
    found = [json.loads(line) for line in output.splitlines()]
    for entry in found:
        assert list(entry) == FIELDS
        assert datetime.datetime.fromisoformat(entry["time"]).utcoffset() is not None
    return found


def messages_of(found: list[dict], rank: int) -> list[str]:
    return [
        entry["message"]
        for entry in found
        if entry["stream"] == "worker" and entry["rank"] == rank
    ]


def failure_in(found: list[dict]) -> dict:
    """The one sentence about what has failed."""
    (failure,) = [e for e in found if "failed with exit code 7" in e["message"]]
    assert failure["stream"] == "launcher"
    assert failure["level"] == "error"
    assert failure["rank"] == 1
    assert failure["message"].startswith("tfdp: worker 1 ")
    return failure


def run(launcher, *arguments: str) -> tuple[int, list[dict], list[dict]]:
    done = launcher.run(*arguments, *JSON, "script.py", stderr=subprocess.PIPE)
    return done.returncode, entries(done.stdout), entries(done.stderr)


def test_what_a_worker_writes_is_a_message_as_it_is_in_its_log(launcher):
    launcher.script(OUTPUT)
    code, output, words = run(launcher, "-n", "2")
    assert code == 0
    logs = logs_of(launcher.folder)
    for rank in range(2):
        assert messages_of(output, rank) == MESSAGES
        assert logs[rank].read_text("utf-8").split("\n")[:-1] == MESSAGES
    assert {(e["stream"], e["level"], e["node"]) for e in output} == {
        ("worker", None, 0)
    }
    assert {(e["stream"], e["level"], e["rank"]) for e in words} == {
        ("launcher", "info", None)
    }


def test_the_failing_worker_is_named_and_no_line_is_repeated(launcher):
    # On a screen the error of both is told once, and the last lines are repeated.
    error = 'print("Traceback (most recent call last):\\nValueError: 3", flush=True)'
    launcher.script(f"{error}\n{FAILS}")
    code, output, words = run(launcher, "-n", "2")
    assert code == 7
    assert messages_of(output, 0)[:2] == messages_of(output, 1)[:2]
    assert messages_of(output, 1)[1] == "ValueError: 3"
    assert len(messages_of(output, 1)) == 3
    assert failure_in(words) == words[-1]
    assert all("Traceback" not in entry["message"] for entry in words)
    launcher.assert_nothing_is_left()


@pytest.mark.full
def test_each_node_writes_its_number(tmp_path):
    nodes = Nodes(tmp_path)
    try:
        nodes.script(OUTPUT + FAILS)
        started = nodes.start_both("-n", "1", *JSON, "script.py")
        for rank, process in enumerate(started):
            code, output = ended(process)
            found = entries(output)
            assert code == 7
            assert messages_of(found, rank)[: len(MESSAGES) - 1] == MESSAGES[:-1]
            assert not messages_of(found, 1 - rank)
            assert failure_in(found)["node"] == rank
            assert {e["node"] for e in found if e["stream"] == "worker"} == {rank}
    finally:
        nodes.close()


@pytest.mark.full
def test_hosts_write_on_one_terminal(ssh_launcher):  # noqa: F811
    ssh_launcher.script('print("\\0" * 60_000)' + OUTPUT + FAILS)
    code, output, words = run(ssh_launcher, "--hosts", "chatty:1,b:1")
    assert code == 7
    for rank in range(2):
        assert messages_of(output, rank)[0] == "\0" * 60_000
        assert messages_of(output, rank)[1 : len(MESSAGES)] == MESSAGES[:-1]
    assert {(e["rank"], e["node"]) for e in output} == {(0, 0), (1, 1)}
    failure_in(words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "0", *JSON, "script.py"], "Received: 0"),
        full(["-n", "2", "--log-format=json", "missing.py"], "Received: missing.py"),
        full(["-n", "2", *JSON, "--no-such-option", "script.py"], "--no-such-option"),
        full([*JSON, "script.py"], "-n"),
        full(["--hosts", "a", "--hostfile", "b", *JSON, "script.py"], "not both"),
    ],
)
def test_bad_input_is_a_line_of_json(launcher, arguments, words):
    launcher.script("")
    done = launcher.run(*arguments, stderr=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (2, "")
    (entry,) = entries(done.stderr)
    assert entry["level"] == "error"
    assert entry["message"].startswith("tfdp: error: ")
    assert words in entry["message"]


def test_an_option_of_the_script_is_its_own(launcher):
    launcher.script("")
    done = launcher.run("-n", "0", "script.py", *JSON, stderr=subprocess.PIPE)
    assert done.stderr.startswith("tfdp: error: ")
    done = launcher.run("-n", "1", "--log-format", "xml", "script.py")
    assert done.returncode == 2
    assert "'xml' is not one of 'text', 'json'" in done.stdout


def test_what_nobody_has_read_is_told_in_json(tmp_path):
    with open(tmp_path / "output", "w") as stream:
        screen = JsonScreen(stream)
        screen._output._num_dropped = 2
        screen.line(0, "after")
        assert screen.close(DEADLINE_SECONDS)
    told, after = entries((tmp_path / "output").read_text())
    assert told["level"] == "warning"
    assert "; 2 lines are only in the logs" in told["message"]
    assert after["message"] == "after"
