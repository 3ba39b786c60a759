"""Sums of NumPy arrays in a fixed order; half precision is summed in float32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfdp.communication.transport.communicator import Array

_HALVES = ("float16", "bfloat16")


def is_half(dtype: np.dtype) -> bool:
    """Return whether a dtype is float16 or bfloat16; these are added in float32.

    Args:
        dtype: `np.dtype`, for bfloat16 the one of `ml_dtypes`.

    Returns:
        Bool.

    Example:
    >>> is_half(np.dtype("float16"))
    True
    """
    return dtype.name in _HALVES


def sum_into(target: Array, addends: Sequence[Array]) -> None:
    """Set an array to the sum of others, added in order from the first to the last.

    NumPy's add releases the GIL. Values of half precision are added in
    float32 and rounded once, to nearest even.

    Args:
        target: Flat array; it may be one of `addends`, or share its memory.
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
    # A sum may overflow or be NaN, which the caller handles, so NumPy must not warn.
    with np.errstate(all="ignore"):
        _sum_into(target, addends)


def _sum_into(target: Array, addends: Sequence[Array]) -> None:
    """Set `target` to the sum of at least two addends, for `sum_into`.

    `target` may share memory with an addend.
    """
    if is_half(target.dtype):
        # Halves are added in float32, which rounds a sum only once. NumPy's own sum of
        # two halves has the same values, but converts element by element, which takes
        # two to three times as long for bfloat16.
        first, *others = (addend.astype(np.float32) for addend in addends)
        target[:] = _add_to(first, others)
    elif any(np.may_share_memory(addend, target) for addend in addends[2:]):
        target[:] = _add_to(addends[0] + addends[1], addends[2:])
    else:
        np.add(addends[0], addends[1], out=target)
        _add_to(target, addends[2:])


def _add_to(total: Array, addends: Sequence[Array]) -> Array:
    """Add arrays to a total in place, and return it."""
    for addend in addends:
        np.add(total, addend, out=total)
    return total


def mean_by_samples(parts: Sequence[tuple[float, Sequence[Array]]]) -> list[Array]:
    """Average the arrays at each position of several lists, weighted by samples.

    Args:
        parts: Sequence of pairs of a number of samples, the weight, and a list of
            arrays. The arrays at one position have the same shape in all lists.

    Returns:
        List of arrays, one for each position, of the dtypes of the first list; zeros if
        there are no samples.

    Example:
    >>> mean_by_samples([(3.0, [np.array([1.0])]), (1.0, [np.array([5.0])])])
    [array([2.])]
    """
    total = sum(samples for samples, _ in parts) or 1.0
    shares = [samples / total for samples, _ in parts]
    return [
        np.asarray(
            sum(share * array for share, array in zip(shares, column, strict=True)),
            column[0].dtype,
        )
        for column in zip(*(arrays for _, arrays in parts), strict=True)
    ]
