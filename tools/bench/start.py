"""Time from the command to the first step of the last worker: tfdp run and torchrun."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tfdp.launch.bench.machine import torch_version
from tfdp.launch.bench.sides import paired_ratio
from tools.bench.report import Arguments, Figure, Report

COUNTS = (2, 4, 8, 16)
FOLDER = Path(__file__).parent
DEADLINE_SECONDS = 300.0
# What a script of this benchmark prints after its first step, by `time.time()`.
FIRST_STEP = re.compile(r"first step at (\d+\.\d+)")


def run(args: Arguments) -> None:
    """Measure the start of a small model on several numbers of workers."""
    has_torch = torch_version(args.torch_python) is not None
    setting = {
        "benchmark": "from the command to the first step of the last worker",
        "model": "two dense layers, 19 thousand parameters",
        "torch": torch_version(args.torch_python) or "none",
    }
    report = Report(args, setting)
    ours = [sys.executable, "-m", "tfdp", "run"]
    script, theirs = "start_worker.py", "start_torch_worker.py"
    for count in COUNTS:
        sides = {
            "forked": [*ours, "-n", str(count), script],
            "imported each": [*ours, "--no-fork", "-n", str(count), script],
        }
        if has_torch:
            launcher = [args.torch_python, "-m", "torch.distributed.run"]
            sides["torchrun"] = [*launcher, f"--nproc-per-node={count}", theirs]
        names = [f"{name}, {count} workers" for name in sides]
        commands = dict(zip(names, sides.values(), strict=True))
        times: dict[str, list[float]] = {name: [] for name in names}
        for block in range(args.blocks):
            for name in names if block % 2 else names[::-1]:
                times[name].append(_seconds(commands[name]))
        report.add_times(times)
        for name in names[1:]:
            ratio = paired_ratio(times[names[0]], times[name])
            report.add(Figure(f"{names[0]}, relative to {name}", ratio))
    report.finish()


def _seconds(command: list[str]) -> float:
    """Run a command to its end; return when its last worker had taken a step."""
    begin = time.time()
    # What happens at its end is not measured: torchrun fails there now and then.
    times = run_script(command, FIRST_STEP, DEADLINE_SECONDS)
    return max(map(float, times)) - begin


def run_script(
    command: list[str], wanted: re.Pattern, deadline_seconds: float
) -> list[str]:
    """Run a command with a script of this folder; return what its workers print.

    Args:
        command: List of strings, the script among them without a folder.
        wanted: Pattern with one group, which is returned for each match.
        deadline_seconds: Float, the longest time.

    Raises:
        RuntimeError: If no worker has printed it.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Python looks for modules beside a script: not for those of this folder.
        script = next(word for word in command if word.endswith("_worker.py"))
        shutil.copy(FOLDER / script, folder)
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(FOLDER.parents[1])},
            capture_output=True,
            text=True,
            timeout=deadline_seconds,
        )
    if found := wanted.findall(done.stdout):
        return found
    raise RuntimeError(f"No worker has measured: {done.stdout}{done.stderr}")
