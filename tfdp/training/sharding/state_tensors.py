"""State tensors: named tensors of which every process has some elements."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

# Elements that are read at a time: a few megabytes, however large a tensor is.
READ_ELEMENTS = 2**20


@dataclasses.dataclass(frozen=True)
class LocalShard:
    """Elements of a state tensor that a variable of this process holds.

    Elements are counted in the flattened tensor, and so from `start` to `stop`.

    Args:
        start: Int, the first element.
        stop: Int, one after the last.
        read: Callable that returns them as a flat array of `stop - start`
            elements.
        write: Callable that takes such an array.
        read_range: Callable that takes two ints and returns the elements between
            them, counted from `start`, without copying the others; or `None`.
            Defaults to `None`.
    """

    start: int
    stop: int
    read: Callable[[], np.ndarray]
    write: Callable[[Any], None]
    read_range: Callable[[int, int], np.ndarray] | None = None

    def split(self, max_elements: int) -> list[LocalShard]:
        """Split into shards of at most so many elements, to read one after the other.

        Args:
            max_elements: Int.

        Returns:
            List of `LocalShard`; only itself where it cannot be read in parts.
        """
        if self.read_range is None:
            return [self]
        return [
            LocalShard(
                first,
                min(first + max_elements, self.stop),
                functools.partial(
                    self.read_range,
                    first - self.start,
                    min(first + max_elements, self.stop) - self.start,
                ),
                _not_written,
            )
            for first in range(self.start, self.stop, max_elements)
        ]


def _not_written(values: Any) -> None:
    """Refuse to write: split shards are only read."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class StateTensor:
    """Named tensor of the training state, whole or in shards on the replicas.

    Args:
        name: String, unique among all, and the same on every worker.
        shape: Tuple of ints.
        dtype: String.
        owned_shards: Tuple of `LocalShard`: what this process writes into a checkpoint.
            Those of all processes together hold every element once.
        local_shards: Tuple of `LocalShard`: all that this process needs from one.
            Several may hold the same elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    owned_shards: tuple[LocalShard, ...]
    local_shards: tuple[LocalShard, ...]

    @property
    def size(self) -> int:
        """Int, number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


def renamed(tensor: StateTensor, name: str) -> StateTensor:
    """Copy of a state tensor with another name."""
    return dataclasses.replace(tensor, name=name)
