"""Operations of a step that compute with parameters, in the order of tracing."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfdp.ground import _compat

# Operations that are done as soon as their input is there, whatever it holds.
_IMMEDIATE = frozenset(
    ("Const", "Identity", "IdentityN", "NoOp", "Rank", "Reshape", "Shape", "ShapeN")
)


class ComputeOrder:
    """Operations that depend on gathered parameters, found while a step is traced.

    Args:
        graph: The graph of the step.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._num_scanned = len(graph.get_operations())
        self._dependent: set[tf.Operation] = set()
        # Those that compute, and their ages.
        self._ages: list[int] = []
        self._computing: list[tf.Operation] = []

    def newest(self) -> int:
        """Int, the age of the operation that was traced last."""
        traced = self._graph.get_operations()
        return _compat.op_age(traced[-1]) if traced else 0

    def begin_with(self, tensors: Iterable[tf.Tensor]) -> None:
        """Take what is computed of these tensors for computing, too."""
        self._scan()
        self._dependent.update(tensor.op for tensor in tensors)

    def last_until(self, age: int) -> list[tf.Operation]:
        """The last operation of at most an age that computes: none, or one."""
        self._scan()
        index = bisect.bisect_right(self._ages, age)
        return self._computing[index - 1 : index] if index else []

    def _scan(self) -> None:
        new = self._graph.get_operations()[self._num_scanned :]
        for op in new:
            if not any(tensor.op in self._dependent for tensor in op.inputs):
                continue
            self._dependent.add(op)
            if op.outputs and op.type not in _IMMEDIATE:
                self._ages.append(_compat.op_age(op))
                self._computing.append(op)
        self._num_scanned += len(new)
