"""`GradientExchange`: base class of what replaces the all-reduce of gradients."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.training.reduction.fusion import ReducedGradients


class GradientExchange:
    """Base class of gradient sums that do not wait for all replicas of a step.

    A step of `fit` then has no other collective: logs within an epoch are over the rows
    of this worker, and a step that needs values of other replicas is an error.

    Attributes:
        label: String, the user's option that selects the subclass, for messages.
    """

    label = ""

    def begin_step(self, args: tuple, total: tf.Tensor | None) -> tuple:
        """Return the arguments of a step, perhaps without some rows of the batch.

        It is called at the beginning of each step. A subclass may drop rows, for
        example all rows of a worker that is behind.

        Args:
            args: Tuple of nests of per-replica values, the rows of the local replicas.
            total: Scalar tensor, number of rows of the global batch, or `None` if it is
                unknown.

        Returns:
            Tuple like `args`, with which the step runs.
        """
        raise NotImplementedError

    def reduce(
        self, gradients: list, variables: list[Any], replica: int
    ) -> ReducedGradients:
        """Sum the gradients of a replica with those of the other replicas.

        Args:
            gradients: List of tensors and `tf.IndexedSlices`, parts of a sum over the
                rows of the global batch.
            variables: List of Keras variables, one for each gradient.
            replica: Int, index of the calling replica among the local ones.

        Returns:
            `ReducedGradients`, the same on all replicas.
        """
        raise NotImplementedError

    def sum_by_share(self, share: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
        """Sum a tensor over the workers whose gradients the step uses.

        Args:
            share: Scalar float64 tensor, rows of this worker as a fraction of all. If
                the step does not use all workers, the sum is divided by the total share
                of those that it uses, so that it stands for all rows.
            tensor: Tensor of shape `[size]`, on the host, already weighted by rows.

        Returns:
            Tensor of the same shape, the same on all workers.
        """
        raise NotImplementedError
