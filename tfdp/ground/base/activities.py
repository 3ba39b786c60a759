"""Activities of this process other than training steps, and their observers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from tfdp.ground.base.step_context import ActiveHooks

# Observers count the time of an activity by its name. `BACKUP` is separate from `SAVE`,
# the save of any file, since only a backup lets `fit` resume. `EVALUATION` is any loop
# of Keras that does not train.
EVALUATION, SAVE, BACKUP = "evaluation", "save", "backup"


class Observer(Protocol):
    """Object that is notified of activities by name; several threads may call it."""

    def begins(self, activity: str) -> None:
        """Handle the beginning of an activity: `EVALUATION`, `SAVE` or `BACKUP`."""

    def ends(self, activity: str) -> None:
        """Handle the end of an activity by the same name, also after an error."""


observers: ActiveHooks[Observer] = ActiveHooks("observers")


@contextlib.contextmanager
def during(activity: str) -> Iterator[None]:
    """Notify the observers of an activity in the block, or in a decorated function.

    Args:
        activity: String, `EVALUATION`, `SAVE` or `BACKUP`.

    Example:

    >>> class Printer:
    ...     def begins(self, activity):
    ...         print("begin of", activity)
    ...     def ends(self, activity):
    ...         print("end of", activity)
    >>> observers.activate(printer := Printer())
    >>> with during(SAVE):
    ...     observers.deactivate(printer)
    begin of save
    end of save
    """
    notified = observers.active()
    for observer in notified:
        observer.begins(activity)
    try:
        yield
    finally:
        for observer in reversed(notified):
            observer.ends(activity)
