"""Lines of TensorFlow's log that are kept from the screen, and not from the logs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from tfdp.cli.launch import visible_gpus

# Before it has read its level, TensorFlow writes whatever that says.
LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# Of files in C++: a script that logs by absl is heard.
_PLACE = r"\d{4} [\d:.]+ +\d+ [\w./-]+\.(cc|h):\d+\] "
_INFO = re.compile(
    rf"I{_PLACE}|WARNING: All log messages before absl::InitializeLog\(\)"
)
# An error only where there is a GPU.
_NO_GPU = re.compile(rf"E{_PLACE}failed call to cuInit")


def is_noise(line: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a line of TensorFlow's says nothing to who runs a job.

    Args:
        line: String, what a worker wrote.
        environ: Environment variables; whoever sets TensorFlow's level sees all
            lines. Defaults to `os.environ`.

    Returns:
        Bool.

    Example:

    >>> is_noise("I0000 00:00:1.5  7 server.cc:467] Started server", {})
    True
    >>> is_noise("Epoch 1/2", {})
    False
    """
    if LEVEL in environ:
        return False
    if _INFO.match(line):
        return True
    return _NO_GPU.match(line) is not None and not visible_gpus(environ)
