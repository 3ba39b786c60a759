"""Definitions of nccl-tests: bandwidths, table rows, and inputs with known results."""

from __future__ import annotations

import dataclasses

import numpy as np

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")

# Only all-reduce has a choice of algorithms; rows of other collectives show this
# instead of a name.
NO_ALGORITHM = "-"
# Only workers know which communication backend was chosen: the variant of this name
# returns it.
BACKEND = "backend"
# Inputs repeat with this period, a prime, so misplaced data is noticed: data is
# misplaced by multiples of a shard's length, which 7 rarely divides.
_PERIOD = 7
# Sums of the inputs are exact for at most this many replicas: bfloat16 has exact
# integers up to 256, float16 up to 2048.
MAX_REPLICAS_OF = {"bfloat16": 256 // _PERIOD, "float16": 2048 // _PERIOD}


@dataclasses.dataclass(frozen=True)
class Row:
    """Results of one collective, algorithm and size, in the terms of nccl-tests.

    Args:
        collective: String, one of `COLLECTIVES`.
        algorithm: String, name of the algorithm, or `NO_ALGORITHM`.
        size_bytes: Int, size of the larger of input and output of a replica.
        count: Int, number of elements in `size_bytes`.
        dtype: String, type of the elements.
        seconds: Float, median duration of a call.
        algbw_gb_per_second: Float, the result of `algorithm_bandwidth`.
        busbw_gb_per_second: Float, the bandwidth of the algorithm times `bus_factor`.
        num_wrong: Int, number of wrong elements on all replicas together.
    """

    collective: str
    algorithm: str
    size_bytes: int
    count: int
    dtype: str
    seconds: float
    algbw_gb_per_second: float
    busbw_gb_per_second: float
    num_wrong: int


def algorithm_bandwidth(num_bytes: int, seconds: float) -> float:
    """Return the bandwidth of an algorithm, "algbw": size over time.

    Args:
        num_bytes: Int, size of the larger of input and output of a replica.
        seconds: Float, duration of the collective.

    Returns:
        Float, GB/s (10^9 bytes).

    Example:

    >>> algorithm_bandwidth(10**9, 2.0)
    0.5

    Source: https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md.
    """
    return num_bytes / seconds / 1e9


def bus_factor(collective: str, num_replicas: int) -> float:
    """Return the ratio of bus bandwidth to algorithm bandwidth of a collective.

    This ratio times the algorithm's bandwidth is "busbw", which is comparable to the
    speed of the hardware for any collective and number of replicas.

    Args:
        collective: String, one of `COLLECTIVES`.
        num_replicas: Int, number of replicas.

    Returns:
        Float, the ratio.

    Example:

    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4)
    (1.5, 0.75)

    Source: https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md.
    """
    fraction = (num_replicas - 1) / num_replicas
    factors = {
        "all_reduce": 2 * fraction,
        "reduce_scatter": fraction,
        "all_gather": fraction,
        "broadcast": 1.0,
    }
    return factors[collective]


def padded_bytes(num_bytes: int, item_bytes: int, num_replicas: int) -> int:
    """Round a size up, so that all replicas have the same number of elements.

    Args:
        num_bytes: Int, the requested size.
        item_bytes: Int, size of an element.
        num_replicas: Int, number of replicas.

    Returns:
        Int, the rounded size; at least one element for each replica.

    Example:

    >>> padded_bytes(1000, 4, 3)
    1008
    """
    unit = item_bytes * num_replicas
    return max(1, -(-num_bytes // unit)) * unit


def input_of(position: int, length: int) -> np.ndarray:
    """Return the input of a replica: small integers that depend on its position.

    Args:
        position: Int, position of the replica in the group.
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
    """Return the expected result of a collective on a replica.

    Each replica contributes its `input_of`; reductions are sums.

    Args:
        collective: String, one of `COLLECTIVES`; the replica at position 0 broadcasts.
        position: Int, position of the replica in the group.
        num_replicas: Int, number of replicas.
        length: Int, number of elements that each replica contributes.

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
    shard_length = length // num_replicas
    return total[position * shard_length : (position + 1) * shard_length]


def num_wrong(result: np.ndarray, wanted: np.ndarray) -> int:
    """Count the wrong elements of a result.

    Args:
        result: Array of any type, the result.
        wanted: Array of integers, the expected result.

    Returns:
        Int, number of elements that differ, are NaN, are missing or are surplus.

    Example:

    >>> num_wrong(np.array([0.0, 1.0, np.nan]), np.array([0, 2, 3]))
    2
    """
    common = min(len(result), len(wanted))
    differ = result[:common].astype(np.float64) != wanted[:common]
    return int(np.sum(differ)) + max(len(result), len(wanted)) - common
