"""The outer step: an update of the common weights by the mean pseudo-gradients.

A pseudo-gradient is the difference of the common weights and those of a replica after
its inner steps. The common, outer weights are stored in variables, the anchors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.features.local_steps.options import OuterOptions
from tfdp.ground import _compat
from tfdp.training.step.accumulation import wide_zeros

# Callable that updates variables by an optimizer, with the signature of
# `tfdp.training.step.grouped_update.decay_and_update`.
Update = Callable[[Any, Sequence[Any], Sequence[Any], Any], None]


class OuterStep:
    """The outer optimizer and its weights, those after the last exchange.

    They are the same on all replicas.

    Args:
        make_variable: Callable that creates a Keras variable of the inner optimizer.
        options: `OuterOptions`.
        variables: Sequence of the trained Keras variables.

    Source: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of
    Language Models", https://arxiv.org/abs/2311.08105.
    """

    def __init__(
        self,
        make_variable: Callable[..., Any],
        options: OuterOptions,
        variables: Sequence[Any],
    ) -> None:
        template = options.optimizer
        with tf.init_scope():  # `get_config` reads the rate, even during a trace
            config = template.get_config()
        self.optimizer = type(template).from_config(config)
        # The weights are copied by `begin` in the step: an assignment here would become
        # part of the graph if the first step is being traced.
        self.is_begun = make_variable(
            shape=(), dtype="int", initializer="zeros", name="outer_is_begun"
        )
        self.anchors = wide_zeros(make_variable, variables, "outer")
        self.optimizer.build(self.anchors)

    @property
    def variables(self) -> list:
        """List of the Keras variables that it created in the inner optimizer."""
        return [self.is_begun, *self.anchors]

    @property
    def state(self) -> dict[str, Any]:
        """Dict from names to Keras variables, including the outer optimizer's."""
        state = {"is_begun": self.is_begun, "iterations": self.optimizer.iterations}
        for index, anchor in enumerate(self.anchors):
            state[f"weights/{index}"] = anchor
        slots = [v for v in self.optimizer.variables if len(v.shape)]
        return state | {f"slots/{index}": slot for index, slot in enumerate(slots)}

    @property
    def carried(self) -> list:
        """List of the Keras variables that a worker that missed outer steps adopts."""
        return [*self.optimizer.variables, *self.anchors]

    def end(self) -> None:
        """Have the next step copy the weights again, which callbacks may change."""
        begun = _compat.local_part(self.is_begun)
        begun.assign(tf.zeros((), begun.dtype), read_value=False)

    def begin(self, variables: Sequence[Any]) -> None:
        """Copy the weights into the anchors, in the first step and after `end`.

        An anchor is kept if it equals the weight after rounding to the weight's dtype.

        Args:
            variables: Sequence of Keras variables, the trained weights.
        """
        begun = _compat.local_part(self.is_begun)

        def copy() -> tf.Tensor:
            """Copy the weights, and mark them as copied; return true for `tf.cond`."""
            for anchor, variable in zip(self.anchors, variables, strict=True):
                part = _compat.local_part(anchor)
                value = _compat.local_part(variable).read_value()
                before = part.read_value()
                is_kept = tf.equal(tf.cast(before, value.dtype), value)
                value = tf.where(is_kept, before, tf.cast(value, part.dtype))
                part.assign(value, read_value=False)
            begun.assign(tf.ones((), begun.dtype), read_value=False)
            return tf.constant(True)

        tf.cond(begun > 0, lambda: tf.constant(False), copy)

    def pseudo_gradients(
        self, positions: Sequence[int], variables: Sequence[Any]
    ) -> list[tf.Tensor]:
        """Return the outer weights minus this replica's weights.

        Args:
            positions: Sequence of ints, positions of the weights.
            variables: Sequence of Keras variables, the weights at these positions.
        """
        parts = [_compat.local_part(self.anchors[position]) for position in positions]
        return [
            part.read_value()
            - tf.cast(_compat.local_part(variable).read_value(), part.dtype)
            for part, variable in zip(parts, variables, strict=True)
        ]

    def update(
        self, positions: Sequence[int], gradients: Sequence[tf.Tensor], update: Update
    ) -> list[tf.Tensor]:
        """Update some of the outer weights by mean pseudo-gradients.

        Args:
            positions: Sequence of ints, positions of the weights.
            gradients: Sequence of tensors, their mean pseudo-gradients.
            update: Callable that runs an optimizer, see
                `tfdp.training.step.grouped_update.decay_and_update`.

        Returns:
            List of tensors, the new outer weights.
        """
        anchors = [self.anchors[position] for position in positions]
        parts = [_compat.local_part(anchor) for anchor in anchors]
        clipped = _compat.clip_gradients(self.optimizer, list(gradients))
        update(self.optimizer, clipped, anchors, None)
        if positions[-1] == len(self.anchors) - 1:
            _compat.count_update(self.optimizer, 1)
        return [part.read_value() for part in parts]
