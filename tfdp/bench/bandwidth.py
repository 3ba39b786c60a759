"""What a collective moves in a second, counted as nccl-tests counts it."""

from __future__ import annotations

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


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
    """What each link of a replica carries at least, relative to the size.

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
    share = (num_replicas - 1) / num_replicas
    factors = {
        "all_reduce": 2 * share,
        "reduce_scatter": share,
        "all_gather": share,
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
