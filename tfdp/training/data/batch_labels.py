"""Labels of the batches that Python code of the user gives, to compare workers by.

A generator or a `PyDataset` is read by every worker, and nothing but its batches tells
whether all draw the same rows. The labels of the first batch are compared before the
first step, those of later ones by `ConsistencyCheck`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from tfdp.training.data.fingerprints import as_numpy
from tfdp.training.data.rows import named_leaves

_NUM_KEPT_BATCHES = 1000  # more than are read ahead of the step


class LabelRecord:
    """Record of the labels of the latest batches of a `fit`.

    Args:
        restarts: Bool, whether a pass over the data begins with each epoch.

    Attributes:
        is_active: Bool, whether labels are kept. Defaults to `False`.
    """

    def __init__(self, *, restarts: bool) -> None:
        self.restarts = restarts
        self.is_active = False
        self._labels: dict[int, dict[str, np.ndarray]] = {}

    def watch(self, batches: Iterable) -> Iterator[Any]:
        """Pass on the batches of a pass over the data."""
        # An iterator of a pass before may be read ahead still.
        kept: dict[int, dict[str, np.ndarray]] = {}
        self._labels = kept
        for number, batch in enumerate(batches, start=1):
            if self.is_active:
                # A generator may use its arrays again.
                found = class_labels(batch)
                kept[number] = {name: label.copy() for name, label in found.items()}
                kept.pop(number - _NUM_KEPT_BATCHES, None)
            yield batch

    def labels_of(self, number: int) -> dict[str, np.ndarray]:
        """Return the labels of a batch of this pass by name, as far as kept.

        Args:
            number: Int, the first batch has 1.
        """
        return self._labels.get(number, {})


def class_labels(batch: Any) -> dict[str, np.ndarray]:
    """Return the targets of a batch that are labels of classes, by name.

    Each worker may augment rows at random, which changes features, and targets such as
    masks or the words of a text; it keeps the class of a row.

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
    """Targets of which each row is one whole number or string, or one-hot."""
    if len(getattr(targets, "shape", ())) not in (1, 2):
        return None
    try:
        values = as_numpy(targets)
    except Exception:  # noqa: BLE001 an array is any class of a user's
        return None
    is_number = values.dtype.kind in "biuf"
    if values.ndim == 2 and values.shape[1] > 1:
        is_binary = is_number and np.isin(values, (0, 1)).all()
        return values if is_binary and (values.sum(axis=1) == 1).all() else None
    is_whole = is_number and (values == np.trunc(values)).all()
    is_label = values.ndim in (1, 2) and (is_whole or values.dtype.kind in "OSU")
    return values if is_label else None
