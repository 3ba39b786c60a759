"""How variables and slots lie on the replicas: the seam for sharded state."""

from __future__ import annotations

from typing import Any, Protocol

import tensorflow as tf

from tfdp import _compat
from tfdp.fused_update import decay_and_update
from tfdp.ownership import own_step
from tfdp.traits import Part


class StateLayout(Protocol):
    """What a step does with reduced gradients, wherever the state lies."""

    def clip(self, part: Part, gradients: list) -> list:
        """Clips the gradients of a part as its optimizer was asked to."""

    def scale_momentum(self, part: Part, growth: Any) -> None:
        """Multiplies the momentum of a part that contains the learning rate."""

    def update(self, part: Part, gradients: list, variables: list, rate: Any) -> None:
        """Decays and updates the variables of a part."""


class WholeVariables:
    """Every replica holds every variable and slot, as Keras makes them."""

    def clip(self, part: Part, gradients: list) -> list:
        """Clips as Keras does, on the sums of all replicas."""
        with own_step():
            return _compat.clip_gradients(part.optimizer, gradients)

    def scale_momentum(self, part: Part, growth: Any) -> None:
        """Multiplies every momentum.

        Source: Goyal et al. 2017, https://arxiv.org/abs/1706.02677, remark 2.
        """
        slots = [
            _compat.local_part(m) for m in part.optimizer.momentums if m is not None
        ]

        def scale() -> tf.Tensor:
            for slot in slots:
                slot.assign(slot * tf.cast(growth, slot.dtype), read_value=False)
            return tf.constant(True)

        # After the warmup it costs nothing.
        tf.cond(tf.equal(growth, 1.0), lambda: tf.constant(False), scale)

    def update(self, part: Part, gradients: list, variables: list, rate: Any) -> None:
        """Decays and updates as Keras does, small variables together."""
        decay_and_update(part.optimizer, gradients, variables, rate)
