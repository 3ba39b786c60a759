"""Jobs of MPI: the launcher that belongs to this environment's mpi4py."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.commands import ROOT, Finished, run_command

_BESIDE_PYTHON = str(Path(sys.executable).parent)


@functools.cache
def why_not() -> str:
    """Why no job can be started here, or an empty string."""
    if importlib.util.find_spec("mpi4py") is None:
        return "needs mpi4py"
    if launcher() is None:
        return "needs mpiexec"
    return ""


def launcher() -> str | None:
    """Path of the launcher: that of the wheel, beside Python, comes first."""
    return shutil.which("mpiexec", path=f"{_BESIDE_PYTHON}:{os.environ['PATH']}")


@functools.cache
def is_open_mpi() -> bool:
    """Whether the launcher is Open MPI's."""
    command = [str(launcher()), "--version"]
    return "Open MPI" in subprocess.run(command, capture_output=True, text=True).stdout


# Of the ranks, beside what they inherit.
ENVIRONMENT = {
    # The tests' machine may be a container, where Open MPI wants this.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "CUDA_VISIBLE_DEVICES": "-1",
    "PYTHONPATH": str(ROOT),
}
needs_mpi = pytest.mark.skipif(bool(why_not()), reason=why_not())


def options(num_ranks: int, *, is_strict: bool = False) -> list[str]:
    """The launcher and its options: more ranks than cores, unless it is strict."""
    more = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    own = more if is_open_mpi() and not is_strict else []
    return [str(launcher()), *own, "-n", str(num_ranks)]


def run_ranks(
    num_ranks: int,
    *command: str,
    deadline_seconds: float,
    is_strict: bool = False,
    **environment: str,
) -> Finished:
    """Runs this Python with arguments as the ranks of a job."""
    return run_command(
        *options(num_ranks, is_strict=is_strict),
        sys.executable,
        *command,
        deadline_seconds=deadline_seconds,
        environment=ENVIRONMENT | environment,
    )


def answers(finished: Finished) -> list[dict[str, Any]]:
    """The lines of JSON that the ranks have printed."""
    lines = [line for line in finished.output.splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines]
