"""Lengths of the workers' data, and the number of steps of an epoch for all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

ENDLESS = math.inf


class Length(NamedTuple):
    """Length of one worker's data.

    Args:
        steps: Int, `ENDLESS`, or `None` where it is not known before the end.
        steps_per_batch: Float, number of steps for which one batch lasts.
        batch_rows: Int, the rows of a batch of arrays, or `None` for other data.
        last_rows: Int, the rows of a last smaller batch, or 0.
    """

    steps: float | None
    steps_per_batch: float = 1
    batch_rows: int | None = None
    last_rows: int = 0

    @classmethod
    def of_cardinality(cls, cardinality: int) -> Length:
        """Return the length of a `tf.data.Dataset` of this cardinality.

        Example:

        >>> [str(Length.of_cardinality(number)) for number in (4, -1, -2)]
        ['4', 'endlessly many', 'an unknown number']
        """
        # `tf.data.INFINITE_CARDINALITY` and `tf.data.UNKNOWN_CARDINALITY`
        return cls({-1: ENDLESS, -2: None}.get(cardinality, cardinality))

    @property
    def is_endless(self) -> bool:
        """Bool, whether it never ends."""
        return self.steps == ENDLESS

    def __str__(self) -> str:
        return _batches(self.steps, self.steps_per_batch)


def agreed_steps(lengths: Sequence[Length], *, stops: bool) -> int | None:
    """Return the number of steps after which an epoch ends for all workers.

    Args:
        lengths: Sequence of `Length`, one for each worker.
        stops: Bool, whether the first worker without data ends it, or the last.

    Returns:
        Int, or `None` where it is not known before, or never ends.

    Example:

    >>> lengths = [Length(4), Length(6), Length(ENDLESS)]
    >>> agreed_steps(lengths, stops=True), agreed_steps(lengths, stops=False)
    (4, None)
    """
    known = [length.steps for length in lengths if length.steps is not None]
    if len(known) < len(lengths):
        return None
    steps = min(known) if stops else max(known)
    return None if steps == ENDLESS else int(steps)


def dropped_batches(lengths: Sequence[Length]) -> str:
    """Describe the batches beyond the shortest worker's, or return an empty string.

    Args:
        lengths: Sequence of `Length`, one for each worker.

    Example:

    >>> dropped_batches([Length(4), Length(6), Length(4), Length(ENDLESS)])
    '2 of worker 1, endlessly many of worker 3'
    """
    steps = agreed_steps(lengths, stops=True)
    if steps is None:
        return ""
    more = [
        (rank, length.steps - steps, length.steps_per_batch)
        for rank, length in enumerate(lengths)
        if length.steps is not None and length.steps > steps
    ]
    return ", ".join(f"{_batches(n, each)} of worker {rank}" for rank, n, each in more)


def _batches(steps: float | None, steps_per_batch: float) -> str:
    if steps is None:
        return "an unknown number"
    if steps == ENDLESS:
        return "endlessly many"
    return f"{steps / steps_per_batch:g}"
