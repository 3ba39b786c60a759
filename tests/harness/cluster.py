"""Starts the workers of one set-up, watches over them, and kills them."""

from __future__ import annotations

import collections.abc
import contextlib
import multiprocessing.connection
import os
import pathlib
import signal
import tempfile
import time
import typing

import psutil

from tests.harness.fork_server import fork_server
from tests.harness.ranks import start_ranks
from tests.harness.results import Outcome
from tests.harness.setups import Setup
from tests.harness.tf_config import cluster_configs
from tests.harness.worker import serve

START_DEADLINE_SECONDS = 240.0
# Once one worker has failed, the others may wait for it for ever.
GRACE_SECONDS = 8.0


class ClusterError(Exception):
    """Workers that died or missed a deadline, with all that they last said."""


class Process(typing.Protocol):
    """A process of a worker, as `multiprocessing` has them."""

    pid: typing.Any

    @property
    def exitcode(self) -> int | None:
        """Its exit code, or `None` while it runs."""

    def is_alive(self) -> bool:
        """Whether it runs."""

    def join(self) -> None:
        """Waits for its end, after it has been killed."""


class Worker:
    """One worker process, the pipe to it and the files it writes."""

    def __init__(
        self,
        rank: int,
        process: Process,
        connection: multiprocessing.connection.Connection,
        folder: pathlib.Path,
    ):
        self.rank, self.process, self.connection = rank, process, connection
        self.log, self.stacks = files_of(folder, rank)

    def kill(self) -> None:
        """Kills the process and all that it started."""
        try:
            tree = psutil.Process(self.process.pid)
            processes = [*tree.children(recursive=True), tree]
        except psutil.NoSuchProcess:
            processes = []
        for process in processes:
            # A worker inside a collective does not heed SIGTERM.
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.join()

    def close(self) -> None:
        """Kills the process and ends the connection to it."""
        self.kill()
        self.connection.close()

    def last_words(self) -> str:
        """The end of the output, of the Python stacks, and the exit code."""
        code = self.process.exitcode
        state = "running" if code is None else f"exit code {code}"
        parts = [f"===== worker {self.rank} ({state})"]
        for title, path, length in (
            ("output", self.log, 4000),
            ("stacks", self.stacks, 60000),
        ):
            text = path.read_text(errors="replace") if path.exists() else ""
            parts.append(f"--- last {title}\n{text[-length:]}")
        return "\n".join(parts)


def files_of(folder: pathlib.Path, rank: int) -> tuple[pathlib.Path, pathlib.Path]:
    """Paths of the output and of the Python stacks of a worker."""
    return folder / f"worker{rank}.log", folder / f"worker{rank}.stacks"


def _fork_worker(
    setup: Setup, rank: int, flavor: str, tf_config: str | None, folder: pathlib.Path
) -> Worker:
    context = fork_server()
    connection, child = context.Pipe()
    process = context.Process(
        target=serve,
        args=(setup.name, rank, flavor, child, tf_config, *files_of(folder, rank)),
        daemon=True,
    )
    process.start()
    child.close()
    return Worker(rank, process, connection, folder)


class Cluster:
    """The workers of one set-up, kept for many cases."""

    def __init__(self, setup: Setup, flavor: str):
        self.setup = setup
        self.healthy = True
        self._folder = tempfile.TemporaryDirectory(prefix=f"{setup.name}-")
        self.workers = self._start(flavor, pathlib.Path(self._folder.name))
        self._started = False

    def _start(self, flavor: str, folder: pathlib.Path) -> list[Worker]:
        if self.setup.is_mpi:
            found = start_ranks(self.setup, flavor, folder)
            return [
                Worker(rank, process, connection, folder)
                for rank, (process, connection) in enumerate(found)
            ]
        return [
            _fork_worker(self.setup, rank, flavor, config, folder)
            for rank, config in enumerate(self._configs())
        ]

    def _configs(self) -> collections.abc.Sequence[str | None]:
        """The text of `TF_CONFIG` of each worker."""
        if not self.setup.is_multi_worker:
            return [None]
        return cluster_configs(
            self.setup.num_workers, self.setup.devices_per_worker, self.setup.host
        )

    def send(self, case_name: str, tmp: pathlib.Path) -> None:
        """Tells every worker to run a case, without waiting for it."""
        self._await_start()
        for worker in self.workers:
            # A worker that died is found, with its last words, by `collect`.
            with contextlib.suppress(ConnectionError):
                worker.connection.send((case_name, str(tmp)))

    def collect(self, deadline_seconds: float) -> list[Outcome]:
        """Waits for the outcome on every worker.

        Raises:
            ClusterError: If a worker died or the time is over. The cluster is
                dead then.
        """
        # By file descriptor.
        pending: dict[typing.Any, Worker] = {
            worker.connection.fileno(): worker for worker in self.workers
        }
        outcomes: dict[int, Outcome] = {}
        end = time.monotonic() + deadline_seconds
        while pending:
            left = max(end - time.monotonic(), 0.0)
            ready = multiprocessing.connection.wait(list(pending), left)
            if not ready:
                self._give_up(outcomes, f"no answer in {deadline_seconds:g} s")
            for fd in ready:
                worker = pending.pop(fd)
                try:
                    outcomes[worker.rank] = worker.connection.recv()
                except (EOFError, ConnectionError):
                    self._give_up(outcomes, f"worker {worker.rank} died")
            if any(outcome.error for outcome in outcomes.values()):
                end = min(end, time.monotonic() + GRACE_SECONDS)
        self.healthy = not any(_breaks(o) for o in outcomes.values())
        return [outcomes[worker.rank] for worker in self.workers]

    def kill(self) -> None:
        """Kills all workers, also while another thread waits for them."""
        self.healthy = False
        for worker in self.workers:
            worker.kill()

    def close(self) -> None:
        """Kills all workers and removes their files."""
        self.healthy = False
        for worker in self.workers:
            worker.close()
        self._folder.cleanup()

    def _await_start(self) -> None:
        if self._started:
            return
        for outcome in self.collect(START_DEADLINE_SECONDS):
            if outcome.error:
                self.close()
                raise ClusterError(f"A worker did not start:\n{outcome.error}")
        self._started = True

    def _give_up(self, outcomes: dict[int, Outcome], why: str) -> None:
        for worker in self.workers:
            if worker.process.is_alive() and worker.rank not in outcomes:
                with contextlib.suppress(ProcessLookupError):  # it dies right now
                    os.kill(worker.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        errors = [
            f"===== worker {rank} raised\n{outcome.error}"
            for rank, outcome in sorted(outcomes.items())
            if outcome.error
        ]
        words = [worker.last_words() for worker in self.workers]
        self.close()
        raise ClusterError("\n".join([f"{self.setup.name}: {why}", *errors, *words]))


def _breaks(outcome: Outcome) -> bool:
    # After an exception, workers may no longer agree on the next collective.
    return bool(outcome.error) and not outcome.is_assertion
