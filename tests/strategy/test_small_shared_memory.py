"""Workers train in a container that has hardly any shared memory of its own."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys

import pytest

from tests.harness.commands import run_command
from tests.strategy.trained import SCRIPT, check_answers

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.full]

DEADLINE_SECONDS = 120.0
# As container runtimes do: 64 MB by default, and less where somebody says so.
_SMALL = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
IN_CONTAINER = ("unshare", "--mount", "sh", "-c", _SMALL, "sh")


@functools.cache
def why_not() -> str:
    """Why `/dev/shm` cannot be made small here, or an empty string."""
    try:
        command = [*IN_CONTAINER, "true"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return done.stderr.strip()


def test_two_workers_with_64_kb_of_dev_shm_share_memory_and_train_as_one_device(
    tmp_path,
):
    if reason := why_not():
        pytest.skip(f"needs the right to mount: {reason}")
    finished = run_command(
        *IN_CONTAINER,
        *(sys.executable, "-m", "tfdp", "run", "-n", "2", "--log-dir", str(tmp_path)),
        *("-m", SCRIPT, "auto_strategy", "tells"),
        deadline_seconds=DEADLINE_SECONDS,
    )
    assert finished.code == 0, finished.output
    told = re.findall(r"communicates with workers \d by (.*)", finished.output)
    assert set(told) == {"shared memory"}
    found = [json.loads(text) for text in re.findall(r"\{.*\}", finished.output)]
    assert len(found) == 2, finished.output
    check_answers(found, num_replicas=2, backend="direct")
