"""Launcher of one host of `tfdp run --hosts`, at the other end of an ssh connection.

    python -m tfdp.launch.cli.remote

It says which version it is, and reads from its standard input one line of JSON: the
arguments of `tfdp run` and the job's secret, which is on no command line. Further lines
are signs of life and signals. When the input ends, or is silent for too long, the
connection has gone, and all that runs here ends.
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
from tfdp.launch.cli.remote_line import BEAT, MOST_BYTES, SILENT_SECONDS, banner

_STDIN = 0
_CHUNK_BYTES = 4096
# After the grace of the workers: for all that the launcher does in its end.
_END_SECONDS = 15.0


def _lines() -> Iterator[bytes]:
    """Yield the lines of the standard input, until the connection has gone."""
    data = b""
    while len(data) <= MOST_BYTES:
        ready, _, _ = select.select([_STDIN], [], [], SILENT_SECONDS)
        chunk = os.read(_STDIN, _CHUNK_BYTES) if ready else b""
        if not chunk:
            return
        *lines, data = (data + chunk).split(b"\n")
        yield from lines


def _obey(lines: Iterator[bytes], grace_seconds: float) -> None:
    """Pass signals on to this process, and end it with the connection."""
    for line in lines:
        word, _, number = line.partition(b" ")
        if word == b"signal" and number.isdigit():
            os.kill(os.getpid(), int(number))
    os.kill(os.getpid(), signal.SIGHUP)
    # The guard of the workers outlives this process.
    time.sleep(grace_seconds + _END_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run `tfdp run` as the other end of the connection orders it."""
    # Whoever has started sshd may have ignored it.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    print(banner(), flush=True)
    # One stream keeps the order of workers' lines and the launcher's words.
    os.dup2(sys.stdout.fileno(), sys.stderr.fileno())
    lines = _lines()
    line = next((line for line in lines if line != BEAT.strip()), None)
    if line is None:
        sys.exit(128 + signal.SIGHUP)
    order: dict[str, Any] = json.loads(line)
    threading.Thread(
        target=_obey, args=(lines, float(order["grace"])), daemon=True
    ).start()
    run_command(cli, "tfdp", list(order["arguments"]), str(order["secret"]))


if __name__ == "__main__":
    main()
