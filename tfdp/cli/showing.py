"""Screen of a command that starts processes, and its end."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

from tfdp.cli.json_screen import JsonScreen
from tfdp.cli.screen import Screen
from tfdp.cli.signals import SignalPipe

# For who reads the output, once the job was told to end.
_LAST_LINES_SECONDS = 2.0


@contextlib.contextmanager
def showing(
    signals: SignalPipe, until: float | None, log_format: str = "text"
) -> Iterator[Screen]:
    """Make a screen; in the end wait for its reader, unless the job is to end.

    Args:
        signals: The `SignalPipe`.
        until: Float, by `time.monotonic()`, when the job is stopped, or `None`.
        log_format: `"text"` or `"json"`. Defaults to `"text"`.

    Yields:
        `Screen`.
    """
    screen = JsonScreen() if log_format == "json" else Screen()
    try:
        yield screen
    finally:
        end = math.inf
        while not screen.close(timeout_seconds=0.1) and time.monotonic() < end:
            signals.read()
            if signals.received or (until and time.monotonic() > until):
                end = min(end, time.monotonic() + _LAST_LINES_SECONDS)
