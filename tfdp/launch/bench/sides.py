"""Sides of a benchmark: groups of processes that alternate, and their paired ratios."""

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

# A worker may hang in native code, so the wait for the replies of all workers of a side
# ends after this many seconds.
DEADLINE_SECONDS = 300.0
# Program that runs a module in another interpreter. That interpreter has packages of
# its own, and imports only tfdp and the module's package from this one: other packages
# in the same folder were built for this interpreter.
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
    """Group of worker processes, idle until the driver sends a block of steps.

    Args:
        name: String, name of the side in results and errors.
        module: String, the module that each worker runs.
        setup: Dict that each worker receives, with its rank and all addresses added.
        num_workers: Int, number of workers. Defaults to `1`.
        python: String, another interpreter, or `None` for this one. It imports tfdp and
            the package of `module` from this interpreter's folder, and must have all
            other packages that `module` imports. Defaults to `None`.
        environment: Dict of additional environment variables of the workers, or `None`.
            Defaults to `None`.
    """

    # A hung worker ends the benchmark after this many seconds; benchmarks whose blocks
    # take longer raise the limit.
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
        """Start the workers, with a pipe and a log for each.

        Args:
            commands: Sequence of command lines, one for each worker.
            environment: Mapping of all environment variables of the workers.
        """
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
        """Wait until all workers have started; raise `RuntimeError` if one fails."""
        self._replies()

    def run(self, variant: str, steps: int) -> Any:
        """Run steps of a measured variant, and return each worker's measurement.

        Args:
            variant: String, name of the variant: a key of the workers' `Variants`.
            steps: Int, number of steps, which run without interruption.

        Returns:
            List of the measurements, by worker.
        """
        for worker in self._workers:
            assert worker.stdin is not None
            # A write to a worker that has ended fails. The error is ignored here, since
            # `_replies` reports the worker with its log.
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.write(
                    json.dumps({"variant": variant, "steps": steps}) + "\n"
                )
                worker.stdin.flush()
        return [reply["result"] for reply in self._replies()]

    def close(self) -> None:
        """Kill the workers, which may be blocked indefinitely in native code."""
        kill_processes([w.pid for w in self._workers if w.returncode is None])
        for worker in self._workers:
            worker.wait()

    def _replies(self) -> list[dict]:
        """Read one reply of each worker of this side.

        Returns:
            List of dicts by worker: `{"ready": True}` first, then `{"result": ...}`.

        Raises:
            RuntimeError: If a worker has ended, or does not reply within
                `deadline_seconds`; the text has the end of its log.
        """
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
                    else f"did not answer for {self.deadline_seconds:.0f} s"
                )
                raise RuntimeError(f"Worker {rank} of {self.name} {why}:\n{last}")
            replies.append(json.loads(line))
        return replies


@contextlib.contextmanager
def started(*sides: Side) -> Iterator[None]:
    """Wait until all sides are ready; kill their workers when the context ends."""
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
    """Return the command line of each worker of a side.

    Args:
        module: String, the module that each worker runs.
        setup: Dict, the setup of all workers, without their ranks and addresses.
        addresses: Sequence of strings, the address of each worker.
        python: String, another interpreter, or `None` for this one. Defaults to `None`.

    Returns:
        List of lists of strings, one for each worker.
    """
    start = [sys.executable, "-m", module]
    if python is not None:
        folder = str(Path(__file__).resolve().parents[3])
        start = [python, "-c", _FOREIGN, folder, module]
    setups = [
        {**setup, "rank": rank, "addresses": list(addresses)}
        for rank in range(len(addresses))
    ]
    return [[*start, json.dumps(each)] for each in setups]


def worker_environment() -> dict[str, str]:
    """Return this process's environment without a cluster, by default without GPUs.

    `TF_CONFIG` and the variables of Slurm are removed. GPUs are hidden unless
    `CUDA_VISIBLE_DEVICES` is set.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    kept.pop("TF_CONFIG", None)
    return {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", **kept}


class Runner(Protocol):
    """Protocol of an object that runs blocks of steps, such as a `Side`."""

    name: str

    def run(self, variant: str, steps: int) -> Any:
        """Run a block of steps of a variant, and measure them.

        Args:
            variant: String, name of the variant.
            steps: Int, number of steps.

        Returns:
            List of the measurements, one for each worker.
        """


def alternate(
    variants: Sequence[tuple[Runner, str]],
    *,
    blocks: int,
    steps: int,
    warm_up: int = 2,
    on_block: Callable[[], Any] = lambda: None,
    slowest: Callable[[Any], Any] = max,
) -> dict[str, list[Any]]:
    """Run all measured variants block by block, in reverse order every other time.

    Args:
        variants: Sequence of tuples of a side and the name of a variant.
        blocks: Int, number of blocks of each variant.
        steps: Int, number of steps in a block.
        warm_up: Int, steps of each variant before the first block. Defaults to `2`.
        on_block: Callable, called after each block. Defaults to nothing.
        slowest: Callable that selects one of the workers' measurements. Defaults to
            `max`, for seconds per step.

    Returns:
        Dict from `side/variant` to the measurements of the slowest worker, one for
        each block.
    """
    times: dict[str, list[Any]] = {
        f"{side.name}/{variant}": [] for side, variant in variants
    }
    for side, variant in variants:
        if warm_up:
            side.run(variant, warm_up)  # untimed: warm-up steps trace functions
    for block in range(blocks):
        for side, variant in variants if block % 2 == 0 else reversed(variants):
            times[f"{side.name}/{variant}"].append(slowest(side.run(variant, steps)))
            on_block()
    return times


def alternate_for(
    seconds: float,
    variants: Sequence[tuple[Runner, str]],
    *,
    blocks: int,
    on_block: Callable[[], Any] = lambda: None,
) -> dict[str, list[float]]:
    """Warm all variants up, and `alternate` them in blocks of a given duration.

    Args:
        seconds: Float, duration of a block of the slowest variant.
        variants: Sequence of tuples of a side and the name of a variant.
        blocks: Int, number of blocks of each variant.
        on_block: Callable, called after each block. Defaults to nothing.

    Returns:
        Dict from `side/variant` to seconds per step of the slowest worker, one for
        each block.
    """
    steps = calibrate_steps(seconds, variants)
    return alternate(variants, blocks=blocks, steps=steps, warm_up=0, on_block=on_block)


def calibrate_steps(
    seconds: float, variants: Sequence[tuple[Runner, str]], most: int = 200
) -> int:
    """Warm all variants up, and return the number of steps for a block of a duration.

    Args:
        seconds: Float, duration of a block of the slowest variant.
        variants: Sequence of tuples of a side and the name of a variant.
        most: Int, the largest result. Defaults to `200`.

    Returns:
        Int, number of steps of a block of each variant: at least one.
    """
    for side, variant in variants:
        side.run(variant, 1)  # the first step traces functions, and must not be timed
    slowest = max(max(side.run(variant, 2)) for side, variant in variants)
    return max(1, min(most, round(seconds / slowest)))


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The median of paired ratios with its 95 % confidence interval.

    Args:
        median: Float, the median.
        low: Float, lower end of the confidence interval.
        high: Float, upper end of the confidence interval.
        num_pairs: Int, number of ratios.
    """

    median: float
    low: float
    high: float
    num_pairs: int

    def times(self, factor: float) -> Ratio:
        """Return a `Ratio` with the median and the interval multiplied by a factor."""
        low, high = self.low * factor, self.high * factor
        return Ratio(self.median * factor, low, high, self.num_pairs)

    @property
    def interval(self) -> str:
        """String, the 95 % confidence interval, such as `"[1.100, 1.300]"`."""
        return f"[{self.low:.3f}, {self.high:.3f}]"

    def __str__(self) -> str:
        """Return a text such as "1.200 [1.100, 1.300], 20 pairs"."""
        return f"{self.median:.3f} {self.interval}, {pluralize(self.num_pairs, 'pair')}"


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Return the median ratio of two sides whose blocks alternated, with its interval.

    The ratio is taken block by block; `median_interval` computes the 95 % interval.

    Args:
        numerators: Sequence of floats, a measurement of one side for each block.
        denominators: Sequence of floats, the other side's measurement for each block.
    """
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    low, high = median_interval(ratios)
    return Ratio(statistics.median(ratios), low, high, len(ratios))
