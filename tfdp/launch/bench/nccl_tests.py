"""Terms of nccl-tests: bandwidths, a row of its table, inputs with known results."""

from __future__ import annotations

import dataclasses

import numpy as np

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")

# Only an all-reduce has a choice.
NO_ALGORITHM = "-"
# The arm of a worker that names what carries its bytes.
BACKEND = "backend"
# A prime: data that comes out at another place is noticed, for places are shifted
# by lengths of pieces, which it does not divide as a rule.
_PERIOD = 7
# Sums of small whole numbers are exact in all types: bfloat16 holds them up to 256.
MOST_REPLICAS_OF = {"bfloat16": 256 // _PERIOD, "float16": 2048 // _PERIOD}


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table: the names are those of nccl-tests.

    Args:
        collective: String.
        algorithm: String, or `NO_ALGORITHM`.
        size_bytes: Int.
        count: Int, elements.
        dtype: String.
        seconds: Float, the median.
        algbw_gb_per_second: Float.
        busbw_gb_per_second: Float.
        num_wrong: Int, wrong elements on all replicas together.
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
    """The size of the data over the time that the collective took ("algbw").

    Args:
        num_bytes: Int, size of the larger of input and output of a replica.
        seconds: Float.

    Returns:
        Float, GB/s (10^9 bytes).

    Example:

    >>> algorithm_bandwidth(10**9, 2.0)
    0.5

    Source: https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md.
    """
    return num_bytes / seconds / 1e9


def bus_factor(collective: str, num_replicas: int) -> float:
    """Ratio of bus bandwidth to algorithm bandwidth of a collective.

    Times the algorithm's bandwidth it is "busbw", which compares with the speed of
    the hardware whatever the collective and the number of replicas.

    Args:
        collective: String, one of `COLLECTIVES`.
        num_replicas: Int, number of replicas.

    Returns:
        Float.

    Raises:
        ValueError: If there is no such collective.

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
    if collective not in factors:
        raise ValueError(
            f"The collective must be one of {COLLECTIVES}. Received: {collective!r}"
        )
    return factors[collective]


def padded_bytes(num_bytes: int, item_bytes: int, num_replicas: int) -> int:
    """The size that is really run: every replica has as many whole elements.

    Args:
        num_bytes: Int, the size that was asked for.
        item_bytes: Int, size of an element.
        num_replicas: Int, number of replicas.

    Returns:
        Int, the next larger size that divides, at least one element for each.

    Example:

    >>> padded_bytes(1000, 4, 3)
    1008
    """
    unit = item_bytes * num_replicas
    return max(1, -(-num_bytes // unit)) * unit


def input_of(position: int, length: int) -> np.ndarray:
    """Input of a replica: small whole numbers that depend on its position.

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
    """Expected result of a replica.

    Args:
        collective: String, one of `tfdp.launch.bench.nccl_tests.COLLECTIVES`; the
            replica at position 0 broadcasts.
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
    shard_length = length // num_replicas
    return total[position * shard_length : (position + 1) * shard_length]


def num_wrong(result: np.ndarray, wanted: np.ndarray) -> int:
    """Count the wrong elements of a result.

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
