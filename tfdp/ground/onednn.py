"""oneDNN's kernels, which TensorFlow turns on by itself on some processors only.

Beside `tfdp.ground.user_code`: TensorFlow reads the variable once, when it is imported.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

VARIABLE = "TF_ENABLE_ONEDNN_OPTS"
# With one of these TensorFlow turns them on by itself. To set the variable there, too,
# costs memory: 40 MB of 700 in a transformer. Checked on TensorFlow 2.21.0.
_BY_ITSELF = frozenset(
    ["avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16"]
)
_CPUINFO = Path("/proc/cpuinfo")


def ask_for_onednn() -> None:
    """Have TensorFlow use oneDNN's kernels where it would not, and nobody has decided.

    A process inherits it from the one that starts it, such as `tfdp run`.
    """
    if "tensorflow" not in sys.modules and is_left_off():
        os.environ.setdefault(VARIABLE, "1")


def is_left_off() -> bool:
    """Return whether TensorFlow leaves oneDNN's kernels off on this x86 processor."""
    flags = cpu_flags()
    return bool(flags) and _BY_ITSELF.isdisjoint(flags)


def cpu_flags() -> frozenset[str]:
    """Return the features of an x86 processor by Linux's names; of others none."""
    with contextlib.suppress(OSError), _CPUINFO.open() as lines:
        for line in lines:
            name, _, flags = line.partition(":")
            if name.strip() == "flags":  # those of ARM are "Features"
                return frozenset(flags.split())
    return frozenset()
