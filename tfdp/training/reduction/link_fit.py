"""Fit of latency and bandwidth of a cluster's links to measured times."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from tfdp.ground.links import DEFAULT_LINKS, Link, Links
from tfdp.ground.plans.cost_model import num_serial_messages, predict_seconds
from tfdp.ground.plans.topology import Topology
from tfdp.ground.plans.traffic import Algorithm, transfers_of

# Limit on the rounds of a fit: each round begins with the result of the last one, and
# the rounds end when a result recurs exactly, which may never happen.
_MAX_ROUNDS = 20
# Fits whose losses differ by less, relatively or absolutely, count as equally good:
# noise decides between them, so the more plausible fit is chosen.
_RELATIVE_TIE, _ABSOLUTE_TIE = 0.01, 1e-12
# A sample's error is the logarithm of its predicted over its measured time. Errors up
# to this size enter the loss squared, larger errors linearly: a burst on a link or a
# late worker causes errors whose squares would dominate the fit.
_OUTLIER = 0.1
# A link that takes no time. It is the fit of the links inside or across nodes if no
# sample depends on them; `_with_default` then replaces it by the default link.
_ZERO_LINK = Link(0.0, 0.0)
# Smaller ratios of predicted to measured time are raised to this one: a fit may predict
# no time at all, and a ratio of zero has no logarithm.
_MIN_RATIO = 1e-6
# Five constants are fitted: the latency (alpha) and the seconds per byte (beta) of the
# links inside nodes, the same two of the links across nodes, and the seconds of an
# operation.
_NUM_CONSTANTS = 5


@dataclasses.dataclass(frozen=True)
class Sample:
    """Measured time of one all-reduce.

    Args:
        algorithm: `Algorithm` that was measured.
        num_bytes: Int, size of the tensor, at least 1.
        topology: `Topology` of the replicas that took part.
        seconds: Float above 0, measured time.

    Raises:
        ValueError: If a number is out of range.
    """

    algorithm: Algorithm
    num_bytes: int
    topology: Topology
    seconds: float

    def __post_init__(self) -> None:
        if self.num_bytes < 1 or not 0 < self.seconds < math.inf:
            raise ValueError(
                "A sample needs at least one byte and a time above 0. Received: "
                f"num_bytes={self.num_bytes!r}, seconds={self.seconds!r}"
            )


def fit_links(samples: Sequence[Sample], default: Links | None = None) -> Links:
    """Fit alpha and beta inside and across nodes.

    The constants are not negative. They minimize the sum of Huber's function of the
    logarithms of predicted over measured times: samples differ in size by orders of
    magnitude, half is as wrong as double, and a few outliers must not dominate.

    If messages inside and across nodes are sent at the same time, only the slower links
    determine the time. Which links are slower follows from the constants, so the choice
    and the constants are fitted alternately until they agree.

    Samples of several algorithms separate the cost of an operation from alpha; with one
    algorithm it is part of alpha. They also show whether the links inside a node are
    shared.

    Args:
        samples: Sequence of `Sample`, of at least two sizes.
        default: `Links` with the constants of a level that no sample depends on, or
            `None` for those of `"ring"` in `DEFAULT_LINKS`. Defaults to `None`.

    Returns:
        `Links` with the fitted constants.

    Raises:
        ValueError: If the samples do not determine alpha and beta.

    Example:

    >>> node, ring = Topology(((0, 1),)), Algorithm("ring")
    >>> samples = [Sample(ring, 100, node, 0.004), Sample(ring, 1100, node, 0.006)]
    >>> inside = fit_links(samples).inside
    >>> round(inside.alpha_seconds, 9), round(inside.seconds_per_byte, 9)
    (0.00095, 1e-06)

    Source: Huber 1964, "Robust Estimation of a Location Parameter"; Holland and
    Welsch 1977, "Robust regression using iteratively reweighted least-squares".
    """
    default = default or DEFAULT_LINKS["ring"]
    fitted = [
        _with_default(links, default)
        for start in _initial_guesses(default)
        for links in _fit_alternately(samples, start)
    ]
    if not fitted:
        raise ValueError(
            "The samples do not tell latency from bandwidth; measure at least two "
            "sizes at each level. Received: sizes of "
            f"{sorted({sample.num_bytes for sample in samples})} bytes"
        )
    losses = [_loss(_ratios(samples, links)) for links in fitted]
    limit = min(losses) * (1 + _RELATIVE_TIE) + _ABSOLUTE_TIE
    good = [links for links, s in zip(fitted, losses, strict=True) if s <= limit]
    return max(good, key=lambda links: _plausibility(links, default))


def _initial_guesses(default: Links) -> list[Links]:
    """Return the six `Links` from which fits begin.

    The links inside and across nodes are both those of `default`, or one of them costs
    nothing, so the other one is slower. In each case the links inside a node are
    shared or not. From a single starting point the fit may converge to a wrong answer.
    """
    levels = [
        (default.inside, default.across),
        (default.inside, _ZERO_LINK),
        (_ZERO_LINK, default.across),
    ]
    return [
        Links(inside, across, is_inside_shared=is_shared)
        for inside, across in levels
        for is_shared in (False, True)
    ]


def _fit_alternately(samples: Sequence[Sample], links: Links) -> list[Links]:
    """Fit constants and choose the slower level of links, alternately.

    It ends when a fit recurs, after `_MAX_ROUNDS` fits, or if the samples do not
    determine the constants.

    Args:
        samples: Sequence of `Sample`.
        links: `Links`, the start: whether those inside or those across nodes are slower
            determines to which of them the first fit attributes a sample.

    Returns:
        List of the `Links` of all fits, in order; empty if there was none.
    """
    fits: list[Links] = []
    weights = np.ones(len(samples))
    for _ in range(_MAX_ROUNDS):
        rows = np.array([_design_row(sample, links) for sample in samples])
        constants = _fit_constants(rows.reshape(-1, _NUM_CONSTANTS), weights)
        if constants is None:
            break
        links = Links(
            Link(*constants[:2]),
            Link(*constants[2:4]),
            constants[4],
            links.is_inside_shared,
        )
        if links in fits:
            break
        fits.append(links)
        weights = _weights(_ratios(samples, links))
    return fits


def _design_row(sample: Sample, links: Links) -> list[float]:
    """Return the factors of the constants in a sample's predicted time.

    They are the numbers of messages, bytes and operations, divided by the measured
    time. Their product with the constants is 1 if these predict the time exactly.

    Args:
        sample: `Sample`.
        links: `Links`. Where messages inside and across nodes are sent at the same
            time, only the slower of the two by these constants counts, unless
            `is_inside_shared`: then both count.

    Returns:
        List of five floats, the factors of the constants in this order: alpha and beta
        inside nodes, alpha and beta across nodes, and the cost of an operation.
    """
    counts = [0.0] * _NUM_CONSTANTS
    for transfer in transfers_of(sample.algorithm, sample.topology):
        num_inside = num_serial_messages(transfer, links)
        num_bytes = sample.num_bytes * transfer.fraction
        outer_bytes = num_bytes * transfer.num_streams
        # If the replicas of a node share its link, their messages inside and across
        # nodes are sent one after the other, and both count.
        counts_both = links.is_inside_shared
        is_inside_slower = links.inside.seconds(num_bytes) > links.across.seconds(
            outer_bytes
        )
        if transfer.num_streams and (
            counts_both or not (num_inside and is_inside_slower)
        ):
            counts[2] += transfer.repeats
            counts[3] += transfer.repeats * outer_bytes
        if num_inside and (counts_both or not transfer.num_streams or is_inside_slower):
            counts[0] += transfer.repeats * num_inside
            counts[1] += transfer.repeats * num_inside * num_bytes
        counts[4] += 1
    return [count / sample.seconds for count in counts]


def _fit_constants(rows: np.ndarray, weights: np.ndarray) -> list[float] | None:
    """Fit all constants, or all but the cost of an operation if not determined.

    Args:
        rows: Array of shape `[num_samples, num_constants]`, the `_design_row` of each
            sample. The fit makes `rows @ constants` as close to 1 as possible. The last
            column, for the cost of an operation, is set to 0 if it is not determined.
        weights: Array of shape `[num_samples]`, the weight of each error.

    Returns:
        List of floats, the constants in the order of `_design_row`; or `None` if the
        samples do not determine them even without the cost of an operation.
    """
    constants = _non_negative_least_squares(rows, weights)
    if constants is None:
        rows[:, 4] = 0
        constants = _non_negative_least_squares(rows, weights)
    return constants


def _non_negative_least_squares(
    rows: np.ndarray, weights: np.ndarray
) -> list[float] | None:
    """Solve `rows @ x = 1` for x >= 0 by weighted least squares.

    There are few unknowns, so every subset of those that are not 0 is tried.

    Args:
        rows: Array of shape `[num_samples, num_constants]`.
        weights: Array of shape `[num_samples]`, the weight of each error.

    Returns:
        List of floats, with 0 for a column of zeros; or `None` if the solution is not
        unique.
    """
    weighted = rows * weights[:, np.newaxis]
    scale = np.linalg.norm(weighted, axis=0)
    (used,) = np.nonzero(scale)
    scaled = weighted[:, used] / scale[used]
    if not len(used) or np.linalg.matrix_rank(scaled, tol=1e-6) < len(used):
        return None
    best, least = np.zeros(len(used)), math.inf
    for choice in itertools.product([False, True], repeat=len(used)):
        part = np.zeros(len(used))
        part[list(choice)] = np.linalg.lstsq(scaled[:, choice], weights, rcond=None)[0]
        error = float(np.sum((scaled @ part - weights) ** 2))
        if (part >= 0).all() and error < least:
            best, least = part, error
    constants = np.zeros(len(scale))
    constants[used] = best / scale[used]
    return [float(constant) for constant in constants]


def _with_default(links: Links, default: Links) -> Links:
    """Return fitted links, with default constants for a level without samples.

    Args:
        links: `Links`, fitted; a level that no sample depends on is `_ZERO_LINK`.
        default: `Links`. Inside nodes, its alpha and beta are limited to those across
            nodes.
    """
    inside, across = links.inside, links.across
    if across == _ZERO_LINK:
        across = default.across
    elif inside == _ZERO_LINK:
        inside = Link(
            min(default.inside.alpha_seconds, across.alpha_seconds),
            min(default.inside.seconds_per_byte, across.seconds_per_byte),
        )
    return dataclasses.replace(links, inside=inside, across=across)


def _ratios(samples: Sequence[Sample], links: Links) -> np.ndarray:
    """Return each sample's ratio of predicted to measured time, raised above 0.

    Args:
        samples: Sequence of `Sample`.
        links: `Links`, from which times are predicted.

    Returns:
        Array of shape `[num_samples]`; smaller ratios are raised to `_MIN_RATIO`, so
        that all have a logarithm.
    """
    ratios = [
        predict_seconds(s.algorithm, s.num_bytes, s.topology, links) / s.seconds
        for s in samples
    ]
    return np.maximum(ratios, _MIN_RATIO)


def _loss(ratios: np.ndarray) -> float:
    """Return the loss of a fit: the sum of Huber's function of its logarithmic errors.

    `ratios` has shape `[num_samples]`: predicted over measured times, all above 0.
    """
    errors = np.abs(np.log(ratios))
    outliers = 2 * _OUTLIER * errors - _OUTLIER**2
    return float(np.where(errors <= _OUTLIER, errors**2, outliers).sum())


def _weights(ratios: np.ndarray) -> np.ndarray:
    """Return weights by which least squares of `ratios - 1` minimize `_loss`.

    Args:
        ratios: Array of shape `[num_samples]`, predicted over measured times.

    Returns:
        Array of shape `[num_samples]`.
    """
    differences, errors = ratios - 1, np.log(ratios)
    # For a ratio r near 1, log(r) / (r - 1) is nearly 1. It is replaced by 1 there,
    # since r = 1 would give 0 / 0.
    is_near = np.abs(differences) < 1e-6
    slopes = errors / (ratios * np.where(is_near, 1.0, differences))
    outliers = _OUTLIER / np.maximum(np.abs(errors), _OUTLIER)
    return np.sqrt(np.where(is_near, 1.0, slopes) * outliers)


def _plausibility(links: Links, default: Links) -> tuple[bool, bool]:
    """Return a sort key for equally good fits; the largest is preferred.

    Slower links across nodes and sharing as by default are preferred: the times of two
    nodes of two replicas also fit with the constants of the two levels swapped.

    Returns:
        Tuple of two bools: whether a byte takes at most as long inside nodes as across
        nodes, and whether links inside nodes are shared exactly if they are in
        `default`.
    """
    return (
        links.inside.seconds_per_byte <= links.across.seconds_per_byte,
        links.is_inside_shared == default.is_inside_shared,
    )
