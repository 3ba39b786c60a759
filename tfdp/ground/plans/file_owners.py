"""Owners of files: the worker that reads each file, balanced by size."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balance_files(sizes: Sequence[int], num_workers: int) -> list[int]:
    """Assign each data file, largest first, to the worker with the fewest bytes.

    The largest load is at most 4/3 of that of the best assignment. Files of equal size
    are assigned to the workers one after another.

    Args:
        sizes: Sequence of ints, bytes of each file.
        num_workers: Int, at most the number of files.

    Returns:
        List of ints, the worker of each file. Each worker has at least one file.

    Example:

    >>> balance_files([30, 10, 10, 20, 10], 2)
    [0, 1, 0, 1, 1]

    Source: Graham 1969, "Bounds on Multiprocessing Timing Anomalies",
    https://doi.org/10.1137/0117039
    """
    owners = [0] * len(sizes)
    # Heap of tuples of bytes, number of files and rank: among workers with equal bytes,
    # one without a file comes first, so that each worker gets a file.
    loads = [(0, 0, rank) for rank in range(num_workers)]
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        num_bytes, num_files, rank = loads[0]
        owners[index] = rank
        heapq.heapreplace(loads, (num_bytes + sizes[index], num_files + 1, rank))
    return owners


def bytes_of_workers(
    sizes: Sequence[int], owners: Sequence[int], num_workers: int
) -> list[int]:
    """Return a list of the total bytes of the files of each worker.

    Args:
        sizes: Sequence of ints, bytes of each file.
        owners: Sequence of ints, the worker of each file.
        num_workers: Int, the number of workers.

    Example:

    >>> bytes_of_workers([30, 10, 20], [0, 1, 1], 2)
    [30, 30]
    """
    totals = [0] * num_workers
    for size, owner in zip(sizes, owners, strict=True):
        totals[owner] += size
    return totals
