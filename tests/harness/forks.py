"""Runs functions side by side in forks of the process that has TensorFlow loaded."""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.commands import Finished
from tests.harness.fork_server import begin, fork_server

WAITING_SECONDS = 60.0


@dataclass(frozen=True)
class Start:
    """What one process is to do.

    Args:
        action: Function of a module, called in the new process.
        tf_config: The text of `TF_CONFIG`, or `None` for none.
        arguments: Keyword arguments of `action`.
    """

    action: Callable[..., Any]
    tf_config: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What came of it: the value returned, or the error raised.

    Args:
        value: What the action returned.
        error: Name of the class of what it raised, or `""`.
        text: Message of what it raised.
        seconds: Time that the action took.
    """

    value: Any = None
    error: str = ""
    text: str = ""
    seconds: float = 0.0


def run(starts: Sequence[Start], deadline_seconds: float) -> list[Answer]:
    """Runs processes side by side and returns what each of them answered.

    Fails the test if one has not answered by the deadline, or died. Nothing is
    left running.
    """
    with tempfile.TemporaryDirectory(prefix="forks-") as folder:
        return _run(starts, deadline_seconds, Path(folder))


def run_script(code: str, *args: object, deadline_seconds: float) -> Finished:
    """Runs a script, with `args` as its arguments, and returns what it printed."""
    arguments = {"code": code, "args": [str(arg) for arg in args]}
    (answer,) = run([Start(_execute, arguments=arguments)], deadline_seconds)
    assert not answer.error, answer
    return answer.value


def _execute(code: str, args: list[str]) -> Finished:
    """Runs a script in this process as Python would, output kept apart from errors."""
    output, errors = io.StringIO(), io.StringIO()
    sys.argv = ["script", *args]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exit_code: Any = 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            exec(compile(code, "script", "exec"), main.__dict__)
        except SystemExit as stopped:
            exit_code = stopped.code or 0
        except Exception:  # noqa: BLE001 as Python ends a script
            traceback.print_exc()
            exit_code = 1
    return Finished(exit_code, output.getvalue(), errors.getvalue())


def _run(starts: Sequence[Start], seconds: float, folder: Path) -> list[Answer]:
    context = fork_server()
    processes, connections = [], []
    try:
        for index, start in enumerate(starts):
            parent, child = context.Pipe(duplex=False)
            log = folder / f"{index}.log"
            process = context.Process(
                target=_serve, args=(start, child, log), daemon=True
            )
            process.start()
            child.close()
            processes.append(process)
            connections.append(parent)
        return _collect(connections, seconds, folder)
    finally:
        for process in processes:
            _kill_tree(process)


def _collect(connections: Sequence[Any], seconds: float, folder: Path) -> list[Answer]:
    end = time.monotonic() + seconds
    answers = []
    for index, connection in enumerate(connections):
        fate = f"did not answer in {seconds} s"
        if connection.poll(max(0.0, end - time.monotonic())):
            with contextlib.suppress(EOFError):
                answers.append(connection.recv())
                continue
            fate = "died"
        output = (folder / f"{index}.log").read_text(errors="replace")
        pytest.fail(
            f"Process {index} {fate}. Before it: {answers}\n{output[-5000:]}",
            pytrace=False,
        )
    return answers


def _serve(start: Start, connection: Any, log: Path) -> None:
    """Runs an action and sends its answer; this is the new process."""
    begin(log, start.tf_config)
    started = time.monotonic()
    try:
        answer = Answer(start.action(**start.arguments))
    except Exception as error:  # noqa: BLE001 the test looks at it
        traceback.print_exc()
        seconds = time.monotonic() - started
        answer = Answer(None, type(error).__name__, str(error), seconds)
    connection.send(answer)
    # The others may still need this one; the test kills all when it has heard them.
    while True:
        time.sleep(WAITING_SECONDS)


def _kill_tree(process: Any) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.join()
