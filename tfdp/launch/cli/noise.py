"""Lines of TensorFlow's log that are kept from the screen, and not from the logs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping

from tfdp.communication.cluster.gpus import visible_gpus

# Before it has read its level, TensorFlow writes whatever that says.
LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# Of files in C++: a script that logs by absl is heard.
_PLACE = r"\d{4} [\d:.]+ +\d+ [\w./-]+\.(cc|h):\d+\] "
_INFO = re.compile(
    rf"I{_PLACE}|WARNING: All log messages before absl::InitializeLog\(\)"
)
# An error only where there is a GPU.
_NO_GPU = re.compile(rf"E{_PLACE}failed call to cuInit")
# After Ctrl-C: of workers that have ended, and in several lines.
_OF_PEERS = re.compile(
    rf"[WE]{_PLACE}|Additional GRPC error information|:[A-Z]+:Error received from peer|"
    r"The error could be from a previous operation|\s*\[\[\{\{"
)


def is_noise(line: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a line of TensorFlow's says nothing to who runs a job.

    Args:
        line: String, what a worker wrote.
        environ: Environment variables; whoever sets TensorFlow's level to 0 sees
            all lines. Defaults to `os.environ`.

    Returns:
        Bool.

    Example:

    >>> is_noise("I0000 00:00:1.5  7 server.cc:467] Started server", {})
    True
    >>> is_noise("I0000 00:00:1.5  7 server.cc:467] Started", {LEVEL: "2"})
    True
    >>> is_noise("Epoch 1/2", {})
    False
    """
    if environ.get(LEVEL) == "0":
        return False
    if _INFO.match(line):
        return True
    return _NO_GPU.match(line) is not None and not visible_gpus(environ)


def is_of_peers(line: str) -> bool:
    """Return whether TensorFlow says that others have ended, as all do after Ctrl-C.

    Args:
        line: String, what a worker wrote after Ctrl-C.

    Returns:
        Bool.

    Example:

    >>> is_of_peers("E0000 00:00:1.5  7 ring_alg.cc:291] Aborting RingReduce")
    True
    >>> is_of_peers("F0000 00:00:1.5  7 env.cc:7] Check failed")
    False
    """
    return _OF_PEERS.match(line) is not None


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Keep noise from this process's stderr while TensorFlow is imported.

    What TensorFlow writes before it has read its level goes past Python, so the
    descriptor itself is a pipe meanwhile. A process of its own reads it, and passes on
    what is no noise: that is seen even if TensorFlow takes this process down.
    """
    is_loaded = "tensorflow" in sys.modules
    if is_loaded or not hasattr(os, "fork") or not os.path.exists("/dev/fd/2"):
        yield
        return
    reader, writer = os.pipe()
    kept = os.dup(2)
    child = os.fork()
    if child == 0:
        os.close(writer)
        _pass_on(reader)
    os.close(reader)
    os.dup2(writer, 2)
    os.close(writer)
    try:
        yield
    finally:
        os.dup2(kept, 2)  # now nobody writes to the pipe
        os.close(kept)
        os.waitpid(child, 0)


def _pass_on(fd: int) -> None:
    """Copy lines to stderr until there are no more; ends the process."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with open(fd, "rb") as lines:
            for line in lines:
                if not is_noise(line.decode("utf-8", "replace")):
                    os.write(2, line)
    finally:
        os._exit(0)
