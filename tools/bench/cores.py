"""Cores of the machine, one for each worker."""

from __future__ import annotations

import os


def pin_to_core(rank: int) -> None:
    """Keep this process and all its threads on one core.

    Args:
        rank: Int, the worker's; workers beyond the number of cores share them.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
