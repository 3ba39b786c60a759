"""Places of the states of a run: the memory of its hosts, and its directory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from tfdp.checkpoint.backups import Backups
from tfdp.checkpoint.index import Index
from tfdp.checkpoint.memory_backups import MemoryBackups
from tfdp.checkpoint.reader import LoadPlan

# A place that states are saved in.
Place: TypeAlias = Backups | MemoryBackups


def find_newest(
    backups: Backups,
    memory: MemoryBackups | None,
    make_plan: Callable[[Index], LoadPlan],
    *,
    is_end_of_epoch: bool,
) -> tuple[Place, Index, LoadPlan] | None:
    """Open the places of a run, and find its newest state; all workers call it.

    Args:
        backups: `Backups` in the directory.
        memory: `MemoryBackups`, or `None` without saves in memory.
        make_plan: Callable, see `Backups.find_newest`.
        is_end_of_epoch: Bool, whether a backup is one of the end of an epoch: the state
            in memory of the last batch of that epoch is older.

    Returns:
        Tuple of the place of the state, its `Index` and its `LoadPlan`; or `None` if
        there is no state.

    Raises:
        ValueError: On every worker, see `Backups.prepare` and `Backups.find_newest`.
        OSError: On every worker, likewise.
    """
    backups.prepare()
    steps = backups.list_steps()
    if memory is not None:
        memory.prepare()
        at_least = max(steps, default=0), is_end_of_epoch
        if (found := memory.find_newest(make_plan, at_least)) is not None:
            return memory, *found
    found = backups.find_newest(make_plan, steps)
    return None if found is None else (backups, *found)
