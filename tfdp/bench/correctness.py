"""Inputs of collectives whose results are known, and how many elements are wrong."""

from __future__ import annotations

import numpy as np

# A prime: data that comes out at another place is noticed, for places are shifted
# by lengths of pieces, which it does not divide as a rule.
_PERIOD = 7
# Sums of small whole numbers are exact in all types: bfloat16 holds them up to 256.
MOST_REPLICAS_OF = {"bfloat16": 256 // _PERIOD, "float16": 2048 // _PERIOD}


def input_of(position: int, length: int) -> np.ndarray:
    """What a replica contributes: small whole numbers that depend on its place.

    Args:
        position: Int, its place in the group.
        length: Int, number of elements.

    Returns:
        Array of shape `[length]`, int64.

    Example:

    >>> input_of(1, 3)
    array([3, 4, 5])
    """
    return (np.arange(length) + 3 * position) % _PERIOD


def expected(
    collective: str, position: int, num_replicas: int, length: int
) -> np.ndarray:
    """What a replica has to get.

    Args:
        collective: String, one of `tfdp.bench.bandwidth.COLLECTIVES`; the replica
            at position 0 broadcasts.
        position: Int, place of the replica in the group.
        num_replicas: Int, number of replicas.
        length: Int, elements that each replica contributes.

    Returns:
        Array of rank one, int64.

    Example:

    >>> expected("all_reduce", 0, 2, 4), expected("reduce_scatter", 1, 2, 4)
    (array([3, 5, 7, 9]), array([7, 9]))
    """
    if collective == "broadcast":
        return input_of(0, length)
    inputs = [input_of(place, length) for place in range(num_replicas)]
    if collective == "all_gather":
        return np.concatenate(inputs)
    total = np.sum(inputs, axis=0)
    if collective == "all_reduce":
        return total
    share = length // num_replicas
    return total[position * share : (position + 1) * share]


def num_wrong(result: np.ndarray, wanted: np.ndarray) -> int:
    """How many elements are not what they must be.

    Args:
        result: Array of any type.
        wanted: Array of whole numbers.

    Returns:
        Int: elements that differ, that are no number, and that lack or are too
        many.

    Example:

    >>> num_wrong(np.array([0.0, 1.0, np.nan]), np.array([0, 2, 3]))
    2
    """
    common = min(len(result), len(wanted))
    differ = result[:common].astype(np.float64) != wanted[:common]
    return int(np.sum(differ)) + max(len(result), len(wanted)) - common
