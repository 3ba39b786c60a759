"""Options for islands: which fit together, and what each launcher needs."""

from __future__ import annotations

import json
import socket

import pytest
from click.testing import CliRunner

from tfdp.communication.cluster import Cluster
from tfdp.features.islands.island import Island
from tfdp.launch.cli.main import cli

HUB = ["--hub", "a:29500"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (HUB, "--hub requires --islands"),
        (["--num-islands", "4"], "--num-islands requires --islands"),
        (["--first-island", "2"], "--first-island requires --islands"),
        (["--islands", "--rebalance"], "combined with --rebalance: remove it"),
        (["--islands", "--min-workers", "1"], "combined with --min-workers"),
        (["--islands", "--grow-after", "9"], "combined with --grow-after"),
        (["--islands", "--hosts", "a:1,b:1"], "with --hub"),
        (["--islands", "--nodes", "2", "--rendezvous", "a"], "with --hub"),
        (["--islands", "--hub", "a"], "it must be HOST:PORT. Received: a"),
        (["--islands", "--num-islands", "1"], "Received: --num-islands 1,"),
        (["--islands", "--num-islands", "4"], "need --hub HOST:PORT"),
    ],
)
def test_options_that_do_not_fit_get_one_sentence(
    tmp_path, monkeypatch, arguments, words
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TFDP_JOB_SECRET_FILE", raising=False)
    (tmp_path / "script.py").touch()
    number = [] if "--hosts" in arguments else ["-n", "2"]
    result = CliRunner().invoke(cli, ["run", *number, *arguments, "script.py"])
    assert result.exit_code == 2, result.output
    assert words in result.output.splitlines()[-1]


def test_a_hub_needs_a_secret_and_a_free_port(launcher):
    launcher.script("pass")
    taken = socket.create_server(("127.0.0.1", 0))
    hub = f"127.0.0.1:{taken.getsockname()[1]}"
    arguments = ["-n", "1", "--islands", "--hub", hub, "script.py"]
    launcher.environment.pop("TFDP_JOB_SECRET_FILE", None)
    result = launcher.run(*arguments)
    assert result.returncode == 2
    assert "--hub needs TFDP_JOB_SECRET_FILE" in result.stdout
    secret = launcher.folder / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    launcher.environment["TFDP_JOB_SECRET_FILE"] = str(secret)
    with taken:
        result = launcher.run(*arguments)
    assert result.returncode == 2
    port = hub.partition(":")[2]
    assert f"cannot listen at 127.0.0.1, port {port}" in result.stdout


def test_an_island_is_read_as_it_was_written():
    config = json.loads(Cluster(("a:1",)).to_tf_config())
    assert Island.from_environment({"TF_CONFIG": json.dumps(config)}) is None
    written = Island(1, 3, "h:29500", "secret")
    written.add_to(config)
    environ = {"TF_CONFIG": json.dumps(config)}
    assert Island.from_environment(environ) == written
    assert Cluster.from_environment(environ) == Cluster(("a:1",))
    assert "secret" not in repr(written)


@pytest.mark.parametrize(
    "changes",
    [
        {"index": 3},
        {"index": -1},
        {"index": "1"},
        {"count": True},
        {"hub": "h"},
        {"secret": ""},
        {"more": 1},
    ],
)
def test_an_island_that_cannot_be_is_refused(changes):
    entry = {"index": 1, "count": 3, "hub": "h:1", "secret": "s", **changes}
    environ = {"TF_CONFIG": json.dumps({"tfdp": {"island": entry}})}
    with pytest.raises(ValueError, match=r"island|host:port"):
        Island.from_environment(environ)
