"""Sides of a benchmark, groups of processes that take turns, and their ratios."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tfdp.communication.cluster import free_ports
from tfdp.communication.cluster.process_tree import kill_processes
from tfdp.ground.base.intervals import median_interval
from tfdp.ground.text import pluralize

DEADLINE_SECONDS = 300.0
# Another interpreter has its own packages, and of ours gets this one and that of the
# module only: what else lies beside them was built for this interpreter.
_FOREIGN = """
import runpy, sys, types
folder = sys.argv.pop(1)
for name in {"tfdp", sys.argv[1].partition(".")[0]}:
    package = types.ModuleType(name)
    package.__path__ = [f"{folder}/{name}"]
    sys.modules[name] = package
runpy.run_module(sys.argv.pop(1), run_name="__main__")
"""


class Side:
    """Worker processes that wait on a pipe while it is the other side's turn.

    Args:
        name: String, for people.
        module: String, the module that each worker runs.
        setup: Dict, what the workers are told.
        num_workers: Int. Defaults to `1`.
        python: String or `None`, an interpreter for a module of tfdp, or of a package
            beside it, that needs nothing but Python and what that one has. Defaults to
            this one.
        environment: Dict, what the workers' environment has besides. Defaults to
            nothing.
    """

    # The longest wait for a block.
    deadline_seconds = DEADLINE_SECONDS

    def __init__(
        self,
        name: str,
        module: str,
        setup: Mapping[str, Any],
        num_workers: int = 1,
        python: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        addresses = [f"127.0.0.1:{port}" for port in free_ports(num_workers)]
        self._start(
            worker_commands(module, setup, addresses, python),
            {**worker_environment(), **(environment or {})},
        )

    def _start(
        self, commands: Sequence[Sequence[str]], environment: Mapping[str, str]
    ) -> None:
        self._logs = [tempfile.TemporaryFile("w+") for _ in commands]  # noqa: SIM115
        self._workers: list[subprocess.Popen] = []
        try:
            for command, log in zip(commands, self._logs, strict=True):
                worker = subprocess.Popen(
                    list(command),
                    env=dict(environment),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,
                )
                self._workers.append(worker)
        except OSError:
            self.close()
            raise

    def wait_until_ready(self) -> None:
        """Wait until all workers have started."""
        self._replies()

    def run(self, arm: str, steps: int) -> Any:
        """Run a block of steps and return what each worker measured."""
        for worker in self._workers:
            assert worker.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the reply says why
                worker.stdin.write(json.dumps({"arm": arm, "steps": steps}) + "\n")
                worker.stdin.flush()
        return [reply["result"] for reply in self._replies()]

    def close(self) -> None:
        """End the workers, also those that wait in native code for ever."""
        kill_processes([w.pid for w in self._workers if w.returncode is None])
        for worker in self._workers:
            worker.wait()

    def _replies(self) -> list[dict]:
        deadline = time.monotonic() + self.deadline_seconds
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
                why = (
                    "ended"
                    if ready
                    else f"was silent for {self.deadline_seconds:.0f} s"
                )
                raise RuntimeError(f"Worker {rank} of {self.name} {why}:\n{last}")
            replies.append(json.loads(line))
        return replies


@contextlib.contextmanager
def started(*sides: Side) -> Iterator[None]:
    """Wait for all sides to be ready and end them afterwards."""
    try:
        for side in sides:
            side.wait_until_ready()
        yield
    finally:
        for side in sides:
            side.close()


def worker_commands(
    module: str,
    setup: Mapping[str, Any],
    addresses: Sequence[str],
    python: str | None = None,
) -> list[list[str]]:
    """The command of each worker of a side.

    Args:
        module: String, the module that each runs.
        setup: Dict, what they are told, beside their rank and all addresses.
        addresses: Sequence of strings, one for each worker.
        python: String or `None`, as for `Side`. Defaults to this interpreter.

    Returns:
        List of lists of strings.
    """
    start = [sys.executable, "-m", module]
    if python is not None:
        folder = str(Path(__file__).resolve().parents[3])
        start = [python, "-c", _FOREIGN, folder, module]
    told = [
        {**setup, "rank": rank, "addresses": list(addresses)}
        for rank in range(len(addresses))
    ]
    return [[*start, json.dumps(each)] for each in told]


def worker_environment() -> dict[str, str]:
    """This process's environment, without what it may say about another cluster."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    kept.pop("TF_CONFIG", None)
    return {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", **kept}


class Runner(Protocol):
    """Protocol of what runs blocks of steps, such as a `Side`."""

    name: str

    def run(self, arm: str, steps: int) -> Any:
        """Run a block of steps and return what each worker measured."""


def alternate(
    arms: Sequence[tuple[Runner, str]],
    *,
    blocks: int,
    steps: int,
    warm_up: int = 2,
    on_turn: Callable[[], Any] = lambda: None,
    slowest: Callable[[Any], Any] = max,
) -> dict[str, list[Any]]:
    """Run blocks of all arms in turn, every other time in reverse order.

    Args:
        arms: Sequence of side and name of an arm.
        blocks: Int, how often each arm has its turn.
        steps: Int, steps in a block.
        warm_up: Int, steps of each arm before the first block. Defaults to `2`.
        on_turn: Callable, called after each block. Defaults to nothing.
        slowest: Callable that takes one of what the workers measured. Defaults to
            `max`, for seconds per step.

    Returns:
        Dict from `side/arm` to what the slowest worker measured, one value for
        each block.
    """
    times: dict[str, list[Any]] = {f"{side.name}/{arm}": [] for side, arm in arms}
    for side, arm in arms:
        if warm_up:
            side.run(arm, warm_up)  # traces, and fills caches
    for block in range(blocks):
        for side, arm in arms if block % 2 == 0 else reversed(arms):
            times[f"{side.name}/{arm}"].append(slowest(side.run(arm, steps)))
            on_turn()
    return times


def alternate_for(
    seconds: float,
    arms: Sequence[tuple[Runner, str]],
    *,
    blocks: int,
    on_turn: Callable[[], Any] = lambda: None,
) -> dict[str, list[float]]:
    """Warm all arms up, then run blocks of a length, as `alternate` does.

    Args:
        seconds: Float, how long a block of the slowest arm should take.
        arms: Sequence of side and name of an arm.
        blocks: Int, how often each arm has its turn.
        on_turn: Callable, called after each block. Defaults to nothing.

    Returns:
        Dict, as of `alternate`.
    """
    steps = steps_that_take(seconds, arms)
    return alternate(arms, blocks=blocks, steps=steps, warm_up=0, on_turn=on_turn)


def steps_that_take(
    seconds: float, arms: Sequence[tuple[Runner, str]], most: int = 200
) -> int:
    """Warm all arms up, and find how many steps make a block.

    Args:
        seconds: Float, how long a block of the slowest arm should take.
        arms: Sequence of side and name of an arm.
        most: Int, the largest result. Defaults to `200`.

    Returns:
        Int, steps of every arm: at least one.
    """
    for side, arm in arms:
        side.run(arm, 1)  # traces
    slowest = max(max(side.run(arm, 2)) for side, arm in arms)
    return max(1, min(most, round(seconds / slowest)))


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The median of paired ratios with its 95 % interval."""

    median: float
    low: float
    high: float
    num_pairs: int

    def times(self, factor: float) -> Ratio:
        """The ratio times a number, with its interval.

        Args:
            factor: Float.

        Returns:
            A `Ratio`.
        """
        low, high = self.low * factor, self.high * factor
        return Ratio(self.median * factor, low, high, self.num_pairs)

    @property
    def interval(self) -> str:
        """String, the interval in brackets."""
        return f"[{self.low:.3f}, {self.high:.3f}]"

    def __str__(self) -> str:
        return f"{self.median:.3f} {self.interval}, {pluralize(self.num_pairs, 'pair')}"


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Compare two sides that ran in turn, block by block."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    low, high = median_interval(ratios)
    return Ratio(statistics.median(ratios), low, high, len(ratios))
