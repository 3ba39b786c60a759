"""Rows of a worker of a `PyDataset` that gives some rows of a batch.

The class of the user has, beside `__getitem__`, two methods: `num_rows(index)`, and
`rows(index, start, stop)` for the rows from `start` to `stop` of batch `index`. Each
worker asks for its rows only.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp.ground import _compat, user_code
from tfdp.ground.text import pluralize
from tfdp.training.data.rows import rows_to_read

# So many batches have their rows compared between workers before the first step.
_COMPARED_BATCHES = 10_000


class RowsOfBatches(keras.utils.PyDataset):
    """`PyDataset` of the rows of one worker.

    Args:
        source: `keras.utils.PyDataset` of the user, with `rows` and `num_rows`.
        ranks: Sequence of ints, consecutive, the replicas of this worker.
        num_replicas: Int, on all workers.
    """

    def __init__(self, source: Any, ranks: Sequence[int], num_replicas: int) -> None:
        super().__init__(
            source.workers, source.use_multiprocessing, source.max_queue_size
        )
        self.source = source
        self.ranks = list(ranks)
        self.num_replicas = num_replicas

    @property
    def num_batches(self) -> int | None:
        """Int, or `None` if there is no end."""
        return self.source.num_batches

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return this worker's rows of a batch, and the number of all.

        Of a batch in which it has none it has one all the same, which tells shapes.
        No operation of TensorFlow: Keras may call it in a forked process.
        """
        total = num_rows_of(self.source, index)
        own = rows_to_read(total, self.ranks, self.num_replicas)
        rows = self.source.rows(index, own.start, own.stop)
        _check_rows(self.source, index, own.start, own.stop, rows)
        return {"rows": rows, "total": np.array([total], "int64")}

    def on_epoch_begin(self) -> None:
        """Pass it on."""
        self.source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Pass it on."""
        self.source.on_epoch_end()


class RowsAdapter(_compat.RowsOfPyDatasetAdapter):
    """Data adapter of Keras for the rows of one worker.

    Args:
        dataset: `RowsOfBatches`.
        distribute: Function that takes one which makes a `tf.data.Dataset` of dicts
            of this worker's `rows` and the `total`, and returns a distributed dataset.
        class_weight: Dict or `None`, as in `fit`.
        shuffle: Bool, whether batches come in random order.
    """

    def __init__(
        self,
        dataset: RowsOfBatches,
        distribute: Callable[[Callable[[], tf.data.Dataset]], Any],
        class_weight: dict | None,
        *,
        shuffle: bool,
    ) -> None:
        super().__init__(dataset, class_weight=class_weight, shuffle=shuffle)
        self.user_data = dataset.source
        self._distribute = distribute

    def get_tf_dataset(self) -> Any:
        """Make a distributed dataset, which Keras takes as it is."""
        # Calls `rows` of the first two batches, by which Keras finds the spec.
        return self._distribute(super().get_tf_dataset)


def gives_rows(source: Any) -> bool:
    """Return whether a `PyDataset` of the user can be asked for rows.

    A class may have something else of the name `rows`: it takes no three positions.
    """
    if not isinstance(source, keras.utils.PyDataset):
        return False
    if not _takes(source, "rows", 0, 0, 1):
        return False
    if _takes(source, "num_rows", 0):
        return True
    user_code.warn(
        f"Each worker reads whole batches of {type(source).__name__}, and not only its "
        "own rows: it has `rows(index, start, stop)` and no `num_rows(index)`, which "
        "returns the number of rows of a batch."
    )
    return False


def num_rows_of(source: Any, index: int) -> int:
    """Return the number of rows of a batch, as the user's class tells it.

    Raises:
        ValueError: If it is no positive integer.
    """
    found = source.num_rows(index)
    if isinstance(found, bool) or not isinstance(found, (int, np.integer)) or found < 1:
        raise ValueError(
            f"`num_rows` of {type(source).__name__} must return the number of rows of "
            f"a batch, an integer of 1 or more. Received: num_rows({index})={found!r}"
        )
    return int(found)


def describe_batches(dataset: RowsOfBatches) -> dict[str, Any]:
    """Describe number and rows of batches, to be compared between workers.

    Raises:
        ValueError: If the number of rows of a batch is no positive integer.
    """
    num_batches = dataset.num_batches
    known = 2 if num_batches is None else min(num_batches, _COMPARED_BATCHES)
    rows = [num_rows_of(dataset.source, index) for index in range(known)]
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    return {
        "number of batches": num_batches,
        "number of rows": sum(rows),
        "digest of the rows of each batch": digest,
    }


def _takes(source: Any, name: str, *positions: int) -> bool:
    """Return whether an object has a method that takes so many positions."""
    method = getattr(source, name, None)
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*positions)
    except (TypeError, ValueError):
        return False
    return True


def _check_rows(source: Any, index: int, start: int, stop: int, rows: Any) -> None:
    """Raise if the user's class returned another number of rows than was asked for."""
    parts = [part for part in keras.tree.flatten(rows) if getattr(part, "shape", None)]
    counts = [int(part.shape[0]) for part in parts]
    if not counts or any(count != stop - start for count in counts):
        raise ValueError(
            f"`rows({index}, {start}, {stop})` of {type(source).__name__} must return "
            f"{pluralize(stop - start, 'row')} in each part of the batch. Received: "
            f"parts with these numbers of rows: {counts}"
        )
