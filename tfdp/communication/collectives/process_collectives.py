"""Collectives of the replicas of a process, by a communicator between processes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdp.communication.collectives.bridge import new_tensor
from tfdp.communication.transport import Communicator, sum_into


class Members:
    """The workers of a group, in the order of their replicas' positions.

    Args:
        workers: Sequence of ints, the rank of the worker of each position. The
            positions of a worker lie side by side.
        rank: Int, this worker's.

    Example:

    >>> members = Members([3, 3, 5, 5], 5)
    >>> members.ranks, members.starts, members.own
    ((3, 5), [0, 2, 4], 1)
    """

    def __init__(self, workers: Sequence[int], rank: int) -> None:
        runs = [(worker, len(list(run))) for worker, run in itertools.groupby(workers)]
        self.ranks = tuple(worker for worker, _ in runs)
        self.starts = list(itertools.accumulate((n for _, n in runs), initial=0))
        self.own = self.ranks.index(rank)

    @property
    def size(self) -> int:
        """Int, the number of replicas."""
        return self.starts[-1]

    @property
    def positions(self) -> range:
        """Range, the positions of the local replicas."""
        return range(self.starts[self.own], self.starts[self.own + 1])

    def bounds(self, length: int) -> list[int]:
        """Where each worker's part of an array with a slice for each replica begins."""
        return [start * (length // self.size) for start in self.starts]


class ProcessCollectives:
    """Collectives of the local replicas of a process, by kind.

    Each takes the flat arrays of these replicas, in the order of their positions, and
    the position of the source, which is that of a broadcast; and returns one tensor
    for each.

    Args:
        members: `Members` of the group.
        communicator: `Communicator` of its workers, or `None` where one worker has all
            replicas.
        tag: Int, the same on all workers.
    """

    def __init__(
        self, members: Members, communicator: Communicator | None, tag: int
    ) -> None:
        self.members = members
        self.communicator = communicator
        self.tag = tag

    def all_reduce(self, arrays: list[np.ndarray], source: int) -> list[tf.Tensor]:
        """Sum the arrays, alike for all."""
        result, total = _new_array(len(arrays[0]), arrays[0].dtype)
        if self.communicator is None or len(arrays) > 1:
            sum_into(total, arrays)
            arrays = [total] * len(arrays)
        if self.communicator is not None:
            in_place = arrays[0] is total
            into = None if in_place else total
            self.communicator.all_reduce(arrays[0], self.tag, into)
        return [result] * len(arrays)

    def reduce_scatter(self, arrays: list[np.ndarray], source: int) -> list[tf.Tensor]:
        """Sum the arrays; each replica gets the slice of its position."""
        length, dtype = len(arrays[0]) // self.members.size, arrays[0].dtype
        made = [_new_array(length, dtype) for _ in arrays]
        if self.communicator is not None and len(arrays) == 1:
            bounds = self.members.bounds(len(arrays[0]))
            self.communicator.reduce_scatter(arrays[0], bounds, self.tag, made[0][1])
            return [made[0][0]]
        total = np.empty_like(arrays[0])
        sum_into(total, arrays)
        if self.communicator is not None:
            bounds = self.members.bounds(len(total))
            self.communicator.reduce_scatter(total, bounds, self.tag)
        slices = total.reshape(self.members.size, -1)
        for position, (_, own) in zip(self.members.positions, made, strict=True):
            own[:] = slices[position]
        return [tensor for tensor, _ in made]

    def all_gather(self, arrays: list[np.ndarray], source: int) -> list[tf.Tensor]:
        """Concatenate the arrays by position."""
        size = self.members.size
        result, data = _new_array(size * len(arrays[0]), arrays[0].dtype)
        rows = data.reshape(size, -1)
        for position, array in zip(self.members.positions, arrays, strict=True):
            rows[position] = array
        if self.communicator is not None:
            bounds = self.members.bounds(len(data))
            self.communicator.all_gather(data, bounds, self.tag)
        return [result] * len(arrays)

    def all_to_all(self, arrays: list[np.ndarray], source: int) -> list[tf.Tensor]:
        """Send slice i of each array to position i."""
        members = self.members
        made = [_new_array(len(array), array.dtype) for array in arrays]
        sent = [array.reshape(members.size, -1) for array in arrays]
        received = [array.reshape(members.size, -1) for _, array in made]
        # Blocks of what goes to each worker, from local replica to remote one.
        parts = list(itertools.pairwise(members.starts))
        outgoing = [np.concatenate([s[a:b].ravel() for s in sent]) for a, b in parts]
        incoming = [np.empty_like(block) for block in outgoing]
        incoming[members.own] = outgoing[members.own]
        if self.communicator is not None:
            self.communicator.all_to_all(outgoing, incoming, self.tag)
        for (begin, end), block in zip(parts, incoming, strict=True):
            rows = block.reshape(end - begin, len(arrays), -1)
            for index, own in enumerate(received):
                own[begin:end] = rows[:, index]
        return [tensor for tensor, _ in made]

    def broadcast(self, arrays: list[np.ndarray], source: int) -> list[tf.Tensor]:
        """Copy the array of the source."""
        members = self.members
        result, data = _new_array(len(arrays[0]), arrays[0].dtype)
        if source in members.positions:
            data[:] = arrays[members.positions.index(source)]
        if self.communicator is not None:
            starts = members.starts
            worker = next(i for i, end in enumerate(starts[1:]) if source < end)
            self.communicator.broadcast(data, worker, self.tag)
        return [result] * len(arrays)


def _new_array(length: int, dtype: np.dtype) -> tuple[tf.Tensor, np.ndarray]:
    tensor, data = new_tensor(length * dtype.itemsize)
    return tensor, data.view(dtype)
