"""Starts a job under `tfdp run`, and kills its workers while it trains."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.storm.figures import Attempt, Kill, read_attempts

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("train.py")
POLL_SECONDS = 0.1
# A worker that is killed again is back by then, and not long enough to be stable.
AGAIN_SECONDS = 6.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is trained, and who kills its workers how often.

    Args:
        num_workers: Int.
        epochs: Int.
        step_seconds: Float, how long a step is made to last.
        save_freq: Int, steps between two backups, or 0 for no backups.
        every: Two floats, the least and the most seconds between two kills, or `None`
            for none.
        seed: Int, of who is killed when.
        most_kills: Int or `None` for no limit.
        kills_again: Bool, whether every other worker that was killed is killed once
            more when it is back, so that the launcher leaves it out.
        options: Tuple of strings, further options of `tfdp run`.
        dropout: Float.
        steps_per_epoch: Int.
    """

    num_workers: int
    epochs: int
    step_seconds: float = 0.0
    save_freq: int = 0
    every: tuple[float, float] | None = None
    seed: int = 1
    most_kills: int | None = None
    kills_again: bool = False
    options: tuple[str, ...] = ()
    dropout: float = 0.1
    steps_per_epoch: int = 120


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run of a job came to.

    Args:
        code: Int, the launcher's exit code.
        seconds: Float.
        losses: List of floats, by epoch; empty if training did not end.
        hash: String, of the weights, or `""`.
        kills: List of `Kill`.
        attempts: List of `Attempt`.
        history: String, what the launcher has noted of restarts.
        output: String, the end of what was printed.
    """

    code: int
    seconds: float
    losses: list[float]
    hash: str
    kills: list[Kill]
    attempts: list[Attempt]
    history: str
    output: str


def run(plan: Plan, folder: Path) -> Run:
    """Trains to the end, and leaves no process behind.

    Args:
        plan: `Plan`.
        folder: Path of a folder that is empty or not there.

    Returns:
        `Run`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.time()
    with open(folder / "output", "w+", errors="replace") as output:
        launcher = subprocess.Popen(
            _command(plan, folder),
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            kills = _kill_again_and_again(plan, launcher, folder)
        finally:
            # It is asked, not killed: so it ends its workers.
            launcher.terminate()
            launcher.wait()
        printed = (folder / "output").read_text(errors="replace")
    path = folder / "result.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    history = folder / "logs" / "restarts.log"
    return Run(
        launcher.returncode,
        time.time() - begin,
        result.get("losses", []),
        result.get("hash", ""),
        kills,
        read_attempts(folder),
        history.read_text() if history.exists() else "",
        printed[-3000:],
    )


def _command(plan: Plan, folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "tfdp", "run", "-n", str(plan.num_workers)),
        *("--max-restarts", "1000", "--log-dir", str(folder / "logs")),
        *plan.options,
        *(str(SCRIPT), str(folder), json.dumps(dataclasses.asdict(plan))),
    ]


def _environment() -> dict[str, str]:
    own = {name: text for name, text in os.environ.items() if name != "TF_CONFIG"}
    return own | {
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def _kill_again_and_again(
    plan: Plan, launcher: subprocess.Popen, folder: Path
) -> list[Kill]:
    """Kills a random worker now and then, until the launcher ends."""
    draw = random.Random(plan.seed)
    kills: list[Kill] = []
    if plan.every is None:
        launcher.wait()
        return kills
    last, pause = time.time(), draw.uniform(*plan.every)
    while launcher.poll() is None:
        time.sleep(POLL_SECONDS)
        if time.time() - last < pause or len(kills) == plan.most_kills:
            continue
        workers = _workers(launcher.pid, folder)
        # Between two attempts there is nobody.
        if not workers:
            continue
        rank = draw.choice(sorted(workers))
        is_again = plan.kills_again and len(kills) % 3 == 2
        if is_again and kills[-1].rank in workers:
            rank = kills[-1].rank
        with contextlib.suppress(psutil.Error):
            workers[rank].kill()
            last = time.time()
            kills.append(Kill(last, rank))
            is_next_again = plan.kills_again and len(kills) % 3 == 2
            pause = AGAIN_SECONDS if is_next_again else draw.uniform(*plan.every)
    return kills


def _workers(launcher: int, folder: Path) -> dict[int, psutil.Process]:
    """The worker processes that train, by rank, which they have written themselves.

    The environment of a fork shows that of its launcher.
    """
    found = {}
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(launcher).children(recursive=True):
            path = folder / f"{process.pid}.rank"
            with contextlib.suppress(psutil.Error, OSError):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found[int(path.read_text())] = process
    return found
