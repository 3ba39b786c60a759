"""Collectives of the replicas of a process, over a communicator of processes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from tfdp.communication.collectives.collective_thread import new_tensor
from tfdp.communication.transport import Communicator, sum_into

Arrays: TypeAlias = list[np.ndarray]
Tensors: TypeAlias = list[tf.Tensor]


class ProcessCollectives:
    """Collectives of a worker's local replicas, one method for each kind.

    Each method takes `arrays`, the flat arrays of these replicas in the order of
    positions; `source`, the position of the source, which only a broadcast uses; and
    `tag`, an int that identifies the collective on all workers. It returns a list with
    one flat uint8 tensor, the bytes of the result, for each of these replicas.

    Args:
        workers: Sequence of ints, the rank of the worker of each position. The
            positions of a worker are consecutive.
        rank: Int, rank of this worker.

    Attributes:
        ranks: Tuple of ints, the workers in the order of their replicas' positions.
        starts: List of ints, the first position of each worker, then the number of
            positions.
        own: Int, the index of this worker in `ranks`.
        communicator: `Communicator` of the workers, or `None` before it is created and
            if one worker has all replicas.

    Example:

    >>> collectives = ProcessCollectives([3, 3, 5, 5], 5)
    >>> collectives.ranks, collectives.starts, collectives.own
    ((3, 5), [0, 2, 4], 1)
    """

    def __init__(self, workers: Sequence[int], rank: int) -> None:
        runs = [(worker, len(list(run))) for worker, run in itertools.groupby(workers)]
        self.ranks = tuple(worker for worker, _ in runs)
        self.starts = list(itertools.accumulate((n for _, n in runs), initial=0))
        self.own = self.ranks.index(rank)
        self.communicator: Communicator | None = None

    @property
    def size(self) -> int:
        """Int, the number of replicas."""
        return self.starts[-1]

    @property
    def positions(self) -> range:
        """Range, the positions of the local replicas."""
        return range(self.starts[self.own], self.starts[self.own + 1])

    def _bounds(self, length: int) -> list[int]:
        """Return bounds of the workers' parts of an array, in proportion to replicas.

        Args:
            length: Int, number of elements of the array.

        Returns:
            List of ints: part `i` is `array[bounds[i]:bounds[i + 1]]`.
        """
        return [start * (length // self.size) for start in self.starts]

    def all_reduce(self, arrays: Arrays, source: int, tag: int) -> Tensors:
        """Sum all replicas' flat arrays; return the sum's bytes for each local replica.

        `arrays` are the local ones; `tag` identifies the call; `source` is not used.
        """
        result, total = _new_array(len(arrays[0]), arrays[0].dtype)
        if self.communicator is None or len(arrays) > 1:
            sum_into(total, arrays)
            arrays = [total] * len(arrays)
        if self.communicator is not None:
            in_place = arrays[0] is total
            into = None if in_place else total
            self.communicator.all_reduce(arrays[0], tag, into)
        return [result] * len(arrays)

    def reduce_scatter(self, arrays: Arrays, source: int, tag: int) -> Tensors:
        """Sum all replicas' flat arrays; return each local replica's slice, as bytes.

        `arrays` are the local ones; `tag` identifies the call; `source` is not used.
        """
        length, dtype = len(arrays[0]) // self.size, arrays[0].dtype
        outputs = [_new_array(length, dtype) for _ in arrays]
        if self.communicator is not None and len(arrays) == 1:
            bounds = self._bounds(len(arrays[0]))
            self.communicator.reduce_scatter(arrays[0], bounds, tag, outputs[0][1])
            return [outputs[0][0]]
        total = np.empty_like(arrays[0])
        sum_into(total, arrays)
        if self.communicator is not None:
            bounds = self._bounds(len(total))
            self.communicator.reduce_scatter(total, bounds, tag)
        slices = total.reshape(self.size, -1)
        for position, (_, data) in zip(self.positions, outputs, strict=True):
            data[:] = slices[position]
        return [tensor for tensor, _ in outputs]

    def all_gather(self, arrays: Arrays, source: int, tag: int) -> Tensors:
        """Concatenate all arrays by position; return the bytes for each local replica.

        `arrays` are the local ones; `tag` identifies the call; `source` is not used.
        """
        size = self.size
        result, data = _new_array(size * len(arrays[0]), arrays[0].dtype)
        rows = data.reshape(size, -1)
        for position, array in zip(self.positions, arrays, strict=True):
            rows[position] = array
        if self.communicator is not None:
            bounds = self._bounds(len(data))
            self.communicator.all_gather(data, bounds, tag)
        return [result] * len(arrays)

    def all_to_all(self, arrays: Arrays, source: int, tag: int) -> Tensors:
        """Send slice i of each flat array to position i; return the received bytes.

        `arrays` are the local ones; `tag` identifies the call; `source` is not used.
        """
        outputs = [_new_array(len(array), array.dtype) for array in arrays]
        sent = [array.reshape(self.size, -1) for array in arrays]
        received = [array.reshape(self.size, -1) for _, array in outputs]
        # Workers exchange one block per pair of workers, so the number of messages does
        # not grow with the number of replicas. The slices in a block are ordered by
        # sending replica, then by receiving replica.
        parts = list(itertools.pairwise(self.starts))
        outgoing = [np.concatenate([s[a:b].ravel() for s in sent]) for a, b in parts]
        incoming = [np.empty_like(block) for block in outgoing]
        incoming[self.own] = outgoing[self.own]
        if self.communicator is not None:
            self.communicator.all_to_all(outgoing, incoming, tag)
        for (begin, end), block in zip(parts, incoming, strict=True):
            rows = block.reshape(end - begin, len(arrays), -1)
            for index, result in enumerate(received):
                result[begin:end] = rows[:, index]
        return [tensor for tensor, _ in outputs]

    def broadcast(self, arrays: Arrays, source: int, tag: int) -> Tensors:
        """Copy the array of position `source`; return its bytes for each local replica.

        `arrays` are the local ones, each flat; `tag` identifies the call.
        """
        result, data = _new_array(len(arrays[0]), arrays[0].dtype)
        if source in self.positions:
            data[:] = arrays[self.positions.index(source)]
        if self.communicator is not None:
            starts = self.starts
            worker = next(i for i, end in enumerate(starts[1:]) if source < end)
            self.communicator.broadcast(data, worker, tag)
        return [result] * len(arrays)


def _new_array(length: int, dtype: np.dtype) -> tuple[tf.Tensor, np.ndarray]:
    """Create a tensor of bytes, and a view of it as `length` elements of a dtype."""
    tensor, data = new_tensor(length * dtype.itemsize)
    return tensor, data.view(dtype)
