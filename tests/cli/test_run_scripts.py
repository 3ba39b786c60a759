"""`tfdp run`: scripts, modules, arguments and bad input."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time
import zipfile

import click
import pytest

from tests.cli.launcher import DEADLINE_SECONDS, ROOT, lines_of
from tests.harness.tiers import full
from tfdp.launch.cli import main
from tfdp.launch.cli.program import check_program

pytestmark = pytest.mark.processes


def test_arguments_after_the_script_are_the_scripts_own(launcher):
    launcher.script("print(sys.argv[1:])")
    arguments = ["-n", "7", "--timeout", "x", "--", "--help", "-m", "", "a b", "*"]
    for separator in ([], ["--"]):
        result = launcher.run("-n", "1", *separator, "script.py", *arguments)
        assert lines_of(result.stdout, 0) == [str(arguments)]


def test_a_module_is_run_as_python_m_does(launcher):
    (launcher.folder / "package").mkdir()
    launcher.script("print(__name__, sys.argv[1:])", "package/job.py")
    result = launcher.run("-n", "2", "-m", "package.job", "--epochs", "3", "-m")
    assert result.returncode == 0, result.stdout
    assert lines_of(result.stdout, 1) == ["__main__ ['--epochs', '3', '-m']"]


BAD_INPUT = [
    (["-n", "0", "script.py"], "Received: 0"),
    (["-n", "-1", "script.py"], "Received: -1"),
    (["-n", "two", "script.py"], "Received: two"),
    (["-n", "1000000", "script.py"], "CPU cores. Received: -n 1000000"),
    (["-n", "1.5", "script.py"], "Received: 1.5"),
    (["-n", "2", "-D", "0", "script.py"], "Received: 0"),
    (["-n", "2", "--devices-per-worker", "x", "script.py"], "Received: x"),
    (["-n", "2", "--timeout", "-1", "script.py"], "Received: -1"),
    (["-n", "2", "--timeout", "nan", "script.py"], "Received: nan"),
    (["-n", "2", "--timeout", "soon", "script.py"], "Received: soon"),
    (["-n", "2", "missing.py"], "Received: missing.py"),
    (["-n", "2", "-m", "no_such_module.x"], "Received: no_such_module.x"),
    (["-n", "2", "-m", ".x"], "Received: .x"),
    (["-n", "2", "."], "Received: ."),
    (["-n", "2", "--log-dir", "script.py/logs", "script.py"], "script.py/logs"),
    (["-n", "2", "--log-dir", "script.py", "script.py"], "Received: script.py"),
    (["-n", "2", "--log-dir", "", "script.py"], "with --log-dir. Received: ''"),
    (["script.py"], "-n"),
    (["-n", "2"], "SCRIPT"),
    (["-n", "2", "--no-such-option", "script.py"], "--no-such-option"),
    (["-np", "2", "script.py"], "Give the number of workers with -n. Received: -np"),
    (["--nproc-per-node=2", "script.py"], "with -n. Received: --nproc-per-node"),
    (["-np2", "script.py"], "with -n. Received: -np2"),
    (["--nproc_per_node", "2", "script.py"], "Received: --nproc_per_node"),
    (["--np", "2", "script.py"], "with -n. Received: --np"),
    (["--gpus", "2", "script.py"], "with -n. Received: --gpus"),
    (["--timeout", "9", "-H", "a,b", "script.py"], "with --hosts HOST:N,HOST:N. Re"),
    (["-Ha,b", "script.py"], "Give the machines with --hosts"),
    (["--hostfile", "missing", "script.py"], "the hostfile cannot be read"),
    (["--nnodes=2", "script.py"], "Give the number of machines with --nodes"),
    (["--master_port=29500", "script.py"], "address of node 0 with --rendezvous. Rec"),
    (["--rdzv-backend=c10d", "script.py"], "address of node 0 with --rendezvous"),
    (["--standalone", "script.py"], "Remove it"),
    (["-n", "2", "-m", "script.py"], "remove -m for a path. Received: script.py"),
    (["-n", "2"], "See `tfdp run --help`."),
]


@pytest.mark.parametrize(
    ("arguments", "words"),
    # Each starts a process.
    [BAD_INPUT[0], *(full(*case) for case in BAD_INPUT[1:-1]), BAD_INPUT[-1]],
)
def test_bad_input_gets_one_sentence_and_code_2_at_once(launcher, arguments, words):
    launcher.script("pathlib.Path('started').touch()")
    start = time.monotonic()
    result = launcher.run(*arguments, stderr=subprocess.PIPE)
    assert time.monotonic() - start < 10
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("tfdp: error: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr
    assert not (launcher.folder / "started").exists()


NO_SCRIPTS = {
    "a b.ipynb": (
        b'{"cells": []}',
        "--to script 'a b.ipynb'`, or train in the notebook",
    ),
    "job.sh": (b'#!/bin/sh\npython x.py "$@"\n', 'in line 2, `python x.py "$@"`. '),
    "binary": (b"\x7fELF\0\0\0\1" * 9, "null bytes. Received: binary"),
    "latin.py": (b"print('\xff')", "'utf-8' codec can't decode byte 0xff"),
    "wrong.py": (b"import os\ndef f(:\n    pass\n", "in line 2, `def f(:`. "),
}


@pytest.mark.parametrize("name", NO_SCRIPTS)
def test_a_file_that_is_no_script_is_told_before_any_worker_starts(
    tmp_path, monkeypatch, name
):
    content, words = NO_SCRIPTS[name]
    monkeypatch.chdir(tmp_path)
    pathlib.Path(name).write_bytes(content)
    with pytest.raises(click.UsageError) as error:
        check_program(name, is_module=False)
    assert words in error.value.message
    assert error.value.message.endswith(f". Received: {name}")
    assert "\n" not in error.value.message


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.py", b""),
        ("no suffix", b"print(1)"),
        ("warns.py", b'print("\\d")'),
        ("latin.py", b"# coding: latin-1\nprint('\xff')"),
        ("bytes.pyc", b"\0\0"),
    ],
)
def test_what_python_can_run_is_let_through(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    check_program(str(tmp_path / name), is_module=False)
    archive = tmp_path / f"{name}z"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("__main__.py", content)
    check_program(str(archive), is_module=False)
    reader, writer = os.pipe()
    with open(reader) as pipe:
        os.write(writer, b"print(")
        os.close(writer)
        check_program(f"/dev/fd/{reader}", is_module=False)
        assert pipe.read() == "print("  # nothing is taken from a pipe


def test_the_standard_input_is_refused_which_is_empty_for_workers():
    for script in ("-", "/dev/stdin"):
        with pytest.raises(click.UsageError, match="is the standard input, which"):
            check_program(script, is_module=False)


def test_what_has_no_end_is_not_read(tmp_path):
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(2**40)
    for path, words in (("/dev/zero", "is a device"), (file.name, "than 16 MiB")):
        with pytest.raises(click.UsageError, match=words):
            check_program(path, is_module=False)


def test_a_script_in_the_place_of_a_command_is_told_how_to_run_it(capsys):
    with pytest.raises(SystemExit) as stopped:
        main.main(["train.py", "--epochs", "3"])
    assert stopped.value.code == 2
    assert "by `tfdp run -n 2 train.py`" in capsys.readouterr().err


# Processes of `spawn` import the script again, and so need the guard.
SPAWNS = """
import multiprocessing
def work(queue):
    queue.put(__name__)
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    print("child", queue.get())
    process.join()
"""


def test_a_script_may_have_any_name_no_guard_and_start_processes(launcher):
    launcher.script("print('plain', __name__)", "my scrípt ü.py")
    result = launcher.run("-n", "2", "my scrípt ü.py")
    assert lines_of(result.stdout, 1) == ["plain __main__"]
    launcher.script(SPAWNS)
    result = launcher.run("-n", "2", "script.py")
    assert result.returncode == 0
    assert lines_of(result.stdout, 0) == lines_of(result.stdout, 1)
    assert lines_of(result.stdout, 0) == ["child __mp_main__"]


def test_the_command_line_imports_no_tensorflow_nor_numpy():
    code = (
        "import sys, tfdp.launch.cli.main, tfdp.launch.cli.run; "
        "sys.exit(bool({'tensorflow', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--version"], "tfdp "),
        full(["--help"], "doctor"),
        full([], "doctor"),
        (["run", "--help"], "--log-dir"),
    ],
)
def test_python_m_tfdp_is_the_command(arguments, words):
    result = subprocess.run(
        [sys.executable, "-m", "tfdp", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert result.returncode == 0
    assert words in result.stdout
