"""A process of tests that crashes ends the run, and is named."""

from __future__ import annotations

import re
import sys

import pytest

from tests.harness.commands import ROOT, run_command

# Two files more than processes, so that the last file is handed out late.
FILES, DEADLINE_SECONDS = 5, 60
FILE = """
import os, signal, time
import pytest

@pytest.mark.parametrize("number", range(3))
def test_file(number):
    time.sleep(0.1)
    if {index} == {last} and number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.full
@pytest.mark.skipif(
    not (ROOT / "tools" / "test").exists(), reason="only a checkout has it"
)
def test_a_process_that_crashes_at_the_end_of_a_run_does_not_hang_it(tmp_path):
    for index in range(FILES):
        text = FILE.format(index=index, last=FILES - 1)
        (tmp_path / f"test_{index}.py").write_text(text, "utf-8")
    script = (ROOT / "tools" / "test").read_text("utf-8")
    options = re.search(r'(-n 4 .*?) "\$@"', script)
    assert options is not None
    found = run_command(
        *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
        *options[1].split(),
        deadline_seconds=DEADLINE_SECONDS,
        folder=tmp_path,
    )
    assert found.code == 1, found.output
    assert "crashed while running 'test_4.py::test_file[1]'" in found.output
