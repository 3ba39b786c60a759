"""A shell completes `tfdp` when Tab is pressed, and does not wait for TensorFlow."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from tests.harness.commands import ROOT
from tests.harness.tiers import full
from tfdp.launch.cli.main import cli

DEADLINE_SECONDS = 100
# What bash does when Tab is pressed behind the last word.
TAB = """
eval "$(_TFDP_COMPLETE=bash_source tfdp)"
COMP_WORDS=({words})
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_tfdp_completion tfdp "${{COMP_WORDS[-1]}}"
echo "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def complete(tmp_path) -> Callable[[str], str]:
    """What bash offers behind a command; `imports` in the folder lists what it took."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    program = tmp_path / "tfdp"
    python = shlex.quote(sys.executable)
    program.write_text(
        f"#!{bash}\nexec {python} -X importtime -m tfdp 2>>{tmp_path}/imports\n"
    )
    program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"

    def answer(words: str) -> str:
        done = subprocess.run(
            [bash, "--norc", "-c", TAB.format(words=words)],
            cwd=ROOT,
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return answer


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        full("tfdp r", "run"),
        ("tfdp run --num-w", "--num-workers"),
        full("tfdp bench compare --family t", "transformer"),
    ],
)
def test_bash_completes_and_nothing_of_tensorflow_is_loaded(
    complete: Callable[[str], str], tmp_path: Path, words: str, completed: str
):
    assert complete(words) == completed
    loaded = (tmp_path / "imports").read_text("utf-8")
    assert "tfdp.launch.cli.main" in loaded
    assert "tensorflow" not in loaded
    assert "keras" not in loaded


@pytest.mark.parametrize(
    "words",
    [
        "tfdp run -n 2 tr",
        "tfdp run -n 2 train.py da",
        "tfdp run -np 2 tr",  # of another launcher: refused when it is run
        "tfdp run --log-dir lo",
        "tfdp plan mo",
        "tfdp convert ch",
        "tfdp bench compare --plot pl",
    ],
)
def test_where_a_file_is_due_the_shell_completes_its_name(words: str):
    given = words.split()
    shell = BashComplete(cli, {}, "tfdp", "_TFDP_COMPLETE")
    (item,) = shell.get_completions(given[1:-1], given[-1])
    assert (item.value, item.type) == (given[-1], "file")
