"""Change of the global batch size between an interrupted run and its continuation.

Positions are converted in samples, and rounded down to a batch of the new size. A few
samples may be read twice, and none is left out.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdp.ground.text import pluralize


@dataclasses.dataclass(frozen=True)
class BatchChange:
    """Change of the global batch size between an interrupted run and its continuation.

    It converts numbers of old batches to numbers of new batches.

    Args:
        before: Int, samples of a batch in the interrupted run.
        now: Int, samples of a batch in the run that continues it.
        keeps_updates: Bool, whether an update has the same number of samples as before,
            because the number of accumulated batches has changed, too. Defaults to
            `False`.

    Example:

    >>> change = BatchChange(before=24, now=16)
    >>> change.floor(5), change.ceil(5)  # of 120 samples
    (7, 8)
    """

    before: int
    now: int
    keeps_updates: bool = False

    @property
    def ratio(self) -> float:
        """Float, factor by which the number of samples of an update has grown."""
        return 1.0 if self.keeps_updates else self.now / self.before

    def can_carry(self, num_batches: int) -> bool:
        """Return whether `num_batches` old batches are a whole number of new ones."""
        return num_batches * self.before % self.now == 0

    def floor(self, num_batches: int) -> int:
        """Convert a number of old batches to new batches, rounded down."""
        return num_batches * self.before // self.now

    def ceil(self, num_batches: int) -> int:
        """Convert a number of old batches to new batches, rounded up."""
        return -(-num_batches * self.before // self.now)

    def fits(self, before: int | None, now: int | None) -> bool:
        """Return whether an old and a new epoch may have the same number of samples.

        The number is not exact, since the last batch may be smaller, or be dropped:
        they may differ by less than one batch of each.

        Args:
            before: Int, number of old batches of an epoch, or `None` if it is not set.
            now: Int, number of new batches, or `None`. `None` fits only `None`.
        """
        if before is None or now is None:
            return before == now
        return (before - 1) * self.before < (now + 1) * self.now and (
            now - 1
        ) * self.now < (before + 1) * self.before


@dataclasses.dataclass(frozen=True)
class BatchSettings:
    """Settings of a run that determine the samples of a step, an update and an epoch.

    Args:
        replicas: Int, number of replicas.
        batch_size: Int, samples of a global batch, or `None` if unknown.
        steps_per_epoch: Int, the argument of `fit`, or `None`.
        accumulated: Int, number of batches of an update. Defaults to 1.
    """

    replicas: int
    batch_size: int | None
    steps_per_epoch: int | None
    accumulated: int = 1


def change_for_replicas(then: BatchSettings, now: BatchSettings) -> BatchChange | None:
    """Return the change of the batch size for a new number of replicas.

    Args:
        then: `BatchSettings` of the run that was interrupted.
        now: `BatchSettings` of the run that continues it.

    Returns:
        `BatchChange`, or `None` if the number of replicas has not changed.

    Raises:
        ValueError: If the new batch size does not keep the batch size of each replica,
            if a batch size is unknown, or if an epoch would have another number of
            samples.

    Example:

    >>> change_for_replicas(BatchSettings(4, 128, None), BatchSettings(3, 96, None))
    BatchChange(before=128, now=96, keeps_updates=False)
    """
    if then.replicas == now.replicas:
        return None
    if then.batch_size is None or now.batch_size is None:
        raise ValueError(
            f"it was saved by {pluralize(then.replicas, 'replica')}, not "
            f"{now.replicas}, and the batch size of the data is unknown, and must "
            "change with the number of replicas"
        )
    if now.batch_size * then.replicas != then.batch_size * now.replicas:
        needed = then.batch_size * now.replicas / then.replicas
        raise ValueError(
            f"it was saved by {pluralize(then.replicas, 'replica')} with a batch size "
            f"of {then.batch_size}; with {pluralize(now.replicas, 'replica')} the "
            f"batch size must be {needed:g}, and is {now.batch_size}"
        )
    change = BatchChange(then.batch_size, now.batch_size)
    _check_epochs(then, now, change)
    return change


def change_for_updates(
    then: BatchSettings, now: BatchSettings, waiting: int, num_batches: int
) -> BatchChange | None:
    """Return the change of the batch size if updates keep their number of samples.

    Args:
        then: `BatchSettings` of the run that was interrupted.
        now: `BatchSettings` of the run that continues it.
        waiting: Int, old batches that are accumulated and wait for an update.
        num_batches: Int, old batches since the interrupted epoch began.

    Returns:
        `BatchChange`, or `None` if the batch size is unchanged or unknown, or if an
        update has another number of samples.

    Raises:
        ValueError: If some of the waiting batches are from the previous epoch, and
            together the waiting batches do not make a whole number of new batches; or
            if an epoch would have another number of samples.

    Example:

    >>> then, now = BatchSettings(4, 128, None, 1), BatchSettings(2, 64, None, 2)
    >>> change_for_updates(then, now, 0, 9)
    BatchChange(before=128, now=64, keeps_updates=True)
    """
    if None in (then.batch_size, now.batch_size) or then.batch_size == now.batch_size:
        return None
    assert then.batch_size is not None
    assert now.batch_size is not None
    if then.batch_size * then.accumulated != now.batch_size * now.accumulated:
        return None
    change = BatchChange(then.batch_size, now.batch_size, keeps_updates=True)
    _check_epochs(then, now, change)
    if waiting > num_batches and not change.can_carry(waiting):
        raise ValueError(
            f"{pluralize(waiting, 'batch', 'batches')} of size {change.before} waited "
            "for an update, some of them from the previous epoch, and are not a whole "
            f"number of batches of {change.now}"
        )
    return change


def _check_epochs(then: BatchSettings, now: BatchSettings, change: BatchChange) -> None:
    """Raise if `steps_per_epoch` changes the number of samples of an epoch.

    Args:
        then: `BatchSettings` of the run that was interrupted.
        now: `BatchSettings` of the run that continues it.
        change: `BatchChange` from `then` to `now`.
    """
    if not change.fits(then.steps_per_epoch, now.steps_per_epoch):
        raise ValueError(
            "an epoch must keep its number of samples: `steps_per_epoch` was "
            f"{then.steps_per_epoch} with batches of {change.before}, and is "
            f"{now.steps_per_epoch} with batches of {change.now}"
        )


def convert_position(
    snapshot: dict[str, Any],
    num_batches: int,
    change: BatchChange,
    *,
    keeps_iterator: bool,
    group: int,
) -> tuple[dict[str, Any], int]:
    """Convert a saved position in the data to batches of another size.

    Args:
        snapshot: Dict that `DataPosition.snapshot` returned when the epoch began.
        num_batches: Int, old batches taken since the epoch began.
        change: `BatchChange`.
        keeps_iterator: Bool, whether one iterator supplies all epochs, and not a new
            one each epoch.
        group: Int, `steps_per_execution`. The number of new batches that is returned
            is rounded down to a multiple of it.

    Returns:
        Tuple of the converted snapshot, and the number of new batches that the epoch
        has taken since the snapshot.
    """
    taken = list(snapshot["taken"])
    # Iterators of finished epochs were read to their end. Their numbers of batches are
    # rounded up, because a number rounded down would leave a last batch unread.
    new_taken = [change.ceil(count) for count in taken]
    steps_before = 0
    if keeps_iterator and taken:
        steps_before = new_taken[-1] = change.floor(taken[-1])
        num_batches += taken[-1]
    steps_since = change.floor(num_batches) - steps_before
    progress = {"steps_seen": steps_before, "num_batches": None, "taken": new_taken}
    return {**snapshot, **progress}, steps_since - steps_since % group
