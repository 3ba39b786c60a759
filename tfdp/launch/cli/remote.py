"""Launcher of one host of `tfdp run --hosts`, at the remote end of an ssh connection.

    python -m tfdp.launch.cli.remote

It prints its version, and reads one line of JSON from stdin: the arguments of
`tfdp run` and the job's secret, which is thus on no command line. Further lines are
heartbeats and signals. When stdin ends, or is silent for 20 s, the connection is lost,
and all processes of the job on this host are ended.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from tfdp.launch.cli.main import cli, run_command
from tfdp.launch.cli.remote_line import BEAT, MAX_BYTES, SILENT_SECONDS, banner

_STDIN = 0
_CHUNK_BYTES = 4096
# A launcher that hangs is killed this many seconds after the grace period of its
# workers.
_END_SECONDS = 15.0


def _lines() -> Iterator[bytes]:
    """Yield the lines of stdin, as bytes, until the connection is lost."""
    data = b""
    while len(data) <= MAX_BYTES:
        ready, _, _ = select.select([_STDIN], [], [], SILENT_SECONDS)
        chunk = os.read(_STDIN, _CHUNK_BYTES) if ready else b""
        if not chunk:
            return
        *lines, data = (data + chunk).split(b"\n")
        yield from lines


def _forward_signals(lines: Iterator[bytes], grace_seconds: float) -> None:
    """Send this process the signals that stdin orders; end it if stdin has ended.

    It is ended by SIGHUP, and by SIGKILL `_END_SECONDS` after the grace period.

    Args:
        lines: Iterator of the lines of stdin.
        grace_seconds: Float, grace period of the workers.
    """
    for line in lines:
        word, _, number = line.partition(b" ")
        if word == b"signal" and number.isdigit():
            os.kill(os.getpid(), int(number))
    os.kill(os.getpid(), signal.SIGHUP)
    # SIGHUP lets the workers end within their grace period. If this process still runs
    # after it, SIGKILL leaves no worker behind: the guard of the workers outlives this
    # process, and kills them.
    time.sleep(grace_seconds + _END_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run the command `tfdp` with the arguments that arrive on stdin, from ssh.

    The version of tfdp is printed first. While the command runs, a thread sends this
    process the signals that further lines of stdin order.
    """
    # The process that started sshd may ignore SIGHUP, and child processes inherit that,
    # so the default is restored.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    print(banner(), flush=True)
    # stdout and stderr become one stream, so the lines of workers and launcher keep
    # their order.
    os.dup2(sys.stdout.fileno(), sys.stderr.fileno())
    lines = _lines()
    line = next((line for line in lines if line != BEAT.strip()), None)
    if line is None:
        sys.exit(128 + signal.SIGHUP)
    order: dict[str, Any] = json.loads(line)
    threading.Thread(
        target=_forward_signals, args=(lines, float(order["grace"])), daemon=True
    ).start()
    run_command(cli, "tfdp", list(order["arguments"]), str(order["secret"]))


if __name__ == "__main__":
    main()
