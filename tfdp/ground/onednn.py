"""oneDNN's kernels, which TensorFlow enables by default on some processors only.

This module does not import TensorFlow, which reads the environment variable once, when
it is imported.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

VARIABLE = "TF_ENABLE_ONEDNN_OPTS"
# TensorFlow enables oneDNN by default on processors with one of these features.
# `enable_onednn` does not set the variable there, since setting it costs memory: 40 of
# 700 MB in a transformer. Checked on TensorFlow 2.21.0.
_ENABLED_BY_DEFAULT = frozenset(
    ["avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16"]
)
_CPUINFO = Path("/proc/cpuinfo")


def enable_onednn() -> None:
    """Set `TF_ENABLE_ONEDNN_OPTS=1` where TensorFlow would leave oneDNN's kernels off.

    A value that is set stays. Child processes, such as those of `tfdp run`, inherit it.
    """
    if "tensorflow" not in sys.modules and is_disabled_by_default():
        os.environ.setdefault(VARIABLE, "1")


def is_disabled_by_default() -> bool:
    """Return whether TensorFlow disables oneDNN by default on this x86 processor."""
    flags = cpu_flags()
    return bool(flags) and _ENABLED_BY_DEFAULT.isdisjoint(flags)


def cpu_flags() -> frozenset[str]:
    """Return the features of an x86 processor by Linux's names; empty for others."""
    with contextlib.suppress(OSError), _CPUINFO.open() as lines:
        for line in lines:
            name, _, flags = line.partition(":")
            if name.strip() == "flags":  # ARM processors list "Features" instead
                return frozenset(flags.split())
    return frozenset()
