"""Sums of NumPy arrays in a fixed order, those of half precision in float32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfdp.transport.communicator import Array

_HALVES = ("float16", "bfloat16")


def is_half(dtype: np.dtype) -> bool:
    """Whether values of a dtype are added in float32 and rounded once.

    Args:
        dtype: `np.dtype`; bfloat16 is that of `ml_dtypes`.

    Returns:
        Bool.

    Example:
    >>> is_half(np.dtype("float16"))
    True
    """
    return dtype.name in _HALVES


def sum_into(target: Array, addends: Sequence[Array]) -> None:
    """Set an array to the sum of others, added from the first to the last.

    NumPy's add releases the interpreter lock. Values of half precision are added in
    float32 and rounded once, to nearest even.

    Args:
        target: Flat array; it may be one of `addends`.
        addends: Arrays of the same length and dtype, at least one.

    Example:
    >>> total = np.zeros(2)
    >>> sum_into(total, [np.array([1.0, 2.0]), np.array([10.0, 20.0])])
    >>> total
    array([11., 22.])
    """
    if len(addends) == 1:
        if addends[0] is not target:
            target[:] = addends[0]
        return
    # A sum may overflow, or have no value: that is what the caller looks for.
    with np.errstate(all="ignore"):
        _sum_into(target, addends)


def _sum_into(target: Array, addends: Sequence[Array]) -> None:
    if is_half(target.dtype) and len(addends) > 2:
        target[:] = _sum(*(addend.astype(np.float32) for addend in addends))
    elif any(addend is target for addend in addends[2:]):
        target[:] = _sum(*addends)
    else:
        # Of two halves, too: NumPy adds them in float32, and rounds.
        np.add(addends[0], addends[1], out=target)
        for addend in addends[2:]:
            np.add(target, addend, out=target)


def _sum(first: Array, second: Array, *rest: Array) -> Array:
    total = first + second
    for addend in rest:
        np.add(total, addend, out=total)
    return total
