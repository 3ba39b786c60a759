"""Deadline of a worker that joins its cluster, kept by a process of its own.

TensorFlow joins in native code with the interpreter locked, and has no limit for some
of its waits: when another worker dies in that moment, no thread and no signal handler
of Python's runs any more. Run as a script, by its path, this file is the guard.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

_PROBE_SECONDS = 1.0


@contextlib.contextmanager
def join_deadline(others: Sequence[str], limit_seconds: float) -> Iterator[None]:
    """Kill this process if the block does not end in time.

    Args:
        others: Sequence of strings, `"rank=host:port"` of the other workers.
        limit_seconds: Float.
    """
    with _guard(limit_seconds, "--others", *others):
        yield


@contextlib.contextmanager
def start_deadline(sentence: str, limit_seconds: float) -> Iterator[None]:
    """Kill this process, with a sentence, if the block does not end in time.

    Args:
        sentence: String, what is then said.
        limit_seconds: Float.
    """
    with _guard(limit_seconds, "--say", sentence):
        yield


@contextlib.contextmanager
def _guard(limit_seconds: float, *arguments: str) -> Iterator[None]:
    # Nothing of the user's is imported, so that it starts in a moment.
    script = [sys.executable, "-I", "-S", __file__]
    own = [str(os.getpid()), str(limit_seconds)]
    guard = subprocess.Popen([*script, *own, *arguments], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        # By hand: a process that was forked meanwhile has the pipe as well, whose end
        # is for a worker that is killed.
        guard.kill()
        guard.communicate()


def explain(others: Sequence[str], limit_seconds: float) -> str:
    """Format the error message of a join that has timed out.

    Args:
        others: Sequence of strings, `"rank=host:port"`.
        limit_seconds: Float, how long this worker has waited.

    Returns:
        String.

    Example:

    >>> explain(["1=localhost:1"], 60.0)
    'Waited 60 s to join the cluster: worker 1 (localhost:1) does not answer. ...'
    """
    pairs = [other.split("=", 1) for other in others]
    lost = [f"worker {r} ({at})" for r, at in pairs if not _accepts_connections(at)]
    cause = f"{', '.join(lost)} does not answer" if lost else "one of them stands still"
    return (
        f"Waited {limit_seconds:.0f} s to join the cluster: {cause}. All workers were "
        "there before: see the end of their output, and start all of them again."
    )


def _accepts_connections(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        target = (host.strip("[]"), int(port))
        socket.create_connection(target, timeout=_PROBE_SECONDS).close()
    except OSError:
        return False
    return True


def main() -> None:
    """Wait until the worker has joined, and kill it at the limit."""
    # Ctrl-C is for the worker; while that one cannot hear it, this one stays.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker, limit = int(sys.argv[1]), float(sys.argv[2])
    mode, *words = sys.argv[3:]
    has_joined, _, _ = select.select([sys.stdin], [], [], limit)
    if has_joined or os.getppid() != worker:
        return  # it has ended
    said = explain(words, limit) if mode == "--others" else words[0]
    print(f"tfdp: {said}", file=sys.stderr, flush=True)
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)


if __name__ == "__main__":
    main()
