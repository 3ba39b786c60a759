"""Filter of TensorFlow's log lines that the logs keep but the screen leaves out."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping

from tfdp.communication.cluster.gpus import visible_gpus

# Environment variable of TensorFlow's log level. TensorFlow reads the variable only
# after it has logged some lines, which therefore appear at any level.
LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# Matches time, thread and C++ file of TensorFlow's log lines. Lines that a script logs
# by absl come from Python files, so they do not match.
_PLACE = r"\d{4} [\d:.]+ +\d+ [\w./-]+\.(cc|h):\d+\] "
_INFO = re.compile(
    rf"I{_PLACE}|WARNING: All log messages before absl::InitializeLog\(\)"
)
# TensorFlow logs this line as an error on a machine without GPUs, where it is harmless.
_NO_GPU = re.compile(rf"E{_PLACE}failed call to cuInit")
# Matches lines that TensorFlow logs about lost connections to peers. After Ctrl-C all
# workers exit, so these lines tell the user nothing.
_PEER_FAILURE = re.compile(
    rf"[WE]{_PLACE}|Additional GRPC error information|:[A-Z]+:Error received from peer|"
    r"The error could be from a previous operation|\s*\[\[\{\{"
)


def is_noise(line: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a line is an INFO log of TensorFlow or its error on a missing GPU.

    Args:
        line: String, a line of a worker's output.
        environ: Mapping of environment variables. No line is noise if TensorFlow's
            log level is 0. Defaults to `os.environ`.

    Returns:
        Bool, whether to leave the line out.

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


def may_be_peer_failure(line: str) -> bool:
    """Return whether a line of TensorFlow's log may report the failure of a peer.

    All warnings and errors of its C++ code may. After Ctrl-C all workers exit, so such
    lines are noise.

    Args:
        line: String, a line of a worker's output after Ctrl-C.

    Returns:
        Bool, whether to leave the line out.

    Example:

    >>> may_be_peer_failure("E0000 00:00:1.5  7 ring_alg.cc:291] Aborting RingReduce")
    True
    >>> may_be_peer_failure("F0000 00:00:1.5  7 env.cc:7] Check failed")
    False
    """
    return _PEER_FAILURE.match(line) is not None


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Filter noise from this process's stderr while TensorFlow is imported.

    TensorFlow writes to the file descriptor directly, which is therefore replaced by a
    pipe. A child process reads the pipe and copies all lines but noise to stderr, so
    that lines appear even if TensorFlow crashes this process.
    """
    is_loaded = "tensorflow" in sys.modules
    if is_loaded or not hasattr(os, "fork") or not os.path.exists("/dev/fd/2"):
        yield
        return
    reader, writer = os.pipe()
    stderr = os.dup(2)
    child = os.fork()
    if child == 0:
        os.close(writer)
        _filter_lines(reader)
    os.close(reader)
    os.dup2(writer, 2)
    os.close(writer)
    try:
        yield
    finally:
        # `dup2` closes the last writing end of the pipe, so the child, which reads from
        # the pipe, exits.
        os.dup2(stderr, 2)
        os.close(stderr)
        os.waitpid(child, 0)


def _filter_lines(fd: int) -> None:
    """Copy lines from the pipe `fd` to stderr, except noise; exit when `fd` ends."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with open(fd, "rb") as lines:
            for line in lines:
                if not is_noise(line.decode("utf-8", "replace")):
                    os.write(2, line)
    finally:
        os._exit(0)
