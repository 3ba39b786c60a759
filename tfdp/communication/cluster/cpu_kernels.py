"""Whether TensorFlow uses oneDNN's kernels on CPUs, and the cost if it does not.

TensorFlow does not use oneDNN on processors without AVX-512. Its own kernel multiplies
by a transposed matrix, as each gradient of a dense layer does, several times slower
than oneDNN: see `tfdp.ground.onednn`.
"""

from __future__ import annotations

import os
import timeit
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfdp.ground import user_code
from tfdp.ground._compat import runtime
from tfdp.ground.onednn import VARIABLE, cpu_flags, is_disabled_by_default

_NAME = "oneDNN"
# Good kernels compute a gradient in one to two times the time of the forward pass. From
# this factor on, the user is warned of a slow kernel.
_SLOW_FACTOR = 3.0
# Batch rows and units of the dense layer that is measured, few enough that the
# measurement takes only some milliseconds, even with a slow kernel.
_ROWS, _UNITS = 32, 1024
_REPEATS = 5
# Names of x86 processor flags in /proc/cpuinfo, which decide what kernels can run:
# vector widths, the widest first because only that is shown, and instructions for low
# precision or matrices.
_VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX"}
_EXTENSIONS = {"avx512_vnni": "VNNI", "avx_vnni": "VNNI", "avx512_bf16": "bfloat16"}
_EXTENSIONS |= {"amx_tile": "AMX"}


def warn_of_slow_kernels() -> None:
    """Warn once if gradients are slow because TensorFlow does not use oneDNN.

    The measurement takes some milliseconds. There is no warning if the user has set
    the environment variable for oneDNN.
    """
    if not user_code.record_if_new("slow kernels", warn_of_slow_kernels):
        return
    if VARIABLE in os.environ or runtime.uses_onednn() or not is_disabled_by_default():
        return
    factor = gradient_factor()
    if factor < _SLOW_FACTOR:
        return
    user_code.warn(
        f"The gradient of a dense layer takes {factor:.0f} times as long here as its "
        "forward pass: TensorFlow has left oneDNN's kernels off on this processor; "
        f"set {VARIABLE}=1, or import tfdp before TensorFlow and Keras"
    )


def describe() -> str:
    """Describe TensorFlow's CPU kernels and how slow a gradient is with them.

    Returns:
        String such as `"AVX2; oneDNN: the gradient of a dense layer takes 1.9 forward
        passes"`.
    """
    factor = gradient_factor()
    text = (
        f"{describe_kernels()}: the gradient of a dense layer takes {factor:.1f} "
        "forward passes"
    )
    is_slow = factor >= _SLOW_FACTOR and not runtime.uses_onednn()
    return f"{text}; set {VARIABLE}=1" if is_slow else text


def describe_kernels() -> str:
    """Describe the CPU's vector instructions and the kernels that TensorFlow uses.

    No TensorFlow device is started.

    Returns:
        String such as `"AVX-512, VNNI; oneDNN"`.

    Example:

    >>> kernels = describe_kernels().rpartition("; ")[2]
    >>> kernels in ("oneDNN", "TensorFlow's own, oneDNN is off")
    True
    """
    kernels = "oneDNN" if runtime.uses_onednn() else "TensorFlow's own, oneDNN is off"
    flags = cpu_flags()
    vectors = [name for flag, name in _VECTORS.items() if flag in flags][:1]
    extensions = dict.fromkeys(
        name for flag, name in _EXTENSIONS.items() if flag in flags
    )
    features = ", ".join([*vectors, *extensions])
    return f"{features}; {kernels}" if features else kernels


def versions() -> dict[str, str]:
    """Return whether oneDNN is on, as `{"oneDNN": "on"}` or `{"oneDNN": "off"}`.

    It is saved together with the versions of packages, which also change rounding.
    """
    return {_NAME: "on" if runtime.uses_onednn() else "off"}


def change_since(made_by: Mapping[str, str]) -> str:
    """Describe a change of oneDNN, on or off, since the run that is resumed.

    Args:
        made_by: Mapping of strings, the `versions` that were saved with the run.

    Returns:
        String, a clause, or `""` without a change or if the saved state is unknown.
    """
    saved, current = made_by.get(_NAME), versions()[_NAME]
    if saved in (None, current):
        return ""
    return (
        f"the run was saved with oneDNN's kernels {saved}, and continues with them "
        f"{current} ({VARIABLE}): the last digits differ from those of a run without "
        "interruption"
    )


def gradient_factor() -> float:
    """Measure how long a gradient of a dense layer takes, in forward passes.

    Returns:
        Float, the ratio to the time of the layer's forward pass: 1 to 2 with good
        kernels.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        rows, kernel = tf.ones([_ROWS, _UNITS]), tf.ones([_UNITS, _UNITS])
        forward = _seconds(lambda: tf.matmul(rows, kernel))
        backward = _seconds(lambda: tf.matmul(rows, kernel, transpose_b=True))
    return backward / forward


def _seconds(compute: Callable[[], Any]) -> float:
    """Return the shortest run time of `compute`, in seconds, after a run to warm up."""
    return min(timeit.repeat(compute, setup=compute, number=1, repeat=_REPEATS))
