"""What a step would assign to the state of compressors, if it is kept."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdp.ground.base import step_context


@dataclasses.dataclass
class StepResiduals:
    """What a step would assign to the states of compressors.

    Args:
        unit_of: Callable that returns a scalar tensor, by which gradients are larger
            than those of the loss, or `None`. Defaults to that of `None`.
        assignments: List with lists of pairs, a variable and its new value: one for
            each level of each bucket. Defaults to none.
    """

    unit_of: Callable[[], tf.Tensor | None] = lambda: None
    assignments: list[list[tuple[Any, tf.Tensor]]] = dataclasses.field(
        default_factory=list
    )

    def keep(self) -> None:
        """Assign it: the step is kept."""
        for group in self.assignments:
            for variable, value in group:
                variable.assign(value, read_value=False)

    def keep_finite(self) -> None:
        """Assign what is finite, where nobody knows yet if the step will be kept."""
        for group in self.assignments:
            floats = [value for _, value in group if value.dtype.is_floating]
            flags = [tf.reduce_all(tf.math.is_finite(value)) for value in floats]
            is_finite = tf.reduce_all([tf.constant(True), *flags])
            for variable, value in group:
                old = variable.read_value()
                variable.assign(tf.where(is_finite, value, old), read_value=False)


@contextlib.contextmanager
def step_residuals(
    unit_of: Callable[[], tf.Tensor | None] = lambda: None,
) -> Iterator[StepResiduals]:
    """Collect what the reductions of this thread would assign.

    Args:
        unit_of: Callable, see `StepResiduals`. It is called where a bucket is
            compressed.
    """
    collected = StepResiduals(unit_of)
    with step_context.using(residuals=collected):
        yield collected


def gradient_unit() -> tf.Tensor | None:
    """Return by how much this step's gradients are larger than those of the loss."""
    collected = _collected()
    return None if collected is None else collected.unit_of()


def assign_if_kept(changed: list[tuple[Any, tf.Tensor]]) -> None:
    """Assign new values once it is known that this thread's step is kept.

    Args:
        changed: List of pairs, a variable and its new value: one level of a bucket.
    """
    collected = _collected()
    if collected is not None:
        collected.assignments.append(changed)
    else:
        StepResiduals(assignments=[changed]).keep_finite()


def _collected() -> StepResiduals | None:
    return step_context.current().residuals
