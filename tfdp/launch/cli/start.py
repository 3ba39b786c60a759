"""Start of worker processes: each by itself, or as forks of one with TensorFlow."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence

from tfdp.communication.cluster.gpus import visible_gpus
from tfdp.launch.cli.import_once.parent import Parent
from tfdp.launch.cli.import_once.script import Imports, imports_of
from tfdp.launch.cli.launch import RunSettings
from tfdp.launch.cli.signals import SignalPipe

# With these Python does more at its start or end than a fork would.
_OF_INTERPRETER = (
    *("PYTHONINSPECT", "PYTHONPROFILEIMPORTTIME", "PYTHONVERBOSE", "PYTHONTRACEMALLOC"),
    *("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"),
)


class Starter:
    """Starts the workers of a job, each as a process that imports for itself.

    Args:
        command: Sequence of strings, what every worker runs.

    Attributes:
        command: Sequence of strings, the same.
        job: String, stands in the `TF_CONFIG` of each, by which all are found.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.job = uuid.uuid4().hex
        self.command = command

    @property
    def own_pids(self) -> set[int]:
        """Set of the ids of processes that are no workers, and outlive them."""
        return set()

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


class ForkingStarter(Starter):
    """Starts workers as forks of one process that has imported TensorFlow.

    A worker whose environment differs in more than `TF_CONFIG` imports for itself:
    TensorFlow reads some variables when it is imported.

    Args:
        command: Sequence of strings, what every worker runs.
        imports: `Imports` of the script.
        signals: The `SignalPipe`, whose signals end the wait for the import.
        until: Float, by `time.monotonic()`, when the wait ends, or `None`.
    """

    def __init__(
        self,
        command: Sequence[str],
        imports: Imports,
        signals: SignalPipe,
        until: float | None,
    ) -> None:
        super().__init__(command)
        self._imports = imports
        self._signals = signals
        self._until = until
        self._environment: dict[str, str] | None = None
        self._parent: Parent | None = None

    def start(self, environment: Mapping[str, str], output: int) -> int:
        """See `Starter`."""
        shared = {k: v for k, v in environment.items() if k != "TF_CONFIG"}
        if self._environment is None:
            self._environment = shared
            self._parent = self._new_parent()
        if self._parent is not None and shared == self._environment:
            try:
                return self._parent.fork(environment, output)
            except OSError:
                self.close()
        return super().start(environment, output)

    @property
    def own_pids(self) -> set[int]:
        """See `Starter`."""
        return {self._parent.pid} if self._parent is not None else set()

    def close(self) -> None:
        """End the process that forks."""
        if self._parent is not None:
            self._parent.close()
            self._parent = None

    def _new_parent(self) -> Parent | None:
        assert self._environment is not None
        # By the job's id it is found among its processes.
        own = {"TF_CONFIG": json.dumps({"tfdp": {"job": self.job}})}
        environment = {**self._environment, **self._imports.variables, **own}
        try:
            parent = Parent(self.command, self._imports.packages, environment)
        except OSError:
            return None  # as the worker will say
        if not parent.wait(self._signals, self._until):
            parent.close()
            return None
        return parent


@contextlib.contextmanager
def new_starter(
    settings: RunSettings, signals: SignalPipe, until: float | None
) -> Iterator[Starter]:
    """Yield what starts the workers of a job.

    Args:
        settings: `RunSettings`.
        signals: The `SignalPipe`.
        until: Float, by `time.monotonic()`, when the job is stopped, or `None`.
    """
    imports = _imports(settings)
    if imports is None:
        yield Starter(settings.command)
        return
    forking = ForkingStarter(settings.command, imports, signals, until)
    with contextlib.closing(forking):
        yield forking


def _imports(settings: RunSettings) -> Imports | None:
    """Return what is imported before the workers are forked, `None` for no forks."""
    starts = settings.num_workers * (settings.max_restarts + 1)
    has_reason = settings.forks and starts > 1 and not settings.is_module
    if not has_reason or visible_gpus() or any(map(os.environ.get, _OF_INTERPRETER)):
        return None
    return imports_of(settings.script)
