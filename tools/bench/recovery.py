"""What kills cost a job: tfdp, torchrun and torchft on the same training and kills."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tfdp.communication.cluster.ports import free_ports
from tfdp.launch.bench.machine import torch_version
from tools.bench.recovery_record import EPOCHS, NUM_SAMPLES, NUM_STEPS, NUM_WORKERS
from tools.bench.report import Arguments, Figure, Report

FOLDER = Path(__file__).parent
DEADLINE_SECONDS, END_SECONDS = 120.0, 5.0
# The worker and the step before which it is killed, in each job.
KILLS = ((1, NUM_STEPS // 4), (0, NUM_STEPS * 5 // 8))
# Workers record the same step within this time; one that is made again comes later.
TOGETHER_SECONDS = 0.2


class Outcome(NamedTuple):
    """How a job has ended.

    Args:
        recoveries: List of floats, seconds from each kill to the next new step.
        seconds: Float, from the first step to the last.
        again: Int, steps that were made again.
        lost: Int, samples of the epochs that no update has used.
        twice: Int, samples that an epoch has used more than once.
        loss: Float, on all data after the last step.
    """

    recoveries: list[float]
    seconds: float
    again: int
    lost: int
    twice: int
    loss: float


def run(args: Arguments) -> None:
    """Kill workers of each kind of job, and compare with the same job undisturbed."""
    torch = torch_version(args.torch_python)
    setting = {
        "benchmark": "a kill to the next step, and what the result has lost",
        "model": "two dense layers, 1.2 thousand parameters, a state at each step",
        "job": f"{NUM_WORKERS} workers, {NUM_STEPS} steps, kills at {list(KILLS)}",
        "torch": torch or "none",
    }
    report = Report(args, setting)
    sides = ["tfdp --elastic", "tfdp --max-restarts"]
    if torch:
        sides += ["torchrun", "torchft"]
    undisturbed = {side: _job(side, args.torch_python, ()) for side in sides}
    found: dict[str, list[Outcome]] = {side: [] for side in sides}
    for _ in range(args.blocks):
        for side in sides:
            found[side].append(_job(side, args.torch_python, KILLS))
    for side, outcomes in found.items():
        times = sorted(t for outcome in outcomes for t in outcome.recoveries)
        mean, loss = statistics.fmean, undisturbed[side].loss
        change = max(abs(outcome.loss / loss - 1) for outcome in outcomes)
        note = (
            f"largest {times[-1]:.2f}; in a job: "
            f"{mean(o.again for o in outcomes):.1f} steps made again, "
            f"{mean(o.lost for o in outcomes):.1f} samples lost, "
            f"{mean(o.twice for o in outcomes):.1f} used twice, "
            f"final loss changed by {100 * change:.1g} %"
        )
        name = f"{side}: median of {len(times)} kills to the next new step, s"
        report.add(Figure(name, statistics.median(times), note=note))
        report.keep("outcomes", side, [outcome._asdict() for outcome in outcomes])
        report.keep("undisturbed", side, undisturbed[side]._asdict())
    report.finish()


def _job(side: str, torch_python: str, kills: tuple) -> Outcome:
    """Run one job to its end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Python looks for modules beside a script: not for those of this folder.
        for script in FOLDER.glob("recovery_*worker.py"):
            shutil.copy(script, folder)
        env = {
            **os.environ,
            "PYTHONPATH": str(FOLDER.parents[1]),
            "RECOVERY_FOLDER": name,
            "RECOVERY_KILLS": json.dumps(kills),
        }
        with contextlib.ExitStack() as stack:
            commands = _commands(side, torch_python, env, stack)
            with (folder / "output").open("w") as output:
                processes = [
                    subprocess.Popen(
                        command,
                        cwd=name,
                        env=own,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                    for command, own in commands
                ]
            stack.callback(_end, processes)
            end = time.monotonic() + DEADLINE_SECONDS
            while time.monotonic() < end and not list(folder.glob("loss-*")):
                time.sleep(0.1)
            # A process that comes when the others have ended may wait for them.
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_SECONDS)
        try:
            return _outcome(folder)
        except (ValueError, IndexError) as error:
            output_text = (folder / "output").read_text()[-4000:]
            raise RuntimeError(f"{side} has not ended well:\n{output_text}") from error


def _commands(
    side: str, torch_python: str, env: dict[str, str], stack: contextlib.ExitStack
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Return the commands of a job with their environments; start what they need."""
    if side.startswith("tfdp"):
        options = {
            "tfdp --elastic": ["--elastic", f"{NUM_WORKERS - 1}:{NUM_WORKERS}"],
            "tfdp --max-restarts": ["-n", str(NUM_WORKERS), "--max-restarts", "5"],
        }[side]
        ours = [sys.executable, "-m", "tfdp", "run"]
        yield [*ours, *options, "recovery_worker.py"], env
        return
    if side == "torchrun":
        torchrun = [torch_python, "-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--max-restarts", "5", f"--nproc-per-node={NUM_WORKERS}"]
        # Else a second attempt may read addresses of the first one.
        own = {**env, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        yield [*torchrun, "recovery_torch_worker.py"], own
        return
    (port,) = free_ports(1)
    lighthouse = [str(Path(torch_python).parent / "torchft_lighthouse")]
    # One below all, so that the rest of a job may continue; shorter times than the
    # defaults, 60 and 5 s.
    lighthouse += ["--min_replicas", str(NUM_WORKERS - 1), "--bind", f"[::]:{port}"]
    lighthouse += ["--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "1000"]
    quiet = subprocess.DEVNULL
    server = subprocess.Popen(
        lighthouse, stdout=quiet, stderr=quiet, start_new_session=True
    )
    stack.callback(_end, [server])
    for rank in range(NUM_WORKERS):
        own = {
            **env,
            "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}",
            "REPLICA_GROUP_ID": str(rank),
        }
        again = ["sh", "-c", 'until "$0" "$1"; do :; done', torch_python]
        yield [*again, "recovery_torchft_worker.py"], own


def _outcome(folder: Path) -> Outcome:
    """Read what the workers of a job have written."""
    lines = sorted(
        tuple(json.loads(line))
        for path in folder.glob("steps-*")
        for line in path.read_text().splitlines()
    )
    kills = [json.loads(path.read_text()) for path in folder.glob("kill-*")]
    losses = [float(path.read_text()) for path in folder.glob("loss-*")]
    last = {step: at for at, step, _ in lines}
    if set(last) != set(range(NUM_STEPS)) or not losses:
        raise ValueError(f"only {len(last)} steps of {NUM_STEPS} were made")
    uses: collections.Counter[tuple[int, int]] = collections.Counter()
    again: set[int] = set()
    for at, step, samples in lines:
        if last[step] - at > TOGETHER_SECONDS:
            again.add(step)
            continue
        epoch = step * EPOCHS // NUM_STEPS
        uses.update((epoch, sample) for sample in samples)
    return Outcome(
        recoveries=[
            min(t for t, step, _ in lines if t > at and step >= killed) - at
            for at, killed in kills
        ],
        seconds=lines[-1][0] - lines[0][0],
        again=len(again),
        lost=EPOCHS * NUM_SAMPLES - len(uses),
        twice=sum(count - 1 for count in uses.values()),
        loss=losses[0],
    )


def _end(processes: list[subprocess.Popen]) -> None:
    """Kill processes with their groups."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
