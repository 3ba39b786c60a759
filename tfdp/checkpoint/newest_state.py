"""Places of the states of a run: the memory of its hosts, and its directory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from tfdp.checkpoint.backups import Backups
from tfdp.checkpoint.index import Index
from tfdp.checkpoint.memory_backups import MemoryBackups
from tfdp.checkpoint.reader import LoadPlan

# `Backups` and `MemoryBackups` have the same methods `save` and `load`, so that a
# callback need not know whether a state is in a directory or in the memory of hosts.
BackupTarget: TypeAlias = Backups | MemoryBackups


def find_newest(
    backups: Backups,
    memory: MemoryBackups | None,
    make_plan: Callable[[Index], LoadPlan],
    *,
    is_end_of_epoch: bool,
) -> tuple[BackupTarget, Index, LoadPlan] | None:
    """Open a run's backup directory and memory, and find its newest saved state.

    All workers call this together. It calls `prepare` of `backups` and of `memory`.

    Args:
        backups: `Backups` in the directory.
        memory: `MemoryBackups`, or `None` without saves in memory.
        make_plan: Callable, as in `Backups.find_newest`.
        is_end_of_epoch: Bool, whether backups are saved at the end of an epoch. If so,
            a backup is newer than a state in memory that was saved after the same
            batch, but within the epoch.

    Returns:
        Tuple of the one of `backups` and `memory` that has the state, its `Index` and
        its `LoadPlan`; or `None` if there is no state.

    Raises:
        ValueError: On every worker, as `Backups.prepare` and `Backups.find_newest`.
        OSError: On every worker, as `Backups.prepare` and `Backups.find_newest`.
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
