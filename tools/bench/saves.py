"""Saves and restores: their pauses, and steps while a save is written; DCP beside."""

from __future__ import annotations

import json
import re
import statistics
import sys

from tfdp.launch.bench.machine import torch_version
from tools.bench.report import Arguments, Figure, Report
from tools.bench.start import run_script

DEADLINE_SECONDS = 600.0
# What worker 0 of a script of this benchmark prints at its end.
SECONDS = re.compile("seconds: ({.*})")
# Width and number of dense layers, by millions of parameters; three float32 of each are
# saved: the weight and both slots of Adam.
SIZES = {20: (1826, 6), 100: (4082, 6)}
MAX_PAUSE, MAX_STEP, MAX_RESTORE = 1.5, 1.03, 0.2


def run(args: Arguments) -> None:
    """Measure two workers that each save half of the state, whole and sharded."""
    torch = torch_version(args.torch_python)
    setting = {
        "benchmark": "saves of two workers, medians of worker 0",
        "model": "6 dense layers with Adam",
        "torch": torch or "none",
    }
    report = Report(args, setting)
    ours = [sys.executable, "-m", "tfdp", "run", "-n", "2", "saves_worker.py"]
    for millions, (units, layers) in SIZES.items():
        size = [str(units), str(layers), str(args.blocks)]
        for kind in ("whole", "sharded"):
            name = f"{millions} million, {kind}"
            found = _measure([*ours, *size, kind])
            _add_ours(report, name, found)
            _add_memory(report, name, found)
        if torch:
            launcher = [args.torch_python, "-m", "torch.distributed.run"]
            theirs = [*launcher, "--nproc-per-node=2", "saves_torch_worker.py"]
            for kind in ("thread", "process"):
                found = _measure([*theirs, *size, kind])
                _add_theirs(report, f"{millions} million, DCP by a {kind}", found)
    report.finish()


def _add_ours(report: Report, name: str, found: dict[str, list[float]]) -> None:
    """Report what a worker of tfdp has measured, in seconds."""
    keys = ("copy", "pause", "foreground", "step", "step_while_saving")
    copy, pause, foreground, step, saving = _medians(found, *keys)
    first = found["pause_in_fit"][0]
    note = f"copy {1e3 * copy:.0f} ms, pause {1e3 * pause:.0f} ms"
    note += f", the first {1e3 * first:.0f} ms"
    ratio = round(pause / copy, 2)
    report.add(Figure(f"pause in copies, {name}", ratio, at_most=MAX_PAUSE, note=note))
    processor, duration = _medians(found, "processor", "duration")
    note = f"{1e3 * processor:.0f} of {1e3 * duration:.0f} ms"
    ratio = round(processor / duration, 2)
    report.add(Figure(f"share of a processor in a save, {name}", ratio, note=note))
    note = f"{1e3 * foreground:.0f} ms"
    ratio = round(foreground / copy, 1)
    report.add(Figure(f"save in the foreground in copies, {name}", ratio, note=note))
    ratio = round(saving / step, 3)
    count = len(found["step_while_saving"]) / len(found["pause_in_fit"])
    note = f"step {1e3 * step:.0f} ms, a save of {count:.0f} steps"
    report.add(
        Figure(f"step while it saves, {name}", ratio, at_most=MAX_STEP, note=note)
    )


def _add_memory(report: Report, name: str, found: dict[str, list[float]]) -> None:
    """Report what a worker of tfdp has measured of states in memory, in seconds."""
    keys = ("copy", "memory_pause", "from_cache", "from_disk", "from_memory")
    copy, pause, cache, disk, memory = _medians(found, *keys)
    note = f"{1e3 * pause:.0f} ms"
    ratio = round(pause / copy, 2)
    report.add(Figure(f"pause in memory in copies, {name}", ratio, note=note))
    for place, seconds in (("disk", disk), ("disk in the page cache", cache)):
        note = f"{1e3 * memory:.0f} and {1e3 * seconds:.0f} ms"
        ratio = round(memory / seconds, 2)
        title = f"restore from memory to that from the {place}, {name}"
        report.add(Figure(title, ratio, at_most=MAX_RESTORE, note=note))


def _add_theirs(report: Report, name: str, found: dict[str, list[float]]) -> None:
    """Report what a worker of PyTorch has measured, in seconds."""
    keys = ("copy", "pause", "step", "step_while_saving")
    copy, pause, step, saving = _medians(found, *keys)
    note = f"copy {1e3 * copy:.0f} ms, pause {1e3 * pause:.0f} ms"
    report.add(Figure(f"pause in copies, {name}", round(pause / copy, 2), note=note))
    note = f"step {1e3 * step:.0f} ms"
    report.add(
        Figure(f"step while it saves, {name}", round(saving / step, 3), note=note)
    )


def _medians(found: dict[str, list[float]], *keys: str) -> list[float]:
    """Return the median of what was measured under each key."""
    return [statistics.median(found[key]) for key in keys]


def _measure(command: list[str]) -> dict[str, list[float]]:
    """Run a command with a script of this folder; return what its worker 0 prints."""
    return json.loads(run_script(command, SECONDS, DEADLINE_SECONDS)[-1])
