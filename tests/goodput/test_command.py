"""`tfdp goodput`: its table, its picture, and what it says of bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.goodput.test_account import FIRST, attempt, work
from tfdp.features.goodput import ledger
from tfdp.launch.cli.goodput import goodput, goodput_of
from tfdp.launch.cli.main import main


@pytest.fixture
def backups(tmp_path) -> Path:
    """A directory of backups that is gone, and its ledger."""
    text = "".join(f"{line}\n" for line in (*FIRST, attempt(140, 540), LAST))
    (tmp_path / "backups.goodput.jsonl").write_text(text)
    return tmp_path / "backups"


LAST = work(700, (0, 51, 70), startup=8, step=152)


def show(*arguments: object) -> str:
    result = CliRunner().invoke(goodput, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def error_of(capsys, *arguments: object) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["goodput", *map(str, arguments)])
    assert caught.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    return said


def test_the_table_has_the_seconds_and_shares_of_each_class(backups):
    cells = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in show(backups).splitlines()
        if line.startswith("│")
    ]
    assert cells == [
        ["steps that count", "159.0", "79.5%"],
        ["start-up", "8.0", "4.0%"],
        ["tracing", "2.0", "1.0%"],
        ["waiting for data", "2.0", "1.0%"],
        ["exposed communication", "1.0", "0.5%"],
        ["evaluation", "5.0", "2.5%"],
        ["saves", "4.0", "2.0%"],
        ["recovery", "18.0", "9.0%"],
        ["idle", "1.0", "0.5%"],
        ["all", "200.0", "100.0%"],
    ]


def test_the_line_follows_the_table(backups):
    assert show(backups).splitlines()[-1] == (
        "goodput 80 %: 9 % one restart, 4 % start-up, 2 % evaluation, 2 % saves, "
        "1 % tracing, 1 % waiting for data."
    )


def test_exposed_communication_that_nobody_measured_is_said(backups):
    path = Path(ledger.path_beside(str(backups)))
    assert "was not measured" not in show(backups)
    path.write_text("\n".join((FIRST[0], FIRST[1], LAST)))
    assert "was not measured" in show(backups)


def test_the_json_has_all_classes(backups):
    found = json.loads(show(backups, "--json"))
    assert found["total_seconds"] == 200
    assert found["num_restarts"] == 1
    assert found["num_damaged_lines"] == 0
    assert found["measures_communication"]
    assert found["seconds"].keys() == found["share"].keys()
    assert found["share"]["step"] == 159 / 200


def test_the_picture_is_a_png(backups, tmp_path):
    path = tmp_path / "goodput.png"
    assert show(backups, "--plot", path).splitlines()[-1] == f"Written: {path}"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_gets_one_sentence(backups, monkeypatch, capsys):
    monkeypatch.setattr("tfdp.launch.bench.output.has_matplotlib", lambda: False)
    said = error_of(capsys, backups, "--plot", backups.with_suffix(".png"))
    assert "pip install 'tfdp[bench]'" in said


def test_a_ledger_is_found_by_backups_logs_and_its_own_path(backups, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    path = ledger.path_beside(str(backups))
    moved = {"kind": "moved", "format": 1, "path": path}
    (logs / "goodput.jsonl").write_text(json.dumps(moved))
    for directory in (f"{backups}/", logs, path, logs / "goodput.jsonl"):
        assert ledger.find(str(directory))[-1] == path


@pytest.mark.parametrize("moved", ["", '{"kind": "moved"}', '{"moved": {}}', "["])
def test_a_reference_that_is_damaged_leaves_the_ledger_of_the_logs(tmp_path, moved):
    path = tmp_path / "goodput.jsonl"
    path.write_text("\n".join((moved, *FIRST)))
    assert ledger.find(str(tmp_path)) == [str(path)]


@pytest.mark.parametrize("name", ["nothing", "nothing/", "s3://bucket/run"])
def test_a_directory_without_a_ledger_gets_one_sentence(name, tmp_path, capsys):
    said = error_of(capsys, name)
    assert said.startswith("tfdp: error: There is no ledger of goodput; ")
    assert said.endswith(f"Received: {name}")


@pytest.mark.parametrize("content", [b"", b"\0" * 5000, b"{}\n[]\n", b"\xff\xfe" * 90])
def test_a_ledger_that_is_wholly_damaged_gets_one_sentence(content, tmp_path, capsys):
    path = tmp_path / "goodput.jsonl"
    path.write_bytes(content)
    assert "has no line that can be read" in error_of(capsys, tmp_path)


def test_damaged_lines_are_left_out_and_counted(backups):
    path = Path(ledger.path_beside(str(backups)))
    path.write_bytes(path.read_bytes() + b"\xff\xff\n" + b"[" * 200_000)
    last = show(backups).splitlines()[-1]
    assert last.endswith(" (without 5 damaged lines of the ledger).")


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_what_is_no_file_is_no_ledger(kind, backups, tmp_path, capsys):
    path = tmp_path / "other.goodput.jsonl"
    target = ledger.path_beside(str(backups))
    path.symlink_to(target) if kind == "link" else path.mkdir()
    assert error_of(capsys, tmp_path / "other").startswith("tfdp: error: ")


def test_the_launcher_ends_as_it_would_without_a_ledger(tmp_path):
    launch = ledger.Launch.new(tmp_path)
    assert goodput_of(launch) == ""
    (tmp_path / "goodput.jsonl").write_bytes(b"\0\n{")
    assert goodput_of(launch) == ""
    (tmp_path / "goodput.jsonl").unlink()
    (tmp_path / "goodput.jsonl").symlink_to("/dev/zero")
    assert goodput_of(launch) == ""


@pytest.mark.parametrize(
    "settings",
    [None, 5, "logs", {}, {"folder": "logs"}, {"folder": "logs", "since": 5}],
    ids=repr,
)
def test_settings_that_no_launcher_has_written_are_none(settings):
    environ = {"TF_CONFIG": json.dumps({"tfdp": {"goodput": settings}})}
    assert ledger.Launch.from_environment(environ) is None
    assert ledger.Launch.from_environment({}) is None
    assert ledger.Launch.from_environment({"TF_CONFIG": "{"}) is None
