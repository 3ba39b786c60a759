"""The outer step: an update of the common weights by the mean pseudo-gradients.

A pseudo-gradient is the difference of the common weights and those of a replica after
its inner steps. The common, outer weights are stored in variables, the anchors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.ground._compat import keras_optimizer, tf_distribute
from tfdp.ground.base.conditions import run_if
from tfdp.training.step.accumulation import read, wide_zeros
from tfdp.training.step.grouped_update import decay_and_update


class OuterStep:
    """Outer optimizer and outer weights, which all replicas have in common.

    Args:
        template: Keras optimizer of the outer step, not built; it is copied.
        anchors: Sequence of Keras variables, the outer weights.

    Source: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of
    Language Models", https://arxiv.org/abs/2311.08105.
    """

    def __init__(self, template: Any, anchors: Sequence[Any]) -> None:
        # `init_scope` lets `get_config` read the learning rate while a step is traced.
        with tf.init_scope():
            config = template.get_config()
        self.optimizer = type(template).from_config(config)
        self.anchors = list(anchors)
        self.optimizer.build(self.anchors)

    @property
    def carried(self) -> list:
        """List of the optimizer's variables and the outer weights, Keras variables.

        A worker that has missed outer steps adopts their values from the others.
        """
        return [*self.optimizer.variables, *self.anchors]

    def update(
        self, positions: Sequence[int], gradients: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Update some of the outer weights by mean pseudo-gradients.

        A pseudo-gradient is an outer weight minus a replica's weight.

        Args:
            positions: Sequence of ints, positions of these weights in `anchors`.
            gradients: Sequence of tensors, their mean pseudo-gradients.

        Returns:
            List of tensors, the new outer weights.
        """
        anchors = [self.anchors[position] for position in positions]
        clipped = keras_optimizer.clip_gradients(self.optimizer, list(gradients))
        decay_and_update(self.optimizer, clipped, anchors, None)
        if len(self.anchors) - 1 in positions:
            keras_optimizer.count_update(self.optimizer, 1)
        return [read(anchor) for anchor in anchors]


class ReplicatedOuterStep(OuterStep):
    """Outer step whose optimizer and weights are the same on all replicas.

    Args:
        make_variable: Callable that creates a Keras variable of the inner optimizer.
        template: Keras optimizer of the outer step, not built; it is copied.
        trained: Sequence of the trained Keras variables.
    """

    def __init__(
        self, make_variable: Callable[..., Any], template: Any, trained: Sequence[Any]
    ) -> None:
        self._trained = trained
        # Whether `begin` has copied the trained weights into the anchors. `begin`
        # copies in the step, not this constructor, which may run while the first step
        # is being traced: an assignment would then become part of the graph of every
        # step.
        self.is_begun = make_variable(
            shape=(), dtype="int", initializer="zeros", name="outer_is_begun"
        )
        super().__init__(template, wide_zeros(make_variable, trained, "outer"))

    @property
    def state(self) -> dict[str, Any]:
        """Dict of the Keras variables that a checkpoint stores, by the names in it."""
        state = {"is_begun": self.is_begun, "iterations": self.optimizer.iterations}
        for index, anchor in enumerate(self.anchors):
            state[f"weights/{index}"] = anchor
        slots = [v for v in self.optimizer.variables if len(v.shape)]
        return state | {f"slots/{index}": slot for index, slot in enumerate(slots)}

    def begin(self) -> None:
        """Copy the trained weights into the anchors, if `is_begun` is zero.

        `is_begun` is zero before the first step, and after replicas have been
        equalized; this sets it to 1. An anchor, an outer weight, is kept if it equals
        the weight after rounding to the weight's dtype.
        """
        begun = tf_distribute.local_part(self.is_begun)

        def copy() -> None:
            """Copy trained weights into the outer weights, and set `is_begun` to 1."""
            for anchor, variable in zip(self.anchors, self._trained, strict=True):
                before, value = read(anchor), read(variable)
                is_kept = tf.equal(tf.cast(before, value.dtype), value)
                value = tf.where(is_kept, before, tf.cast(value, before.dtype))
                tf_distribute.local_part(anchor).assign(value, read_value=False)
            begun.assign(tf.ones((), begun.dtype), read_value=False)

        run_if(begun < 1, copy)

    def pseudo_gradients(self, positions: Sequence[int]) -> list[tf.Tensor]:
        """Return the outer weights minus this replica's weights.

        Args:
            positions: Sequence of ints, positions of the weights.
        """
        pairs = [(self.anchors[p], self._trained[p]) for p in positions]
        return [
            read(anchor) - tf.cast(read(variable), anchor.dtype)
            for anchor, variable in pairs
        ]


def assign(variables: Sequence[Any], values: Sequence[tf.Tensor]) -> None:
    """Set variables on the running replica to values, cast to the variables' dtypes.

    All values are computed before the first assignment.
    """
    with tf.control_dependencies(values):
        for variable, value in zip(variables, values, strict=True):
            part = tf_distribute.local_part(variable)
            part.assign(tf.cast(value, part.dtype), read_value=False)
