"""The outer step: what all hold in common, updated by what each has learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.features.local_steps.options import OuterOptions
from tfdp.ground import _compat
from tfdp.training.step.accumulation import wide_zeros

Update = Callable[[Any, Sequence[Any], Sequence[Any], Any], None]


class OuterStep:
    """The weights after the last exchange, alike everywhere, and their optimizer.

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
        with tf.init_scope():  # a step may be traced, and the rate is read
            config = template.get_config()
        self.optimizer = type(template).from_config(config)
        # No assignment here: the first step may be under way, being traced.
        self.is_begun = make_variable(
            shape=(), dtype="int", initializer="zeros", name="outer_is_begun"
        )
        self.anchors = wide_zeros(make_variable, variables, "outer")
        self.optimizer.build(self.anchors)

    @property
    def variables(self) -> list:
        """Keras variables of the inner optimizer that it has made."""
        return [self.is_begun, *self.anchors]

    @property
    def state(self) -> dict[str, Any]:
        """Dict from names to all Keras variables, those of its optimizer too."""
        own = {"is_begun": self.is_begun, "iterations": self.optimizer.iterations}
        for index, anchor in enumerate(self.anchors):
            own[f"weights/{index}"] = anchor
        slots = [v for v in self.optimizer.variables if len(v.shape)]
        return own | {f"slots/{index}": slot for index, slot in enumerate(slots)}

    @property
    def carried(self) -> list:
        """Keras variables that a worker which has missed outer steps has to take."""
        return [*self.optimizer.variables, *self.anchors]

    def end(self) -> None:
        """Start anew from the weights of the next step: callbacks may change them."""
        begun = _compat.local_part(self.is_begun)
        begun.assign(tf.zeros((), begun.dtype), read_value=False)

    def begin(self, variables: Sequence[Any]) -> None:
        """Start from the weights that training begins with, at first and after `end`.

        Where a weight is what an anchor of more digits was rounded to, that stays.
        """
        begun = _compat.local_part(self.is_begun)

        def copy() -> tf.Tensor:
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
        """By how much this replica has moved away from the common weights, negated.

        Args:
            positions: Sequence of ints, which weights.
            variables: Sequence of Keras variables, these weights of the replica.
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
        """Update some of the common weights by the replicas' mean pseudo-gradients.

        Args:
            positions: Sequence of ints, which.
            gradients: Sequence of tensors, the mean of each over all replicas.
            update: Callable that runs an optimizer, see
                `tfdp.training.step.grouped_update.decay_and_update`.

        Returns:
            List of tensors, the new common weights.
        """
        anchors = [self.anchors[position] for position in positions]
        parts = [_compat.local_part(anchor) for anchor in anchors]
        clipped = _compat.clip_gradients(self.optimizer, list(gradients))
        update(self.optimizer, clipped, anchors, None)
        if positions[-1] == len(self.anchors) - 1:
            _compat.count_update(self.optimizer, 1)
        return [part.read_value() for part in parts]
