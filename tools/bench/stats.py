"""The best of several rivals, and the efficiency of scaling, as ratios of pairs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tfdp.ground.text import pluralize
from tfdp.launch.bench.stats import Ratio, paired_ratio

SCALINGS = ("weak", "strong")


def ratio_to_best(rivals: Sequence[Sequence[float]], own: Sequence[float]) -> Ratio:
    """Compare with the fastest of several rivals.

    Every other block chooses it and the rest are compared: the best of several
    noisy medians would look faster than it is.
    """
    best = min(rivals, key=lambda times: statistics.median(times[::2]))
    return paired_ratio(best[1::2], own[1::2])


def efficiency(
    scaling: str, alone: Sequence[float], together: Sequence[float], num_replicas: int
) -> Ratio:
    """Scaling efficiency: the fraction of N times one replica's speed that N reach.

    Weak scaling, where each replica keeps its batch: T(1) / T(N). Strong scaling,
    where all share one global batch: T(1) / (N T(N)).

    Args:
        scaling: String, `"weak"` or `"strong"`.
        alone: Sequence of floats, seconds of a step on one replica, block by block.
        together: Sequence of floats, the same of N replicas.
        num_replicas: Int, N.

    Returns:
        A `Ratio`.

    Raises:
        ValueError: If there is no such scaling.

    Example:

    >>> efficiency("strong", [8.0], [5.0], 2).median
    0.8

    Source: Amdahl 1967, "Validity of the single processor approach to achieving
    large scale computing capabilities", for strong scaling; Gustafson 1988,
    "Reevaluating Amdahl's law", for weak; Goyal et al. 2017,
    https://arxiv.org/abs/1706.02677, figure 7, for weak scaling of training.
    """
    if scaling not in SCALINGS:
        raise ValueError(
            f"The scaling must be one of {SCALINGS}. Received: {scaling!r}"
        )
    ratio = paired_ratio(alone, together)
    return ratio if scaling == "weak" else ratio.times(1 / num_replicas)


def speedup(efficiency: Ratio, num_replicas: int) -> Ratio:
    """Speedup over one replica: N times the efficiency.

    Args:
        efficiency: `Ratio`.
        num_replicas: Int, N.

    Returns:
        A `Ratio`.

    Example:

    >>> speedup(Ratio(0.5, 0.5, 0.5, 1), 4).median
    2.0
    """
    return efficiency.times(num_replicas)


def batch_of(scaling: str, batch_size: int, num_replicas: int, most: int) -> int:
    """The batch of each replica.

    Args:
        scaling: String, `"weak"` or `"strong"`.
        batch_size: Int, samples of each replica in weak scaling, and in strong
            scaling of each of the largest number of replicas.
        num_replicas: Int, N.
        most: Int, the largest number of replicas.

    Returns:
        Int.

    Raises:
        ValueError: If the global batch does not divide.

    Example:

    >>> [batch_of("strong", 32, n, 4) for n in (1, 2, 4)]
    [128, 64, 32]
    """
    if scaling == "weak":
        return batch_size
    total = batch_size * most
    if total % num_replicas:
        raise ValueError(
            "The global batch of strong scaling, that of the largest number of "
            "replicas, must divide by each number. Received: "
            f"{pluralize(total, 'sample')} on {pluralize(num_replicas, 'replica')}"
        )
    return total // num_replicas
