"""Record of a worker's assignments outside of steps, where state is sharded.

Each worker holds different elements of a sharded parameter. If only the optimizer
state is sharded, each worker updates different elements and sends them to the others.
In both cases a checksum of the weights after a step does not show whether all workers
have made the same assignments, so the workers compare records of the assignments.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.ground._compat import tf_distribute
from tfdp.ground.text import pluralize
from tfdp.training.replicas.checksum import MODULUS

_num_assigned = 0
_are_common = False


def num_assigned() -> int:
    """Return the number of assignments that all `AssignedValues` have recorded."""
    return _num_assigned


@contextlib.contextmanager
def common_values() -> Iterator[None]:
    """Open a context in which assignments are recorded without their values.

    It is for values that are the same on all workers. Workers that restore a state have
    compared its identity: comparing its bytes would take a third of the time of a
    restore from memory.

    Example:

    >>> records = AssignedValues(), AssignedValues()
    >>> with common_values():
    ...     for record, value in zip(records, (1.0, 2.0)):
    ...         record.add(tf.constant(value), replaces=True)
    >>> records[0].digest == records[1].digest
    True
    >>> for record, value in zip(records, (1.0, 2.0)):
    ...     record.add(tf.constant(value), replaces=True)
    >>> records[0].digest == records[1].digest
    False
    """
    global _are_common
    _are_common = True
    try:
        yield
    finally:
        _are_common = False


class AssignedValues:
    """Record of a worker's assignments to one weight since the last comparison.

    It keeps the number of assignments, and a hash of the last value that replaced the
    weight and of the values added since. Workers compare `digest`, which contains the
    number and the hash, and `is_mixed`: whether an earlier comparison has found a
    difference, and the weight was not replaced since.
    """

    def __init__(self) -> None:
        self._count = 0
        self._digest = ""
        # Values that differ between workers still differ after the record is cleared.
        # So this stays true until this worker replaces the weight entirely.
        self.is_mixed = False

    def add(self, value: tf.Tensor, *, replaces: bool) -> None:
        """Record an assignment to the weight, by a hash of its value.

        Args:
            value: Tensor, the whole value that is assigned, or that is added.
            replaces: Bool, whether the assignment replaces the previous value entirely.
        """
        global _num_assigned
        _num_assigned += 1
        self._count += 1
        self.is_mixed &= not replaces
        before = "" if replaces else self._digest
        # While a function is traced, the value is unknown: only the fact of an
        # assignment is recorded.
        is_unknown = tf.is_symbolic_tensor(value)
        content = b"" if is_unknown or _are_common else _bytes_of(value)
        text = f"{before} {replaces} {hashlib.sha256(content).hexdigest()}"
        self._digest = hashlib.sha256(text.encode()).hexdigest()

    def clear_after_comparison(self, *, are_alike: bool) -> None:
        """Clear the record after the workers have compared this weight.

        Args:
            are_alike: Bool, whether all workers had made the same assignments. If not,
                `is_mixed` is true until an assignment replaces the weight.
        """
        self.is_mixed |= not are_alike
        self._count, self._digest = 0, ""

    @property
    def digest(self) -> str:
        """String, equal on workers with the same assignments; `""` without any."""
        return f"{self._count} {self._digest}" if self._count else ""

    @property
    def checksum(self) -> int:
        """Int, checksum of the digest, which is added to the checksum of the weight."""
        return checksum_of_text(self.digest)

    @property
    def text(self) -> str:
        """String for messages: the number of assignments and the digest's beginning."""
        if not self._count:
            return "nothing"
        return f"{pluralize(self._count, 'value')} ({self._digest[:8]})"


def recorded_weights(model: Any) -> list[Any]:
    """Return the weights of a model that record assignments outside of steps."""
    return [w for w in model.weights if getattr(w.value, "assigned", None) is not None]


def checksum_of_text(text: str) -> int:
    """Return a checksum of a string, an int below `MODULUS`."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % MODULUS


def _bytes_of(value: tf.Tensor) -> memoryview:
    """Return the bytes of a tensor's value."""
    array = np.ascontiguousarray(tf_distribute.view_of(value)).reshape(-1)
    return array.view(np.uint8).data
