"""Latency and bandwidth of a cluster's links, fitted to times that were measured."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from tfdp.cluster import Topology
from tfdp.cost_model import inside_bytes, predict_seconds
from tfdp.links import DEFAULT_LINKS, Link, Links
from tfdp.traffic import Algorithm, exchanges_of

_MAX_ROUNDS = 20
# Fits whose squares differ by less are equally good.
_TIE, _ROUNDING = 0.01, 1e-12
_NOTHING = Link(0.0, 0.0)
# Alpha and beta inside, alpha and beta across, and an operation.
_NUM_CONSTANTS = 5


@dataclasses.dataclass(frozen=True)
class Sample:
    """One measured all-reduce.

    Args:
        algorithm: `Algorithm` that ran.
        num_bytes: Int, size of the tensor, at least 1.
        topology: `Topology` of the replicas that took part.
        seconds: Float above 0, how long it took.

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
    """Fits alpha and beta inside and across nodes by least squares.

    The constants are not negative, and the squares are of relative errors, for
    samples differ in size by orders of magnitude. Where an exchange uses links
    of both kinds, only the slower one shows in the time; which one that is
    follows from the constants, so they are fitted in turn until they agree.
    What an operation costs is told from alpha by samples of several algorithms;
    with those of one, it is part of alpha. They also tell whether the links
    inside a node are shared.

    Args:
        samples: Sequence of `Sample`, of at least two sizes.
        default: `Links`, whose constants are taken for a level that no sample
            tells about, or `None` for those of `"ring"` in `DEFAULT_LINKS`.
            Defaults to `None`.

    Returns:
        `Links`.

    Raises:
        ValueError: If the samples cannot tell alpha from beta.

    Example:

    >>> node, ring = Topology(((0, 1),)), Algorithm("ring")
    >>> samples = [Sample(ring, 100, node, 0.004), Sample(ring, 1100, node, 0.006)]
    >>> inside = fit_links(samples).inside
    >>> round(inside.alpha_seconds, 9), round(inside.seconds_per_byte, 9)
    (0.0019, 1e-06)
    """
    default = default or DEFAULT_LINKS["ring"]
    fitted = [
        _with_default(links, default)
        for start in _starts(default)
        for links in _fit_in_turn(samples, start)
    ]
    if not fitted:
        raise ValueError(
            "The samples do not tell latency from bandwidth; measure at least two "
            "sizes at each level. Received: sizes of "
            f"{sorted({sample.num_bytes for sample in samples})} bytes"
        )
    squares = [_squares(samples, links) for links in fitted]
    limit = min(squares) * (1 + _TIE) + _ROUNDING
    good = [links for links, s in zip(fitted, squares, strict=True) if s <= limit]
    return max(good, key=lambda links: _plausibility(links, default))


def _starts(default: Links) -> list[Links]:
    """Guesses at which link is the slower, and at whether replicas share one.

    The constants may agree on a wrong answer, so each is tried.
    """
    levels = [
        (default.inside, default.across),
        (default.inside, _NOTHING),
        (_NOTHING, default.across),
    ]
    return [
        Links(inside, across, is_inside_shared=is_shared)
        for inside, across in levels
        for is_shared in (False, True)
    ]


def _fit_in_turn(samples: Sequence[Sample], links: Links) -> list[Links]:
    found: list[Links] = []
    for _ in range(_MAX_ROUNDS):
        rows = np.array([_row(sample, links) for sample in samples])
        constants = _fit_constants(rows.reshape(-1, _NUM_CONSTANTS))
        if constants is None:
            break
        links = Links(
            Link(*constants[:2]),
            Link(*constants[2:4]),
            constants[4],
            links.is_inside_shared,
        )
        if links in found:
            break
        found.append(links)
    return found


def _row(sample: Sample, links: Links) -> list[float]:
    """Messages, bytes and operations over the time: times the constants, 1."""
    counts = [0.0] * _NUM_CONSTANTS
    for exchange in exchanges_of(sample.algorithm, sample.topology):
        inner_bytes = sample.num_bytes * inside_bytes(exchange, links)
        outer_bytes = sample.num_bytes * exchange.share * exchange.num_streams
        is_inside_slower = links.inside.seconds(inner_bytes) > links.across.seconds(
            outer_bytes
        )
        if exchange.num_streams and not (exchange.num_inside and is_inside_slower):
            counts[2] += exchange.repeats
            counts[3] += exchange.repeats * outer_bytes
        else:
            counts[0] += exchange.repeats
            counts[1] += exchange.repeats * inner_bytes
        counts[4] += 1
    return [count / sample.seconds for count in counts]


def _fit_constants(rows: np.ndarray) -> list[float] | None:
    """Fits all constants, or all but that of an operation if it does not show."""
    constants = _non_negative_least_squares(rows)
    if constants is None:
        rows[:, 4] = 0
        constants = _non_negative_least_squares(rows)
    return constants


def _non_negative_least_squares(rows: np.ndarray) -> list[float] | None:
    """Solves `rows @ x = 1`, x >= 0; 0 where a column is; `None` if not unique.

    With so few unknowns, every choice of those that are not 0 can be tried.

    Args:
        rows: Array of shape `[num_samples, num_constants]`.

    Returns:
        List of floats, or `None`.
    """
    scale = np.linalg.norm(rows, axis=0)  # [num_constants]
    (used,) = np.nonzero(scale)
    scaled = rows[:, used] / scale[used]
    if not len(used) or np.linalg.matrix_rank(scaled, tol=1e-6) < len(used):
        return None
    ones = np.ones(len(rows))
    best, least = np.zeros(len(used)), math.inf
    for choice in itertools.product([False, True], repeat=len(used)):
        part = np.zeros(len(used))
        part[list(choice)] = np.linalg.lstsq(scaled[:, choice], ones, rcond=None)[0]
        error = float(np.sum((scaled @ part - ones) ** 2))
        if (part >= 0).all() and error < least:
            best, least = part, error
    constants = np.zeros(len(scale))
    constants[used] = best / scale[used]
    return [float(constant) for constant in constants]


def _with_default(links: Links, default: Links) -> Links:
    """Fills in a level that did not show; inside is then no slower than across."""
    inside, across = links.inside, links.across
    if across == _NOTHING:
        across = default.across
    elif inside == _NOTHING:
        inside = Link(
            min(default.inside.alpha_seconds, across.alpha_seconds),
            min(default.inside.seconds_per_byte, across.seconds_per_byte),
        )
    return dataclasses.replace(links, inside=inside, across=across)


def _squares(samples: Sequence[Sample], links: Links) -> float:
    return sum(
        (predict_seconds(s.algorithm, s.num_bytes, s.topology, links) / s.seconds - 1)
        ** 2
        for s in samples
    )


def _plausibility(links: Links, default: Links) -> tuple[bool, bool]:
    """Of equally good fits, one like the default whose links across are slower.

    Two nodes of two replicas look the same the other way round.
    """
    return (
        links.inside.seconds_per_byte <= links.across.seconds_per_byte,
        links.is_inside_shared == default.is_inside_shared,
    )
