"""New states of compressors that a step assigns, unless it is skipped."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdp.ground.base import step_context


@dataclasses.dataclass
class StepResiduals:
    """New values of compressor states that a step assigns only if it is not skipped.

    Args:
        scale_of: Callable that returns the factor of the gradients, such as the loss
            scale, as a scalar tensor, or `None`. By default it returns `None`.
        assignments: List with a list for each level of each bucket, of pairs of a
            variable and its new value. Defaults to an empty list.
    """

    scale_of: Callable[[], tf.Tensor | None] = lambda: None
    assignments: list[list[tuple[Any, tf.Tensor]]] = dataclasses.field(
        default_factory=list
    )

    def assign_all(self) -> None:
        """Assign all new values of the step, which is known not to be skipped."""
        for group in self.assignments:
            for variable, value in group:
                variable.assign(value, read_value=False)

    def assign_finite(self) -> None:
        """Assign the new values of each state whose new values are all finite.

        For steps in which no check for overflow tells whether they are skipped.
        """
        for group in self.assignments:
            floats = [value for _, value in group if value.dtype.is_floating]
            flags = [tf.reduce_all(tf.math.is_finite(value)) for value in floats]
            is_finite = tf.reduce_all([tf.constant(True), *flags])
            for variable, value in group:
                old = variable.read_value()
                variable.assign(tf.where(is_finite, value, old), read_value=False)


@contextlib.contextmanager
def step_residuals(
    scale_of: Callable[[], tf.Tensor | None] = lambda: None,
) -> Iterator[StepResiduals]:
    """Collect this thread's assignments to states of compressors, without running them.

    Args:
        scale_of: Callable that returns the factor of the gradients, such as the loss
            scale, as a scalar tensor, or `None`. It is called when a bucket is
            compressed. By default it returns `None`.

    Yields:
        `StepResiduals` with the collected assignments, which its methods run.
    """
    collected = StepResiduals(scale_of)
    with step_context.using(residuals=collected):
        yield collected


def gradient_scale() -> tf.Tensor | None:
    """Return the factor of this step's gradients, such as the loss scale.

    Returns:
        Scalar tensor, or `None` if gradients have no factor, or outside of
        `step_residuals`.
    """
    collected = _current()
    return None if collected is None else collected.scale_of()


def assign_if_kept(changed: list[tuple[Any, tf.Tensor]]) -> None:
    """Register new values of a state, assigned later if this step is not skipped.

    Outside of `step_residuals`, they are assigned at once if all are finite.

    Args:
        changed: List of pairs of a variable and its new value, on one level of a
            bucket.
    """
    collected = _current()
    if collected is not None:
        collected.assignments.append(changed)
    else:
        StepResiduals(assignments=[changed]).assign_finite()


def _current() -> StepResiduals | None:
    """Return the `StepResiduals` of the step that this thread traces, if any.

    It is `None` outside of `step_residuals`.
    """
    return step_context.current().residuals
