"""Lines between `tfdp run --hosts` and the launchers of its hosts."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import tfdp

BEAT = b".\n"
BEAT_SECONDS = 2.0
# A machine that was suspended, or a network that has gone.
SILENT_SECONDS = 20.0
MOST_BYTES = 1 << 20


def banner() -> str:
    """Return the first line of a launcher, which tells its version.

    Example:

    >>> version_of(banner()) == tfdp.__version__
    True
    """
    return json.dumps({"tfdp": tfdp.__version__, "pid": os.getpid()})


def version_of(line: str) -> str | None:
    """Return the version that a line tells if it is a banner, or else `None`.

    Args:
        line: String; a shell's start-up files may print others before it.

    Example:

    >>> version_of("Welcome!") is None
    True
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    version = found.get("tfdp") if isinstance(found, dict) else None
    return version if isinstance(version, str) else None


def order(arguments: Sequence[str], secret: str, grace_seconds: float) -> bytes:
    """Return the line that tells a launcher what to run.

    Args:
        arguments: Sequence of strings, of the command `tfdp`.
        secret: String, the job's.
        grace_seconds: Float, of its workers.
    """
    said = {"arguments": list(arguments), "secret": secret, "grace": grace_seconds}
    return json.dumps(said).encode() + b"\n"


def signal_line(signum: int) -> bytes:
    """Return the line that sends a launcher a signal.

    Args:
        signum: Int.
    """
    return f"signal {int(signum)}\n".encode()
