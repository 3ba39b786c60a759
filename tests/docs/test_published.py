"""Published guides and tutorials on two replicas give the results of one device.

`tests/docs/published/` says which pages, and in what the programs differ from them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.docs.published.bed import NUM_REPLICAS, SUMMED
from tests.harness.commands import ROOT, run_command, run_python
from tests.harness.compare import assert_equal_results, assert_same_on_all_workers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.processes,
    pytest.mark.timeout(600),
]
DEADLINE_SECONDS = 240
PACKAGE = "tests/docs/published"
PROGRAMS = sorted(
    path.stem
    for path in (ROOT / PACKAGE).glob("*.py")
    if path.stem.endswith(("_guide", "_tutorial"))
)
# Of float64: what differs by less is the order of sums.
LARGEST_ERROR = 1e-9


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Runs a program on one device, once: `reference(program)`."""
    done: dict[str, dict] = {}

    def run(program: str) -> dict:
        if program not in done:
            done[program] = run_alone("one", program, tmp_path_factory.mktemp(program))
        return done[program]

    return run


def run_alone(kind: str, program: str, folder: Path) -> dict:
    finished = run_python(
        "-m", f"{PACKAGE.replace('/', '.')}", kind, program, str(folder),
        deadline_seconds=DEADLINE_SECONDS,
    )  # fmt: skip
    assert finished.code == 0, finished.output[-5000:]
    return results(folder, 0)


def results(folder: Path, rank: int) -> dict:
    return dict(np.load(folder / f"results-{rank}.npz"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_two_devices_of_a_process_match_one_device(program, reference, tmp_path):
    found = run_alone("devices", program, tmp_path)
    assert_equal_results(found, reference(program), LARGEST_ERROR)


@pytest.mark.parametrize("program", PROGRAMS)
def test_two_workers_match_one_device(program, reference, tmp_path):
    finished = run_command(
        sys.executable, "-m", "tfdp", "run", "-n", str(NUM_REPLICAS),
        "--log-dir", str(tmp_path / "log"),
        f"{PACKAGE}/__main__.py", "workers", program, str(tmp_path),
        deadline_seconds=DEADLINE_SECONDS,
        environment={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert finished.code == 0, finished.output[-5000:]
    found = [results(tmp_path, rank) for rank in range(NUM_REPLICAS)]
    summed = {
        name: sum(result.pop(name) for result in found)
        for name in list(found[0])
        if name.startswith(SUMMED)
    }
    assert_same_on_all_workers(found)
    assert_equal_results(found[0] | summed, reference(program), LARGEST_ERROR)
