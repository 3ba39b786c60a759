"""Record of what a worker has assigned outside of steps, where state is sharded.

Of a sharded parameter each worker holds other elements, and of one whose optimizer
state is sharded it updates other elements, which the others get: after a step no
checksum tells whether all workers have made the same assignments. These are compared
instead.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.ground.text import pluralize
from tfdp.training.replicas.checksum import MODULUS

_num_assigned = 0


def num_assigned() -> int:
    """Return the number of assignments that this process has recorded."""
    return _num_assigned


class AssignedValues:
    """What a worker has assigned to one weight since all compared it last."""

    def __init__(self) -> None:
        self._count = 0
        self._digest = ""
        # Whether workers are known to hold parts of different wholes.
        self.is_mixed = False

    def add(self, value: tf.Tensor, *, replaces: bool) -> None:
        """Record an assignment.

        Args:
            value: Tensor, the whole value.
            replaces: Bool, whether nothing of what was there before stays.
        """
        global _num_assigned
        _num_assigned += 1
        self._count += 1
        self.is_mixed &= not replaces
        before = "" if replaces else self._digest
        # In a function that is traced a value is not known, but that there is one.
        content = b"" if tf.is_symbolic_tensor(value) else _bytes_of(value)
        text = hashlib.sha256(content).hexdigest()
        self._digest = hashlib.sha256(
            f"{before} {replaces} {text}".encode()
        ).hexdigest()

    def compared(self, *, are_alike: bool) -> None:
        """Begin anew, after the workers have compared this parameter.

        Args:
            are_alike: Bool, whether all had assigned the same. If not, they are not
                alike again before all have replaced the whole.
        """
        self.is_mixed |= not are_alike
        self._count, self._digest = 0, ""

    @property
    def digest(self) -> str:
        """String that differs where workers have assigned different values, or `""`."""
        return f"{self._count} {self._digest}" if self._count else ""

    @property
    def checksum(self) -> int:
        """Int, of the digest, like those of weights."""
        return checksum_of_text(self.digest)

    @property
    def text(self) -> str:
        """String for people: how often, and a few digits of the digest."""
        if not self._count:
            return "nothing"
        return f"{pluralize(self._count, 'value')} ({self._digest[:8]})"


def recorded_weights(model: Any) -> list[Any]:
    """Return the weights of a model of which it is recorded what is assigned."""
    return [w for w in model.weights if getattr(w.value, "assigned", None) is not None]


def checksum_of_text(text: str) -> int:
    """Return an int below the modulus of the checksums of weights."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % MODULUS


def _bytes_of(value: tf.Tensor) -> memoryview:
    array = np.ascontiguousarray(value.numpy()).reshape(-1)
    return array.view(np.uint8).data
