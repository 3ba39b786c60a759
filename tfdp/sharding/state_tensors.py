"""What a checkpoint holds: tensors of which every process has some elements."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

# Elements that are read at a time: a few megabytes, however large a tensor is.
READ_ELEMENTS = 2**20


@dataclasses.dataclass(frozen=True)
class Piece:
    """Elements of a state tensor that a variable of this process holds.

    Elements are counted in the flattened tensor, and so from `start` to `stop`.

    Args:
        start: Int, the first element.
        stop: Int, one after the last.
        read: Callable that returns them as a flat array of `stop - start`
            elements.
        write: Callable that takes such an array.
        read_part: Callable that takes two ints and returns the elements between
            them, counted from `start`, without copying the others; or `None`.
            Defaults to `None`.
    """

    start: int
    stop: int
    read: Callable[[], np.ndarray]
    write: Callable[[Any], None]
    read_part: Callable[[int, int], np.ndarray] | None = None

    def cut(self, most: int) -> list[Piece]:
        """Pieces of at most so many elements, to be read one after the other.

        Args:
            most: Int.

        Returns:
            List of `Piece`; only itself where it cannot be read in parts.
        """
        if self.read_part is None:
            return [self]
        return [
            Piece(
                first,
                min(first + most, self.stop),
                functools.partial(
                    self.read_part,
                    first - self.start,
                    min(first + most, self.stop) - self.start,
                ),
                _not_written,
            )
            for first in range(self.start, self.stop, most)
        ]


def _not_written(values: Any) -> None:
    """What is cut is only read."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class StateTensor:
    """A tensor of the training state, whole or in slices on the replicas.

    Args:
        name: String, unique among all, and the same on every worker.
        shape: Tuple of ints.
        dtype: String.
        owned: Tuple of `Piece`: what this process writes into a checkpoint.
            Those of all processes together hold every element once.
        held: Tuple of `Piece`: all that this process needs from one. Several
            may hold the same elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    owned: tuple[Piece, ...]
    held: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Int, the number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


def renamed(tensor: StateTensor, name: str) -> StateTensor:
    """The same tensor by another name."""
    return dataclasses.replace(tensor, name=name)
