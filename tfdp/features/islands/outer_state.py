"""Weights that all islands have in common, and their optimizer, in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp.communication.transport.communicator import Array
from tfdp.features.islands.member import Standing


class OuterState:
    """Weights after the last exchange, statistics beside them, and the outer optimizer.

    To be used on a thread without a strategy's scope: these variables are no replica's.

    Args:
        template: Keras optimizer of the outer step, not built.
        weights: Sequence of arrays, the trained weights.
        statistics: Sequence of arrays that are averaged, such as moving statistics.
    """

    def __init__(
        self, template: Any, weights: Sequence[Array], statistics: Sequence[Array]
    ) -> None:
        self._optimizer = type(template).from_config(template.get_config())
        with tf.device("CPU:0"):
            self._anchors = [keras.Variable(array) for array in weights]
            self._optimizer.build(self._anchors)
        self.statistics = list(statistics)

    @property
    def weights(self) -> list[Array]:
        """List of arrays, the trained weights."""
        return [np.array(anchor.numpy()) for anchor in self._anchors]

    @property
    def arrays(self) -> list[Array]:
        """List of arrays, the whole state."""
        slots = [np.array(variable.numpy()) for variable in self._optimizer.variables]
        return [*slots, *self.weights, *self.statistics]

    def step(self, mean: Sequence[Array]) -> None:
        """Make an outer step.

        Args:
            mean: Sequence of arrays, the mean pseudo-gradients, and then the mean
                statistics.
        """
        count = len(self._anchors)
        gradients = [tf.convert_to_tensor(array) for array in mean[:count]]
        with tf.device("CPU:0"):
            self._optimizer.apply(gradients, self._anchors)
        self.statistics = list(mean[count:])

    def take(self, standing: Standing) -> None:
        """Take a state, and make the outer steps since.

        Args:
            standing: `Standing`.

        Raises:
            ValueError: If it is the state of another model.
        """
        variables = [*self._optimizer.variables, *self._anchors]
        state = standing.state
        shapes = [tuple(v.shape) for v in variables]
        shapes += [array.shape for array in self.statistics]
        if [array.shape for array in state] != shapes:
            raise ValueError(
                "The islands do not fit together: their models, or outer optimizers, "
                "differ in shapes. Start all with the same script."
            )
        for variable, array in zip(variables, state, strict=False):
            variable.assign(array)
        self.statistics = list(state[len(variables) :])
        for mean in standing.means:
            self.step(mean)
