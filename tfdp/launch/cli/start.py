"""Start of worker processes: each by itself, or as forks of one with TensorFlow."""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Callable, Mapping, Sequence

from tfdp.communication.cluster.gpus import visible_gpus
from tfdp.launch.cli.import_once.parent import Parent
from tfdp.launch.cli.import_once.script import Imports, imports_of
from tfdp.launch.cli.launch import RunSettings

# With these Python does more at its start or end than a fork would.
_OF_INTERPRETER = (
    *("PYTHONINSPECT", "PYTHONPROFILEIMPORTTIME", "PYTHONVERBOSE", "PYTHONTRACEMALLOC"),
    *("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"),
)


class Starter:
    """Starts the workers of a job.

    They are forks of one process that has imported TensorFlow, where that can be done:
    one whose environment differs in more than `TF_CONFIG` imports for itself, for
    TensorFlow reads some variables when it is imported.

    Args:
        command: Sequence of strings, what every worker runs.
        imports: `Imports` of the script, or `None` for no forks. Defaults to `None`.
        wait: Callable, which waits until a `Parent` has imported, and returns whether
            it has. Defaults to none.

    Attributes:
        command: Sequence of strings, the same.
        job: String, stands in the `TF_CONFIG` of each, by which all are found.
    """

    def __init__(
        self,
        command: Sequence[str],
        imports: Imports | None = None,
        wait: Callable[[Parent], bool] = bool,
    ) -> None:
        self.job = uuid.uuid4().hex
        self.command = command
        self._imports, self._wait = imports, wait
        self._environment: dict[str, str] | None = None
        self._parent: Parent | None = None

    @property
    def own_pids(self) -> set[int]:
        """Set of the ids of processes that are no workers, and outlive them."""
        return {self._parent.pid} if self._parent is not None else set()

    def start(self, environment: Mapping[str, str], output: int) -> int:
        """Start a worker, in a session of its own and with an empty stdin.

        Args:
            environment: Dict of its environment variables.
            output: Int, the descriptor of its stdout and stderr.

        Returns:
            Int, its process id. The caller reaps it.

        Raises:
            OSError: If it cannot be started.
        """
        shared = {k: v for k, v in environment.items() if k != "TF_CONFIG"}
        if self._imports is not None and self._environment is None:
            self._environment = shared
            self._parent = self._new_parent(self._imports, shared)
        if self._parent is not None and shared == self._environment:
            try:
                return self._parent.fork(environment, output)
            except OSError:
                self.close()
        # Its output is one stream, so that a traceback stands where it belongs. In a
        # session of its own: Ctrl-C reaches the launcher alone, which passes it on,
        # and all that the worker starts can be found again.
        process = subprocess.Popen(
            self.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        process.returncode = 0  # so that `Popen` never reaps it
        return process.pid

    def close(self) -> None:
        """End the process that forks."""
        if self._parent is not None:
            self._parent.close()
            self._parent = None

    def _new_parent(
        self, imports: Imports, environment: dict[str, str]
    ) -> Parent | None:
        # By the job's id it is found among its processes.
        own = {"TF_CONFIG": json.dumps({"tfdp": {"job": self.job}})}
        environment = {**environment, **imports.variables, **own}
        try:
            parent = Parent(self.command, imports.packages, environment)
        except OSError:
            return None  # as the worker will say
        if not self._wait(parent):
            parent.close()
            return None
        return parent


def imports_before_forks(settings: RunSettings) -> Imports | None:
    """Return what is imported before the workers are forked, `None` for no forks.

    Args:
        settings: `RunSettings`.
    """
    starts = settings.num_workers * (settings.max_restarts + 1)
    has_reason = settings.forks and starts > 1 and not settings.is_module
    if not has_reason or visible_gpus() or any(map(os.environ.get, _OF_INTERPRETER)):
        return None
    return imports_of(settings.script)
