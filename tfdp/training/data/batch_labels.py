"""Labels of the batches of generators and `PyDataset`s, which workers compare.

Each worker reads the whole generator or `PyDataset`, and only its batches show whether
all workers draw the same rows. Workers compare the labels of the first batch before
the first step. The labels of later batches are recorded, for comparisons by callbacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from tfdp.training.data.array_parts import as_numpy
from tfdp.training.data.rows import named_leaves

# A callback asks for the labels of a batch after its step, when the pipeline has read
# later batches. So labels of more batches are kept than a pipeline reads ahead.
_NUM_KEPT_BATCHES = 1000


class LabelRecord:
    """Record of the class labels of the latest batches of a `fit`.

    The labels of a batch are a dict of arrays, as `class_labels` returns it.

    Args:
        restarts: Bool, whether each epoch begins a new pass over the data, and so the
            numbers of its batches begin with 1 again. `watch` does not use it.

    Attributes:
        is_active: Bool, whether labels are kept. Defaults to `False`.
    """

    def __init__(self, *, restarts: bool) -> None:
        self.restarts = restarts
        self.is_active = False
        self._labels: dict[int, dict[str, np.ndarray]] = {}

    def watch(self, batches: Iterable) -> Iterator[Any]:
        """Yield the batches of a new pass; record their labels while `is_active`.

        The labels of the previous pass are forgotten.
        """
        # Each pass has a new dict, because the iterator of the previous pass may still
        # read ahead, and would mix its labels with those of the new pass.
        kept: dict[int, dict[str, np.ndarray]] = {}
        self._labels = kept
        for number, batch in enumerate(batches, start=1):
            if self.is_active:
                # The labels are copied, since a generator may reuse its arrays for the
                # next batch.
                labels = class_labels(batch)
                kept[number] = {name: label.copy() for name, label in labels.items()}
                kept.pop(number - _NUM_KEPT_BATCHES, None)
            yield batch

    def labels_of(self, number: int) -> dict[str, np.ndarray]:
        """Return the labels of a batch of the current pass by name; empty if not kept.

        Args:
            number: Int, number of the batch in the pass, from 1.
        """
        return self._labels.get(number, {})


def class_labels(batch: Any) -> dict[str, np.ndarray]:
    """Return the targets of a batch that are class labels, by name.

    Random augmentation on each worker may change features and targets such as masks or
    the words of a text, but not the class of a row.

    Args:
        batch: Batch of a generator or of a `PyDataset`, or `None`.

    Example:

    >>> batch = np.zeros([2, 8]), {"kind": np.array([3, 1]), "box": np.zeros([2, 4])}
    >>> class_labels(batch)
    {"y['kind']": array([3, 1])}
    """
    if not isinstance(batch, tuple) or len(batch) < 2:
        return {}
    found = {name: _labels(part) for name, part in named_leaves(batch[1], "y").items()}
    return {name: labels for name, labels in found.items() if labels is not None}


def _labels(targets: Any) -> np.ndarray | None:
    """Return targets as an array if they are class labels, or else `None`.

    Each row of class labels is a whole number, a string or a one-hot vector.
    """
    if len(getattr(targets, "shape", ())) not in (1, 2):
        return None
    try:
        values = as_numpy(targets)
    except Exception:  # noqa: BLE001 a user's array class may raise anything
        return None
    is_number = values.dtype.kind in "biuf"
    if values.ndim == 2 and values.shape[1] > 1:
        is_binary = is_number and np.isin(values, (0, 1)).all()
        return values if is_binary and (values.sum(axis=1) == 1).all() else None
    is_whole = is_number and (values == np.trunc(values)).all()
    is_label = values.ndim in (1, 2) and (is_whole or values.dtype.kind in "OSU")
    return values if is_label else None
