"""The order of shuffled arrays, which can be repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdp import _compat


class SeededOrder:
    """Makes a dataset of shuffled arrays for each epoch, in an order of its own.

    TensorFlow repeats the permutation of a seeded dataset, and gives one without a
    seed another permutation that nobody can repeat.

    Args:
        first: Int, the seed of the first epoch.
        make: Callable that returns the dataset.
    """

    def __init__(self, first: int, make: Callable) -> None:
        self.first = first
        self.epoch = 0
        self._make = make

    def __call__(self) -> Any:
        with _compat.temporary_seed(self.first + self.epoch):
            dataset = self._make()
        self.epoch += 1
        return dataset
