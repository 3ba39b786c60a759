"""A run that goes on with batches of another size: what has to fit, and where.

Positions are carried over in samples, and rounded down to a batch of the new size: a
few samples may be seen twice, and none is left out.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class BatchChange:
    """Global batches of another size, because there are more replicas or fewer.

    Args:
        before: Int, samples of a batch in the run that was interrupted.
        now: Int, samples of a batch in the one that goes on.

    Example:

    >>> change = BatchChange(before=24, now=16)
    >>> change.whole(5), change.most(5)  # of 120 samples
    (7, 8)
    """

    before: int
    now: int

    @property
    def ratio(self) -> float:
        """Float, by how much a batch has grown."""
        return self.now / self.before

    def whole(self, num_batches: int) -> int:
        """How many batches of now are in as many as before, without a part."""
        return num_batches * self.before // self.now

    def most(self, num_batches: int) -> int:
        """The same, with a part."""
        return -(-num_batches * self.before // self.now)

    def fits(self, before: int | None, now: int | None) -> bool:
        """Whether two numbers of batches can be of as many samples."""
        if before is None or now is None:
            return before == now
        # The last batch of either may have any size, or be left out.
        return (before - 1) * self.before < (now + 1) * self.now and (
            now - 1
        ) * self.now < (before + 1) * self.before


@dataclasses.dataclass(frozen=True)
class Batches:
    """The batches of a run.

    Args:
        replicas: Int, how many share one.
        batch_size: Int, samples of a global batch, or `None` if the data does not say.
        steps_per_epoch: Int, what `fit` was given, or `None`.
    """

    replicas: int
    batch_size: int | None
    steps_per_epoch: int | None


def change_for_replicas(then: Batches, now: Batches) -> BatchChange | None:
    """The change that keeps the batch of each replica.

    Args:
        then: `Batches` of the run that was interrupted.
        now: `Batches` of the run that goes on.

    Returns:
        `BatchChange`, or `None` for as many replicas: nothing may change then.

    Raises:
        ValueError: If the batches of now are not those that the replicas need.

    Example:

    >>> change_for_replicas(Batches(4, 128, None), Batches(3, 96, None))
    BatchChange(before=128, now=96)
    """
    if then.replicas == now.replicas:
        return None
    if then.batch_size is None or now.batch_size is None:
        raise ValueError(
            f"it is of {then.replicas} replicas and not {now.replicas}, and the data "
            "does not tell the size of its batches, which has to change with them"
        )
    if now.batch_size * then.replicas != then.batch_size * now.replicas:
        needed = then.batch_size * now.replicas / then.replicas
        raise ValueError(
            f"it is of {then.replicas} replicas with a batch size of "
            f"{then.batch_size}, so that {now.replicas} replicas need {needed:g}, and "
            f"not {now.batch_size}"
        )
    change = BatchChange(then.batch_size, now.batch_size)
    _check_epochs(then, now, change)
    return change


def _check_epochs(then: Batches, now: Batches, change: BatchChange) -> None:
    if not change.fits(then.steps_per_epoch, now.steps_per_epoch):
        raise ValueError(
            "an epoch has to stay as many samples: `steps_per_epoch` was "
            f"{then.steps_per_epoch} with batches of {change.before}, and is "
            f"{now.steps_per_epoch} with batches of {change.now}"
        )


def moved(
    snapshot: dict[str, Any],
    num_batches: int,
    change: BatchChange,
    *,
    keeps_iterator: bool,
    group: int,
) -> tuple[dict[str, Any], int]:
    """A position in the data, in batches of another size.

    Args:
        snapshot: Dict, what `Position.snapshot` returned when the epoch began.
        num_batches: Int, batches that were taken since.
        change: `BatchChange`.
        keeps_iterator: Bool, whether one iterator goes through all epochs.
        group: Int, batches that are taken at a time.

    Returns:
        Tuple of a snapshot and a number of batches.
    """
    taken = list(snapshot["taken"])
    # Those of epochs that are over were read to their end.
    fresh = [change.most(count) for count in taken]
    begun = 0
    if keeps_iterator and taken:
        begun = fresh[-1] = change.whole(taken[-1])
        num_batches += taken[-1]
    since = change.whole(num_batches) - begun
    progress = {"steps_seen": begun, "num_batches": None, "taken": fresh}
    return {**snapshot, **progress}, since - since % group
