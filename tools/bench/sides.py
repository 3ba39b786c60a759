"""The sides of a benchmark: groups of processes that take turns on the machine."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 300.0


class Side:
    """Worker processes that wait on a pipe while it is the other side's turn.

    Args:
        name: String, for people.
        module: String, the module that each worker runs.
        setup: Dict, what the workers are told.
        num_workers: Int. Defaults to `1`.
        python: String or `None`, the interpreter. Defaults to this one.
    """

    def __init__(
        self,
        name: str,
        module: str,
        setup: Mapping[str, Any],
        num_workers: int = 1,
        python: str | None = None,
    ) -> None:
        self.name = name
        addresses = [f"127.0.0.1:{port}" for port in free_ports(num_workers)]
        self._logs = [tempfile.NamedTemporaryFile("w+") for _ in addresses]  # noqa: SIM115
        self._workers = []
        for rank in range(num_workers):
            told = {**setup, "rank": rank, "addresses": addresses}
            self._workers.append(
                subprocess.Popen(
                    [python or sys.executable, "-m", module, json.dumps(told)],
                    cwd=ROOT,
                    env=_environment(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._logs[rank],
                    text=True,
                    start_new_session=True,
                )
            )

    def wait_until_ready(self) -> list[str]:
        """Waits for the workers and returns the names of what they can run."""
        return self._replies()[0]["ready"]

    def run(self, arm: str, steps: int) -> Any:
        """Runs a block of steps and returns what each worker measured."""
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps({"arm": arm, "steps": steps}) + "\n")
            worker.stdin.flush()
        return [reply["result"] for reply in self._replies()]

    def close(self) -> None:
        """Ends the workers, also those that wait in native code for ever."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.wait()

    def _replies(self) -> list[dict]:
        deadline = time.monotonic() + DEADLINE_SECONDS
        replies = []
        for rank, worker in enumerate(self._workers):
            assert worker.stdout is not None
            with selectors.DefaultSelector() as selector:
                selector.register(worker.stdout, selectors.EVENT_READ)
                ready = selector.select(max(0.0, deadline - time.monotonic()))
            line = worker.stdout.readline() if ready else ""
            if not line:
                self._logs[rank].seek(0)
                last = "".join(self._logs[rank].readlines()[-20:])
                why = "ended" if ready else f"was silent for {DEADLINE_SECONDS:.0f} s"
                raise RuntimeError(f"Worker {rank} of {self.name} {why}:\n{last}")
            replies.append(json.loads(line))
        return replies


@contextlib.contextmanager
def started(*sides: Side) -> Iterator[None]:
    """Waits for all sides to be ready and ends them afterwards."""
    try:
        for side in sides:
            side.wait_until_ready()
        yield
    finally:
        for side in sides:
            side.close()


def alternate(
    arms: Sequence[tuple[Side, str]],
    *,
    blocks: int,
    steps: Mapping[str, int] | int,
    warm_up: int = 2,
) -> dict[str, list[float]]:
    """Runs blocks of all arms in turn, every other time in reverse order.

    Args:
        arms: Sequence of side and name of an arm.
        blocks: Int, how often each arm has its turn.
        steps: Int, or one for each arm: steps in a block.
        warm_up: Int, steps of each arm before the first block. Defaults to `2`.

    Returns:
        Dict from `side/arm` to seconds per step of the slowest worker, one
        value for each block.
    """
    times: dict[str, list[float]] = {f"{side.name}/{arm}": [] for side, arm in arms}

    def run(side: Side, arm: str) -> float:
        count = steps if isinstance(steps, int) else steps[arm]
        return max(side.run(arm, count))

    for side, arm in arms:
        side.run(arm, warm_up)  # traces, and fills caches
    for block in range(blocks):
        for side, arm in arms if block % 2 == 0 else reversed(arms):
            times[f"{side.name}/{arm}"].append(run(side, arm))
    return times


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _environment() -> dict[str, str]:
    """This process's, without what it may say about another cluster."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    kept.pop("TF_CONFIG", None)
    return {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", **kept}
