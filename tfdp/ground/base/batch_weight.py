"""Weight of a replica's rows in the sums over a global batch, while its step runs.

Inside Keras's loops gradients are parts of a sum over replicas. Who compares replicas,
or averages what they have learned alone, counts each by its rows.
`tfdp.training.data.batch_weights` computes the weights.
"""

from __future__ import annotations

import contextlib
import dataclasses

import tensorflow as tf

from tfdp.ground.base import program_trace, step_context


@dataclasses.dataclass(frozen=True)
class BatchWeight:
    """Weight of one replica in the sums over a global batch.

    Args:
        weight: Scalar float64 tensor, the fraction of all samples that it has. In
            float32 a third, say, would limit the precision of a float64 model.
        num_samples: Scalar float32 tensor, the samples of all replicas, or `None`
            where that is unknown.
    """

    weight: tf.Tensor
    num_samples: tf.Tensor | None


def use(value: BatchWeight | None) -> contextlib.AbstractContextManager[None]:
    """Set the weight of the replica that runs in this thread."""
    return step_context.using(batch_weight=value)


def current() -> tf.Tensor | None:
    """Return the weight of the replica that runs in this thread, float64, or `None`."""
    found = _active()
    is_traced = program_trace.current() is not None
    return None if found is None or is_traced else found.weight


def num_samples() -> tf.Tensor | None:
    """Return the samples of all replicas in this step, or `None` where unknown."""
    found = _active()
    return None if found is None else found.num_samples


def _active() -> BatchWeight | None:
    return step_context.current().batch_weight


def is_part_of_sum() -> bool:
    """Return whether gradients of this thread's step are parts of a sum."""
    return _active() is not None
