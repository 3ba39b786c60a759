"""Options for several machines: which fit together, and what hosts may look like."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from tfdp.launch.cli.hosts import Host, parse_hosts, read_hostfile
from tfdp.launch.cli.main import cli
from tfdp.launch.cli.node_options import (
    DEFAULT_PORT,
    RendezvousAddress,
    parse_rendezvous,
)

NODES = ["-n", "1", "--nodes", "2"]
HOSTS = ["--hosts", "a:1,b:1"]
ELASTIC = ["-n", "1", "--nodes", "1:2", "--rendezvous", "a:1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (NODES, "need --rendezvous HOST:PORT"),
        ([*NODES, "--rendezvous", "a", "--node-rank", "2"], "must be from 0 to 1."),
        ([*NODES, "--rendezvous", "a", "--node-rank", "-1"], "Received: -1"),
        ([*NODES, "--rendezvous", "a:0"], "it must be HOST:PORT"),
        ([*NODES, "--rendezvous", "a:99999"], "Received: a:99999"),
        ([*NODES, "--rendezvous", "http://a:1"], "it must be HOST:PORT"),
        ([*NODES, "--rendezvous", ""], "it must be HOST:PORT"),
        (["-n", "1", "--nodes", "0"], "at least 1. Received: 0"),
        (["-n", "1", "--nodes", "4:1"], "MIN:MAX such as 1:4, of at least 1"),
        (["-n", "1", "--nodes", "0:2"], "Received: 0:2"),
        (["-n", "1", "--nodes", "1:"], "Received: 1:"),
        (["-n", "1", "--nodes", "1:2"], "need --rendezvous HOST:PORT"),
        ([*ELASTIC, "--node-rank", "1"], "--node-rank must be 0. Received: "),
        ([*ELASTIC, "--elastic", "1:2"], "--elastic cannot be combined with"),
        ([*ELASTIC, "--rebalance"], "--nodes MIN:MAX cannot be combined with --reb"),
        ([*ELASTIC, "--min-workers", "1"], "--min-workers needs"),
        ([*ELASTIC, "--grow-after", "1"], "cannot be combined with --grow-after"),
        ([*ELASTIC, "--islands"], "--islands cannot be combined with"),
        (["-n", "1", "--node-rank", "0"], "--node-rank needs --nodes"),
        (["-n", "1", "--rendezvous", "a"], "Received: --rendezvous a:29400"),
        (["-n", "1", "--join-timeout", "3"], "--join-timeout needs --nodes"),
        (["-n", "1", "--remote-python", "x"], "--remote-python needs --hosts"),
        (["--nodes", "2", "--rendezvous", "a"], "-n"),
        ([*NODES, "--rendezvous", "a", "--min-workers", "1"], "--min-workers needs"),
        ([*NODES, *HOSTS], "--nodes is for a command that is run on each"),
        ([*HOSTS, "--node-rank", "0"], "--node-rank is for a command"),
        ([*HOSTS, "--min-workers", "1"], "--min-workers needs"),
        (["--hosts", "a:1,a:2"], "each host must be named once"),
        (["--hosts", "A:1,me@a.:2"], "is named twice"),
        (["--hosts", "a:0"], "a host must be HOST or HOST:N"),
        (["--hosts", "a:x"], "'a:x' is not"),
        (["--hosts", "a,,b"], "'' is not"),
        (["--hosts", "-oProxyCommand=x"], "is not"),
        (["--hosts", "a b"], "is not"),
        (["--hosts", "localhost:1,b:1"], "must have a name by which the others"),
        (["--hostfile", "missing"], "the hostfile cannot be read: No such file"),
        (["--hostfile", "."], "the hostfile cannot be read: it is a folder"),
        ([*HOSTS, "--hostfile", "hosts"], "Give --hosts or --hostfile, not both"),
    ],
)
def test_options_that_do_not_fit_get_one_sentence(
    tmp_path, monkeypatch, arguments, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    (tmp_path / "hosts").write_text("a\n")
    result = CliRunner().invoke(cli, ["run", *arguments, "script.py"])
    assert result.exit_code == 2, result.output
    sentence = result.output.splitlines()[-1]
    assert words in sentence
    is_named = "Missing option" in sentence or "cannot be combined" in sentence
    assert "Received: " in sentence or is_named


@pytest.mark.parametrize("late", ["-n", "-n2", "--num-workers=2"])
def test_a_number_of_workers_after_the_script_is_told_apart(
    tmp_path, monkeypatch, late
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    result = CliRunner().invoke(cli, ["run", "script.py", late, "2"])
    assert result.exit_code == 2
    assert f"come before the script. Received: {late} after it" in result.output


def test_hosts_have_a_user_an_address_and_a_number_of_workers():
    assert parse_hosts("a:4, me@node-1.site:2,[fd00::1]:3,10.0.0.1") == (
        Host("a", None, 4),
        Host("node-1.site", "me", 2),
        Host("fd00::1", None, 3),
        Host("10.0.0.1", None, None),
    )
    assert parse_hosts("me@a")[0].target == "me@a"


def test_a_hostfile_has_comments_and_the_slots_of_open_mpi(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# ours\n\na:4  # the fast one\nb slots=2\nme@c\n")
    assert read_hostfile(str(path)) == (
        Host("a", None, 4),
        Host("b", None, 2),
        Host("c", "me", None),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# none\n", "the hostfile names no host"),
        ("a:1\nb c d\n", "line 2 of the hostfile: a host must be HOST or HOST:N"),
        ("a:1\na:2\n", "'a' is named twice"),
    ],
)
def test_a_hostfile_that_is_wrong_is_told_with_its_line(tmp_path, text, words):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        read_hostfile(str(path))


def test_the_port_of_the_rendezvous_may_be_left_out():
    assert parse_rendezvous("a") == RendezvousAddress("a", DEFAULT_PORT)
    assert str(parse_rendezvous("[fd00::1]:7")) == "[fd00::1]:7"


@pytest.mark.parametrize("text", ["[fe80::1%eth0]:7", "[FE80::1]"])
def test_an_address_that_needs_an_interface_is_no_rendezvous(text):
    with pytest.raises(ValueError, match="another machine on each network interface"):
        parse_rendezvous(text)
