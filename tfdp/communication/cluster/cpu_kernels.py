"""TensorFlow's kernels on CPUs: those of oneDNN, which some processors go without.

Without AVX-512, TensorFlow multiplies by a transposed matrix, as each gradient of a
dense layer does, several times slower than oneDNN would: see `tfdp.ground.onednn`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfdp.ground import _compat, user_code
from tfdp.ground.onednn import VARIABLE, cpu_flags, is_left_off

_NAME = "oneDNN"
# A gradient that takes this many times as long as the forward pass has a slow kernel.
_SLOW = 3.0
# Rows, and units of a dense layer: some milliseconds where it is slow.
_ROWS, _UNITS = 32, 1024
_REPEATS = 5
# Flags of x86 processors in /proc/cpuinfo: the widest vectors, and what is beside them.
_VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX"}
_BESIDE = {"avx512_vnni": "VNNI", "avx_vnni": "VNNI", "avx512_bf16": "bfloat16"}
_BESIDE |= {"amx_tile": "AMX"}


def warn_of_slow_kernels() -> None:
    """Warn, once, of what it costs that TensorFlow has left oneDNN's kernels off.

    It takes some milliseconds there. Who has set the variable has decided.
    """
    if not user_code.is_new("slow kernels", warn_of_slow_kernels):
        return
    if VARIABLE in os.environ or _compat.uses_onednn() or not is_left_off():
        return
    factor = gradient_factor()
    if factor < _SLOW:
        return
    user_code.warn(
        f"The gradient of a dense layer takes {factor:.0f} times as long here as its "
        "forward pass: TensorFlow has left oneDNN's kernels off on this processor; "
        f"set {VARIABLE}=1, or import tfdp before TensorFlow and Keras"
    )


def describe() -> str:
    """Say which kernels TensorFlow uses on the CPU, and how good they are."""
    factor = gradient_factor()
    text = (
        f"{chosen()}: the gradient of a dense layer takes {factor:.1f} forward passes"
    )
    is_slow = factor >= _SLOW and not _compat.uses_onednn()
    return f"{text}; set {VARIABLE}=1" if is_slow else text


def chosen() -> str:
    """Name what the processor has, and whose kernels TensorFlow has chosen for it.

    It starts no device.

    Example:

    >>> chosen().rpartition("; ")[2] in ("oneDNN", "TensorFlow's own, oneDNN is off")
    True
    """
    kernels = "oneDNN" if _compat.uses_onednn() else "TensorFlow's own, oneDNN is off"
    flags = cpu_flags()
    vectors = [name for flag, name in _VECTORS.items() if flag in flags][:1]
    beside = dict.fromkeys(name for flag, name in _BESIDE.items() if flag in flags)
    features = ", ".join([*vectors, *beside])
    return f"{features}; {kernels}" if features else kernels


def versions() -> dict[str, str]:
    """Return what decides the last digits of sums beside the versions of packages."""
    return {_NAME: "on" if _compat.uses_onednn() else "off"}


def change_since(made_by: Mapping[str, str]) -> str:
    """Say what differs from the kernels of a run that goes on.

    Args:
        made_by: Mapping of strings, the `versions` that were saved with it.

    Returns:
        String, a clause, or `""` where nothing differs or is known.
    """
    saved, own = made_by.get(_NAME), versions()[_NAME]
    if saved in (None, own):
        return ""
    return (
        f"the run was saved with oneDNN's kernels {saved}, and goes on with them {own} "
        f"({VARIABLE}): the last digits are not those of a run without interruption"
    )


def gradient_factor() -> float:
    """Measure how long a gradient of a dense layer takes.

    Returns:
        Float, in units of the forward pass of the same layer: one or two with good
        kernels.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        rows, kernel = tf.ones([_ROWS, _UNITS]), tf.ones([_UNITS, _UNITS])
        forward = _seconds(lambda: tf.matmul(rows, kernel))
        backward = _seconds(lambda: tf.matmul(rows, kernel, transpose_b=True))
    return backward / forward


def _seconds(compute: Callable[[], Any]) -> float:
    compute()
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        compute()
        times.append(time.perf_counter() - begin)
    return min(times)
