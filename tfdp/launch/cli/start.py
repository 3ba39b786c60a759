"""Start of worker processes, separately or as forks of one with TensorFlow."""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Mapping, Sequence

from tfdp.communication.cluster.gpus import visible_gpus
from tfdp.launch.cli.import_once.fork_server import ForkServer
from tfdp.launch.cli.import_once.script import Imports, imports_of
from tfdp.launch.cli.launch import RunSettings
from tfdp.launch.cli.signals import SignalPipe

# These environment variables make Python do more at its start or exit than a fork does,
# so workers are not forked if one of them is set.
_INTERPRETER_VARIABLES = (
    *("PYTHONINSPECT", "PYTHONPROFILEIMPORTTIME", "PYTHONVERBOSE", "PYTHONTRACEMALLOC"),
    *("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"),
)


class Starter:
    """Starter of the workers of a job.

    If possible, workers are forks of one process that has imported TensorFlow. A worker
    whose environment differs in more than `TF_CONFIG` is a separate process, since
    TensorFlow reads some variables only at its import.

    Args:
        command: Sequence of strings, the command line of each worker.
        imports: `Imports` of the script, or `None` for no forks. Defaults to `None`.
        signals: `SignalPipe` that ends the wait for the imports, or `None` for no wait.
            Defaults to `None`.

    Attributes:
        command: Sequence of strings, the command line of each worker.
        job: String, id of the job in the `TF_CONFIG` of each worker, by which its
            processes are identified.
    """

    def __init__(
        self,
        command: Sequence[str],
        imports: Imports | None = None,
        signals: SignalPipe | None = None,
    ) -> None:
        self.job = uuid.uuid4().hex
        self.command = command
        self._imports, self._signals = imports, signals
        self._environment: dict[str, str] | None = None
        self._fork_server: ForkServer | None = None

    @property
    def helper_pids(self) -> set[int]:
        """Set of ints, ids of processes that fork workers and outlive them."""
        return {self._fork_server.pid} if self._fork_server is not None else set()

    def start(self, environment: Mapping[str, str], output: int) -> int:
        """Start a worker, in a separate session and with an empty stdin.

        Args:
            environment: Dict of the worker's environment variables.
            output: Int, descriptor for the worker's stdout and stderr.

        Returns:
            Int, process id of the worker, which the caller must reap.

        Raises:
            OSError: If the worker cannot be started.
        """
        shared = {k: v for k, v in environment.items() if k != "TF_CONFIG"}
        if self._imports is not None and self._environment is None:
            self._environment = shared
            self._fork_server = self._new_fork_server(self._imports, shared)
        if self._fork_server is not None and shared == self._environment:
            try:
                return self._fork_server.fork(environment, output)
            except OSError:
                self.close()
        # stdout and stderr are one stream, which keeps the order of lines. In a
        # separate session, a worker gets Ctrl-C only from the launcher, and all
        # processes that it starts can be found.
        process = subprocess.Popen(
            self.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        # `Worker` reaps the process, so `Popen` must not: it does not reap a process
        # that has a return code.
        process.returncode = 0
        return process.pid

    def close(self) -> None:
        """End the process that forks workers, if there is one; the workers continue."""
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None

    def _new_fork_server(
        self, imports: Imports, environment: dict[str, str]
    ) -> ForkServer | None:
        """Start the process that forks workers; return `None` if that fails."""
        # When `process_tree` ends the processes of a job, it finds them by the id of
        # the job in `TF_CONFIG`, so the process that forks workers also needs this id.
        config = {"TF_CONFIG": json.dumps({"tfdp": {"job": self.job}})}
        environment = {**environment, **imports.variables, **config}
        try:
            fork_server = ForkServer(self.command, imports.packages, environment)
        except OSError:
            return None  # the start of a separate worker will report the same error
        if self._signals is not None and not fork_server.wait(self._signals):
            fork_server.close()
            return None
        return fork_server


def imports_before_forks(settings: RunSettings) -> Imports | None:
    """Return the imports to do once before forks; `None` if workers are not forked.

    Workers are not forked for a module, for a single worker without restarts, or for a
    script without a result of `imports_of`; nor with GPUs, with `--no-fork`, or if one
    of `_INTERPRETER_VARIABLES` is set.

    Args:
        settings: `RunSettings` of the job.
    """
    starts = settings.num_workers * (settings.max_restarts + 1)
    has_reason = settings.forks and starts > 1 and not settings.is_module
    if (
        not has_reason
        or visible_gpus()
        or any(map(os.environ.get, _INTERPRETER_VARIABLES))
    ):
        return None
    return imports_of(settings.script)
